#include "memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace holdfast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kHugePage = 2U << 20;
constexpr size_t kPage = 4096;

// Zeroing a huge page takes a tenth of this. In a virtual machine whose host takes back free memory, huge pages
// are what it takes first, and each then costs hundreds of faults in the host; small pages are more often still
// there. But small ones cost more to get, to hand to the device and for the device to fill: together about as much
// as a huge page that takes this long. One page may also be slow by chance, several hardly.
constexpr auto kSlow = std::chrono::milliseconds(3);
constexpr int kTrials = 3;
constexpr auto kRemember = std::chrono::milliseconds(500);
std::atomic<Clock::rep> slow_until{0};

uintptr_t up(uintptr_t value, size_t to) { return (value + to - 1) / to * to; }

bool populate(uintptr_t low, uintptr_t high) {
  return ::madvise(reinterpret_cast<void*>(low), high - low, MADV_POPULATE_WRITE) == 0;
}

// Whether all of the first few huge pages are slow. They are not wasted: they will be filled like the others.
bool huge_pages_are_slow(uintptr_t first, uintptr_t end) {
  for (int i = 0; i < kTrials && first + kHugePage <= end; ++i, first += kHugePage) {
    const auto began = Clock::now();
    if (!populate(first, first + kHugePage) || Clock::now() - began <= kSlow) return false;
  }
  return true;
}

}  // namespace

FreshMemory::FreshMemory(size_t nbytes) : nbytes_(nbytes) {
  data_ = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
  const uintptr_t start = reinterpret_cast<uintptr_t>(data_);
  const uintptr_t first = up(start, kHugePage);
  if (first + kHugePage > start + nbytes || Clock::now().time_since_epoch().count() < slow_until) return;
  ::madvise(data_, nbytes, MADV_HUGEPAGE);
  if (huge_pages_are_slow(first, start + nbytes)) {
    slow_until = (Clock::now() + kRemember).time_since_epoch().count();
    ::madvise(data_, nbytes, MADV_NOHUGEPAGE);
  }
}

FreshMemory::~FreshMemory() { ::munmap(data_, nbytes_); }

struct Populator::State {
  std::vector<Range> ranges;
  uint64_t margin;
  std::atomic<uint64_t> reader{0};
  std::atomic<bool> stop{false};
  std::thread thread;

  void work() {
    for (const Range& range : ranges) {
      const uintptr_t start = reinterpret_cast<uintptr_t>(range.data);
      const uintptr_t end = start + range.nbytes;
      // Steps end where huge pages do, and cover only whole pages inside the range: what shares one with a
      // neighbour is not ours to touch.
      for (uintptr_t at = start, next; at < end && !stop; at = next) {
        next = std::min(up(at + 1, kHugePage), end);
        if (range.position + (at - start) < reader + margin) continue;
        const uintptr_t low = up(at, kPage);
        const uintptr_t high = next / kPage * kPage;
        if (low < high && !populate(low, high)) return;
      }
    }
  }
};

Populator::Populator(std::vector<Range> ranges, uint64_t margin) : state_(std::make_unique<State>()) {
  state_->ranges = std::move(ranges);
  state_->margin = margin;
  if (!state_->ranges.empty()) state_->thread = std::thread([this] { state_->work(); });
}

Populator::~Populator() {
  state_->stop = true;
  if (state_->thread.joinable()) state_->thread.join();
}

void Populator::reader_is_at(uint64_t position) { state_->reader = position; }

}  // namespace holdfast
