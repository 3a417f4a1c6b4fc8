#include "sync.hpp"

#include <fcntl.h>
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
    pending = 0;
    usable_ = io_uring_queue_init(kEntries, &ring_, 0) == 0;
    if (usable_) io_uring_ring_dontfork(&ring_);
    return usable_ ? &ring_ : nullptr;
  }

  unsigned pending = 0;  // submitted, or to be, and not yet seen to end

  void drop() {
    if (!usable_) return;
    usable_ = false;
    if (owner_ == ::getpid()) {
      io_uring_queue_exit(&ring_);
    } else {
      ::close(ring_.ring_fd);
    }
    owner_ = -1;
  }

 private:
  io_uring ring_{};
  pid_t owner_ = -1;
  bool usable_ = false;
};

ThreadRing& thread_ring() {
  thread_local ThreadRing ring;
  return ring;
}

constexpr uint64_t kNotAnItem = UINT64_MAX;

bool start_by_ring(const sys::File& file) {
  io_uring* ring = thread_ring().get();
  io_uring_sqe* sqe = ring != nullptr ? io_uring_get_sqe(ring) : nullptr;
  if (sqe == nullptr) return false;
  io_uring_prep_sync_file_range(sqe, file.fd(), 0, 0, SYNC_FILE_RANGE_WRITE);
  io_uring_sqe_set_data64(sqe, kNotAnItem);
  ++thread_ring().pending;
  // Should it not be taken now, it goes along with the next submission.
  io_uring_submit(ring);
  return true;
}

// Fills `results` with 0 or -errno per item; false when there is no ring to do it with.
bool sync_by_ring(const std::vector<Syncing>& items, std::vector<std::optional<int>>& results) {
  io_uring* ring = thread_ring().get();
  if (ring == nullptr || io_uring_sq_space_left(ring) < items.size() + 1) return false;
  unsigned& pending = thread_ring().pending;
  // Nothing after this one starts before what was submitted earlier has ended.
  io_uring_sqe* barrier = io_uring_get_sqe(ring);
  io_uring_prep_nop(barrier);
  io_uring_sqe_set_flags(barrier, IOSQE_IO_DRAIN);
  io_uring_sqe_set_data64(barrier, kNotAnItem);
  ++pending;
  for (size_t i = 0; i < items.size(); ++i) {
    if (results[i]) continue;
    io_uring_sqe* sqe = io_uring_get_sqe(ring);
    io_uring_prep_fsync(sqe, items[i].file.fd(), items[i].is_directory ? 0 : IORING_FSYNC_DATASYNC);
    io_uring_sqe_set_data64(sqe, i);
    ++pending;
  }
  while (pending > 0) {
    // One wait for all: being woken for each of them would cost as much as a sync.
    const int result = io_uring_submit_and_wait(ring, pending);
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
      thread_ring().drop();  // what may still end on it belongs to nobody
      throw sys::Error{-result, sys::Call::sync, items[0].file.path()};
    }
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(ring, &cqe) == 0) {
      const uint64_t item = io_uring_cqe_get_data64(cqe);
      if (item != kNotAnItem) results[item] = cqe->res;
      io_uring_cqe_seen(ring, cqe);
      --pending;
    }
  }
  return true;
}

#else

bool start_by_ring(const sys::File&) { return false; }

bool sync_by_ring(const std::vector<Syncing>&, std::vector<std::optional<int>>&) { return false; }

#endif

}  // namespace

void start_writeback(const sys::File& file) {
  if (!start_by_ring(file)) ::sync_file_range(file.fd(), 0, 0, SYNC_FILE_RANGE_WRITE);
}

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
