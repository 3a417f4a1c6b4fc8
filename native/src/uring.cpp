// The io_uring queue. Built without liburing, it reports itself unavailable and `threads` takes its place.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "queue.hpp"

#if EVERYSTEP_HAVE_URING
#include <liburing.h>
#endif

namespace everystep {

#if EVERYSTEP_HAVE_URING

namespace {

// Set when a call on a ring fails and will not work again, for example because a seccomp filter was installed
// while the program runs. Later jobs do not try.
std::atomic<bool> rings_fail{false};

// liburing's calls return -errno, and so does this where a test makes them fail.
template <typename Function>
int on_ring(Function function) {
  const int code = sys::injected_error(sys::Call::ring);
  return code != 0 ? -code : function();
}

// One thread makes, uses and destroys it.
class UringQueue final : public Queue {
 public:
  explicit UringQueue(unsigned depth) : depth_(depth) {
    int result = -EINVAL;
#ifdef IORING_SETUP_COOP_TASKRUN
    // Completions need not interrupt the thread that submits and reaps. They still arrive whenever it enters the
    // kernel, by whatever call: so they are seen, too, when calls on the ring itself fail (`reap_by_looking`).
    result = on_ring([&] { return io_uring_queue_init(depth, &ring_, IORING_SETUP_COOP_TASKRUN); });
#endif
    // Before Linux 5.19:
    if (result == -EINVAL) result = on_ring([&] { return io_uring_queue_init(depth, &ring_, 0); });
    if (result < 0) throw sys::Error{-result, sys::Call::ring, "io_uring"};
    // A forked data-loader worker must not share the ring's memory with us.
    io_uring_ring_dontfork(&ring_);
  }

  ~UringQueue() override {
    // An error may end the job early, but the kernel still moves this memory.
    while (in_flight_ > 0) reap();
    io_uring_queue_exit(&ring_);
  }

  void submit(Transfer& transfer) override {
    if (instead_) return instead_->submit(transfer);
    transfer.done = false;
    const sys::Call call = transfer.is_write ? sys::Call::write : sys::Call::read;
    if (const auto told = sys::intercept(call, transfer.nbytes())) {
      transfer.result = *told > 0 ? partial(transfer, static_cast<uint64_t>(*told)) : *told;
      transfer.done = true;
      return;
    }
    if (hand_over(transfer)) {
      ++in_flight_;
      return;
    }
    // Threads take over only when the kernel has finished what it has.
    rings_fail = true;
    while (in_flight_ > 0) reap();
    instead_ = kThreads.make_queue(depth_);
    instead_->submit(transfer);
  }

  void wait(Transfer& transfer) override {
    if (instead_) return instead_->wait(transfer);
    while (!transfer.done) reap();
  }

 private:
  // False when the kernel does not take it.
  bool hand_over(Transfer& transfer) {
    io_uring_sqe* sqe = failed_ ? nullptr : io_uring_get_sqe(&ring_);
    if (sqe == nullptr) return false;
    const auto count = static_cast<unsigned>(segments(transfer));
    if (transfer.is_write) {
      io_uring_prep_writev(sqe, transfer.file->fd(), transfer.iov.data(), count, transfer.offset);
    } else {
      io_uring_prep_readv(sqe, transfer.file->fd(), transfer.iov.data(), count, transfer.offset);
    }
    io_uring_sqe_set_data(sqe, &transfer);
    int result = on_ring([&] { return io_uring_submit(&ring_); });
    for (int tries = 0; again(result) && tries < kMaxTries; ++tries) {
      if (in_flight_ > 0) reap();
      result = on_ring([&] { return io_uring_submit(&ring_); });
    }
    return result >= 0;
  }

  // Notes one completion of those that are under way. Never throws: the destructor waits here, too.
  void reap() noexcept {
    io_uring_cqe* cqe = nullptr;
    int result = failed_ ? -ENOSYS : -EINTR;
    for (int tries = 0; again(result) && tries < kMaxTries; ++tries) {
      result = on_ring([&] { return io_uring_wait_cqe(&ring_, &cqe); });
    }
    if (result < 0) {
      // A ring that is only interrupted all the time has not failed.
      if (!again(result)) failed_ = rings_fail = true;
      cqe = reap_by_looking();
    }
    auto* transfer = static_cast<Transfer*>(io_uring_cqe_get_data(cqe));
    transfer->result = cqe->res;
    transfer->done = true;
    if (transfer->is_write) {
      sys::observe_write(*transfer->file, transfer->iov.data(), segments(*transfer), transfer->offset,
                         transfer->result);
    }
    io_uring_cqe_seen(&ring_, cqe);
    --in_flight_;
  }

  // The kernel goes on with what it was given before calls on the ring began to fail, and its completions appear
  // in memory that it shares with us.
  io_uring_cqe* reap_by_looking() {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_batch_cqe(&ring_, &cqe, 1) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return cqe;
  }

  static constexpr int kMaxTries = 1000;
  static bool again(int result) { return result == -EAGAIN || result == -EBUSY || result == -EINTR; }

  static int segments(const Transfer& transfer) {
    return static_cast<int>(std::min<size_t>(transfer.iov.size(), sys::kMaxSegments));
  }

  // An injected short count still has to move what it says it moved.
  static int64_t partial(const Transfer& transfer, uint64_t count) {
    Transfer front = transfer;
    uint64_t left = count;
    for (iovec& piece : front.iov) {
      piece.iov_len = std::min<uint64_t>(piece.iov_len, left);
      left -= piece.iov_len;
    }
    const int n = segments(front);
    const auto at = static_cast<off_t>(front.offset);
    const ssize_t done = front.is_write ? ::pwritev(front.file->fd(), front.iov.data(), n, at)
                                        : ::preadv(front.file->fd(), front.iov.data(), n, at);
    if (front.is_write) sys::observe_write(*front.file, front.iov.data(), n, front.offset, done);
    return done < 0 ? -errno : done;
  }

  const unsigned depth_;
  io_uring ring_{};
  unsigned in_flight_ = 0;
  bool failed_ = false;             // calls on the ring do not work any more
  std::unique_ptr<Queue> instead_;  // has taken over
};

std::unique_ptr<Queue> make_uring_queue(unsigned depth) {
  try {
    if (!rings_fail) return std::make_unique<UringQueue>(depth);
  } catch (const sys::Error&) {
    // Rings worked when they were probed. Since then they were forbidden, or this user has reached the limit of
    // locked memory or of open files. Threads do the same work.
  }
  return kThreads.make_queue(depth);
}

}  // namespace

bool uring_available(std::string& reason) {
  io_uring ring{};
  int result = on_ring([&] { return io_uring_queue_init(2, &ring, 0); });
  if (result < 0) {
    reason = std::string("io_uring_setup: ") + std::strerror(-result);
    return false;
  }
  // A ring may be created yet blocked by seccomp; try one.
  io_uring_prep_nop(io_uring_get_sqe(&ring));
  result = on_ring([&] { return io_uring_submit_and_wait(&ring, 1); });
  if (result < 0) reason = std::string("io_uring_enter: ") + std::strerror(-result);
  io_uring_queue_exit(&ring);
  return result >= 0;
}

#else

namespace {

std::unique_ptr<Queue> make_uring_queue(unsigned depth) { return kThreads.make_queue(depth); }

}  // namespace

bool uring_available(std::string& reason) {
  reason = "built without liburing";
  return false;
}

#endif

constinit const Backend kUring{"uring", true, make_uring_queue};

}  // namespace everystep
