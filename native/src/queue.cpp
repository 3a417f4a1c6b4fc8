#include "queue.hpp"

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace everystep {

void finish(Queue& queue, Transfer& transfer, uint64_t alignment) {
  // A device that makes no progress this often in a row never will.
  constexpr int kMaxStalls = 8;
  const sys::Call call = transfer.is_write ? sys::Call::write : sys::Call::read;
  for (int stalls = 0;;) {
    queue.wait(transfer);
    const int64_t result = transfer.result;
    if (result < 0 && result != -EAGAIN && result != -EINTR) {
      throw sys::Error{static_cast<int>(-result), call, transfer.file->path()};
    }
    uint64_t moved = result > 0 ? static_cast<uint64_t>(result) : 0;
    if (moved >= transfer.nbytes()) return;
    moved = moved / alignment * alignment;
    if (moved == 0 && ++stalls > kMaxStalls) throw sys::Error{EIO, call, transfer.file->path()};
    if (moved > 0) stalls = 0;
    transfer.offset += moved;
    sys::drop_front(transfer.iov, moved);
    queue.submit(transfer);
  }
}

namespace {

// A few threads that block in pwritev/preadv: for systems that forbid io_uring, and for the page cache.
class ThreadQueue final : public Queue {
 public:
  explicit ThreadQueue(unsigned count) {
    threads_.reserve(count);
    try {
      while (threads_.size() < count) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;  // with fewer it is slower, no more
    }
  }

  ~ThreadQueue() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(Transfer& transfer) override {
    {
      std::lock_guard lock(mutex_);
      transfer.done = false;
      waiting_.push_back(&transfer);
    }
    wake_.notify_one();
  }

  void wait(Transfer& transfer) override {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return transfer.done; });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      Transfer* transfer = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const auto move = transfer->is_write ? sys::pwritev : sys::preadv;
      const ssize_t result =
          move(*transfer->file, transfer->iov.data(), static_cast<int>(transfer->iov.size()), transfer->offset);
      lock.lock();
      transfer->result = result;
      transfer->done = true;
      finished_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable finished_;
  std::deque<Transfer*> waiting_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// One transfer at a time, in the caller's thread: for so little that starting a thread would be most of the work.
class InlineQueue final : public Queue {
 public:
  void submit(Transfer& transfer) override {
    const auto move = transfer.is_write ? sys::pwritev : sys::preadv;
    transfer.result =
        move(*transfer.file, transfer.iov.data(), static_cast<int>(transfer.iov.size()), transfer.offset);
    transfer.done = true;
  }
  void wait(Transfer&) override {}
};

}  // namespace

std::unique_ptr<Queue> make_uring_queue(unsigned depth);  // uring.cpp

std::unique_ptr<Queue> make_queue(Backend backend, unsigned depth) {
  if (depth == 1) return std::make_unique<InlineQueue>();
  if (backend == Backend::uring) {
    try {
      return make_uring_queue(depth);
    } catch (const sys::Error&) {
      // There were rings when it was probed. Since then they were forbidden, or there is no room for one more:
      // what one user may lock in memory, or open files. Threads do the same work.
    }
  }
  // The page cache takes data as fast as two threads copy it; a device wants more under way.
  return std::make_unique<ThreadQueue>(backend == Backend::buffered ? 2U : std::min(depth, 8U));
}

}  // namespace everystep
