// A running job as its caller sees it: progress and cancelling, and statistics at the end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>

namespace everystep {

struct Control {
  std::atomic<uint64_t> done_nbytes{0};
  std::atomic<bool> cancelled{false};
  std::mutex mutex;
  std::condition_variable advanced;  // more bytes done, or the job has ended
  std::condition_variable ended;     // for those who need not be woken for every window

  void advance(uint64_t nbytes) {
    {
      std::lock_guard lock(mutex);
      done_nbytes += nbytes;
    }
    advanced.notify_all();
  }
};

// Thrown when `Control::cancelled` was seen.
struct Cancelled : std::exception {
  [[nodiscard]] const char* what() const noexcept override { return "the job was cancelled"; }
};

struct Stats {
  uint64_t direct_nbytes = 0;  // moved between the device and the caller's own memory
  uint64_t staged_nbytes = 0;  // passed through a copy
  uint64_t transfers = 0;
};

}  // namespace everystep
