#include "forks.hpp"

#include <pthread.h>

#include <atomic>
#include <new>

namespace everystep {
namespace {

std::atomic<uint64_t> count{0};

}  // namespace

uint64_t forks() {
  static const bool counted =
      ::pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); }) == 0;
  if (!counted) throw std::bad_alloc();
  return count.load(std::memory_order_relaxed);
}

}  // namespace everystep
