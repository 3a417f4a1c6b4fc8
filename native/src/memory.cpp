#include "memory.hpp"

#include <sys/mman.h>

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
constexpr size_t kStep = 1U << 20;

// Zeroing a huge page takes a tenth of this. In a virtual machine whose host takes back free memory, huge pages
// are what it takes first, and each then costs hundreds of faults in the host; small pages are more often still
// there.
constexpr auto kSlow = std::chrono::microseconds(1500);
constexpr auto kRemember = std::chrono::seconds(2);
std::atomic<Clock::rep> slow_until{0};

uintptr_t up(uintptr_t value, size_t to) { return (value + to - 1) / to * to; }

}  // namespace

FreshMemory::FreshMemory(size_t nbytes) : nbytes_(nbytes) {
  data_ = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
  const uintptr_t start = reinterpret_cast<uintptr_t>(data_);
  const uintptr_t first = up(start, kHugePage);
  if (first + kHugePage > start + nbytes || Clock::now().time_since_epoch().count() < slow_until) return;
  ::madvise(data_, nbytes, MADV_HUGEPAGE);
  // The trial page is not wasted: it will be filled like the others.
  const auto began = Clock::now();
  const int result = ::madvise(reinterpret_cast<void*>(first), kHugePage, MADV_POPULATE_WRITE);
  const auto ended = Clock::now();
  if (result == 0 && ended - began > kSlow) {
    slow_until = (ended + kRemember).time_since_epoch().count();
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
      for (size_t at = 0; at < range.nbytes && !stop; at += kStep) {
        if (range.position + at < reader + margin) continue;
        const size_t count = std::min(kStep, range.nbytes - at);
        // Only whole pages inside the range: what shares a page with a neighbour is not ours to touch.
        const uintptr_t low = up(reinterpret_cast<uintptr_t>(range.data) + at, kPage);
        const uintptr_t high = (reinterpret_cast<uintptr_t>(range.data) + at + count) / kPage * kPage;
        if (low < high && ::madvise(reinterpret_cast<void*>(low), high - low, MADV_POPULATE_WRITE) != 0) return;
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
