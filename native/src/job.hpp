// A piece of I/O under way: runs on a thread of its own, or at once in the caller's.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <thread>

#include "control.hpp"
#include "forks.hpp"

namespace everystep {

template <typename Result>
class Job {
 public:
  using Work = std::function<Result(Control&)>;

  // The caller must not hold the GIL when `background` is false.
  Job(Work work, bool background) : work_(std::move(work)) {
    if (background) {
      thread_ = std::thread([this] { run(); });
    } else {
      run();
    }
  }

  // Cancels and waits. In a forked child the thread does not exist and there is nothing to wait for.
  ~Job() {
    control_.cancelled = true;
    if (!thread_.joinable()) return;
    if (ours()) {
      thread_.join();
    } else {
      // Neither joined nor detached: the C library may not know the thread in a child, and would report an error.
      static_cast<void>(new std::thread(std::move(thread_)));
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  bool wait_for(std::chrono::duration<double> seconds) { return wait_for_nbytes(UINT64_MAX, seconds); }
  // Until so many bytes are done, or all that ever will be.
  bool wait_for_nbytes(uint64_t nbytes, std::chrono::duration<double> seconds) {
    std::unique_lock lock(control_.mutex);
    std::condition_variable& changed = nbytes == UINT64_MAX ? control_.ended : control_.advanced;
    return changed.wait_for(lock, seconds, [&] { return done_ || control_.done_nbytes >= nbytes; });
  }
  bool done() {
    std::lock_guard lock(control_.mutex);
    return done_;
  }
  // Only after it is done; throws what the work threw.
  Result& result() {
    if (error_) std::rethrow_exception(error_);
    return *result_;
  }
  [[nodiscard]] bool failed() const { return error_ != nullptr; }  // only after it is done
  void replace_error(std::exception_ptr error) { error_ = std::move(error); }
  [[nodiscard]] uint64_t progress() const { return control_.done_nbytes; }
  void cancel() { control_.cancelled = true; }
  // False in a forked child.
  [[nodiscard]] bool ours() const { return forks() == owner_; }

 private:
  void run() {
    std::optional<Result> result;
    std::exception_ptr error;
    try {
      result.emplace(work_(control_));
    } catch (...) {
      error = std::current_exception();
    }
    // Under the lock to the end: a thread that sees `done_` may destroy this object.
    std::lock_guard lock(control_.mutex);
    result_ = std::move(result);
    error_ = error;
    done_ = true;
    control_.advanced.notify_all();
    control_.ended.notify_all();
  }

  Work work_;
  Control control_;
  bool done_ = false;
  std::optional<Result> result_;
  std::exception_ptr error_;
  const uint64_t owner_ = forks();
  std::thread thread_;
};

}  // namespace everystep
