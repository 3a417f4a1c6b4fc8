// The backends that work with threads: past the page cache, and through it.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "queue.hpp"

namespace everystep {
namespace {

// A few threads that block in pwritev/preadv: for systems that forbid io_uring, and for the page cache.
class ThreadQueue final : public Queue {
 public:
  explicit ThreadQueue(unsigned count) {
    threads_.reserve(count);
    try {
      while (threads_.size() < count) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;  // fewer threads are only slower
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

}  // namespace

constinit const Backend kThreads{"threads", true, [](unsigned depth) -> std::unique_ptr<Queue> {
                                   return std::make_unique<ThreadQueue>(std::min(depth, 8U));
                                 }};
// The page cache takes data as fast as two threads copy it.
constinit const Backend kBuffered{
    "buffered", false, [](unsigned) -> std::unique_ptr<Queue> { return std::make_unique<ThreadQueue>(2U); }};

}  // namespace everystep
