// The io_uring queue. Built without liburing, it reports itself unavailable and `threads` takes its place.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "queue.hpp"

#if HOLDFAST_HAVE_URING
#include <liburing.h>
#endif

namespace holdfast {

#if HOLDFAST_HAVE_URING

namespace {

class UringQueue final : public Queue {
 public:
  explicit UringQueue(unsigned depth) {
    int result = -EINVAL;
#ifdef IORING_SETUP_DEFER_TASKRUN
    // One thread submits and reaps, so completions need not interrupt it: they are run when it asks for them.
    result = io_uring_queue_init(depth, &ring_, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
#endif
    if (result == -EINVAL) result = io_uring_queue_init(depth, &ring_, 0);  // before Linux 6.1
    if (result < 0) throw sys::Error{-result, sys::Call::open, "io_uring"};
    // A forked data-loader worker must not share the ring's memory with us.
    io_uring_ring_dontfork(&ring_);
  }

  ~UringQueue() override {
    // Who leaves early (an error) may not free memory the kernel still moves.
    while (in_flight_ > 0) reap();
    io_uring_queue_exit(&ring_);
  }

  void submit(Transfer& transfer) override {
    transfer.done = false;
    const sys::Call call = transfer.is_write ? sys::Call::write : sys::Call::read;
    if (const auto told = sys::intercept(call, transfer.nbytes())) {
      transfer.result = *told > 0 ? partial(transfer, static_cast<uint64_t>(*told)) : *told;
      transfer.done = true;
      return;
    }
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    while (sqe == nullptr) {
      reap();
      sqe = io_uring_get_sqe(&ring_);
    }
    const auto count = static_cast<unsigned>(segments(transfer));
    if (transfer.is_write) {
      io_uring_prep_writev(sqe, transfer.file->fd(), transfer.iov.data(), count, transfer.offset);
    } else {
      io_uring_prep_readv(sqe, transfer.file->fd(), transfer.iov.data(), count, transfer.offset);
    }
    io_uring_sqe_set_data(sqe, &transfer);
    int result = io_uring_submit(&ring_);
    for (int tries = 0; result < 0 && (result == -EAGAIN || result == -EBUSY || result == -EINTR) && tries < 1000;
         ++tries) {
      if (in_flight_ > 0) reap();
      result = io_uring_submit(&ring_);
    }
    if (result < 0) throw sys::Error{-result, call, transfer.file->path()};
    ++in_flight_;
  }

  void wait(Transfer& transfer) override {
    while (!transfer.done) reap();
  }

 private:
  void reap() {
    io_uring_cqe* cqe = nullptr;
    int result = io_uring_wait_cqe(&ring_, &cqe);
    while (result == -EINTR || result == -EAGAIN) result = io_uring_wait_cqe(&ring_, &cqe);
    if (result < 0) throw sys::Error{-result, sys::Call::write, "io_uring"};
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

  io_uring ring_{};
  unsigned in_flight_ = 0;
};

}  // namespace

std::unique_ptr<Queue> make_uring_queue(unsigned depth) { return std::make_unique<UringQueue>(depth); }

bool uring_available(std::string& reason) {
  io_uring ring{};
  const int result = io_uring_queue_init(2, &ring, 0);
  if (result < 0) {
    reason = std::string("io_uring_setup: ") + std::strerror(-result);
    return false;
  }
  io_uring_queue_exit(&ring);
  return true;
}

#else

std::unique_ptr<Queue> make_uring_queue(unsigned) { throw sys::Error{ENOSYS, sys::Call::open, "io_uring"}; }

bool uring_available(std::string& reason) {
  reason = "built without liburing";
  return false;
}

#endif

}  // namespace holdfast
