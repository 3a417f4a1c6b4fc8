#include "sync.hpp"

#include <unistd.h>

#include <cerrno>
#include <optional>

#if HOLDFAST_HAVE_URING
#include <liburing.h>
#endif

namespace holdfast {
namespace {

#if HOLDFAST_HAVE_URING

constexpr unsigned kEntries = 16;

// Setting up a ring costs as much as a sync of a small file, so a thread keeps its own. A forked child inherits
// neither the ring's memory (liburing is told so) nor the right to use it.
class ThreadRing {
 public:
  ~ThreadRing() { drop(); }

  io_uring* get() {
    if (owner_ == ::getpid()) return usable_ ? &ring_ : nullptr;
    drop();
    owner_ = ::getpid();
    usable_ = io_uring_queue_init(kEntries, &ring_, 0) == 0;
    if (usable_) io_uring_ring_dontfork(&ring_);
    return usable_ ? &ring_ : nullptr;
  }

 private:
  void drop() {
    if (!usable_) return;
    usable_ = false;
    if (owner_ == ::getpid()) {
      io_uring_queue_exit(&ring_);
    } else {
      ::close(ring_.ring_fd);
    }
  }

  io_uring ring_{};
  pid_t owner_ = -1;
  bool usable_ = false;
};

// Fills `results` with 0 or -errno per item; false when there is no ring to do it with.
bool sync_by_ring(const std::vector<Syncing>& items, std::vector<std::optional<int>>& results) {
  thread_local ThreadRing keeper;
  io_uring* ring = items.size() <= kEntries ? keeper.get() : nullptr;
  if (ring == nullptr) return false;
  unsigned count = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (results[i]) continue;
    io_uring_sqe* sqe = io_uring_get_sqe(ring);
    io_uring_prep_fsync(sqe, items[i].file.fd(), items[i].is_directory ? 0 : IORING_FSYNC_DATASYNC);
    io_uring_sqe_set_data64(sqe, i);
    ++count;
  }
  unsigned submitted = 0;
  while (submitted < count) {
    const int result = io_uring_submit(ring);
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
      throw sys::Error{-result, sys::Call::sync, items[0].file.path()};
    }
    if (result > 0) submitted += static_cast<unsigned>(result);
  }
  while (count > 0) {
    io_uring_cqe* cqe = nullptr;
    const int result = io_uring_wait_cqe(ring, &cqe);
    if (result == -EINTR || result == -EAGAIN) continue;
    if (result < 0) throw sys::Error{-result, sys::Call::sync, items[0].file.path()};
    results[io_uring_cqe_get_data64(cqe)] = cqe->res;
    io_uring_cqe_seen(ring, cqe);
    --count;
  }
  return true;
}

#else

bool sync_by_ring(const std::vector<Syncing>&, std::vector<std::optional<int>>&) { return false; }

#endif

}  // namespace

void sync_together(std::vector<Syncing> items) {
  std::vector<std::optional<int>> results(items.size());
  const auto call_of = [](const Syncing& item) {
    return item.is_directory ? sys::Call::sync_dir : sys::Call::sync;
  };
  for (size_t i = 0; i < items.size(); ++i) {
    if (const auto told = sys::intercept(call_of(items[i]), 0); told && *told < 0) {
      results[i] = static_cast<int>(*told);
    }
  }
  if (!sync_by_ring(items, results)) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (results[i]) continue;
      const int fd = items[i].file.fd();
      results[i] = (items[i].is_directory ? ::fsync(fd) : ::fdatasync(fd)) == 0 ? 0 : -errno;
    }
  }
  for (size_t i = 0; i < items.size(); ++i) {
    if (*results[i] == 0) sys::observe_sync(call_of(items[i]), items[i].file);
  }
  for (size_t i = 0; i < items.size(); ++i) {
    if (*results[i] < 0) throw sys::Error{-*results[i], call_of(items[i]), items[i].file.path()};
  }
}

}  // namespace holdfast
