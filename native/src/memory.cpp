#include "memory.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <string_view>
#include <system_error>
#include <thread>

#include "forks.hpp"
#include "sys.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace everystep {
namespace {

using Clock = std::chrono::steady_clock;

// What Linux says in a file, the number after `key`; 0 where there is no such thing.
size_t number_in(const char* path, std::string_view key) {
  char text[4096] = {};
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const ssize_t nbytes = ::read(file, text, sizeof text - 1);
  ::close(file);
  const size_t at = std::string_view(text, nbytes > 0 ? static_cast<size_t>(nbytes) : 0).find(key);
  return at == std::string_view::npos ? 0 : std::strtoull(text + at + key.size(), nullptr, 10);
}

constexpr size_t kUsualHugePage = 2U << 20;
// Zeroing a huge page of the usual size takes a tenth of this. In a virtual machine whose host takes back free
// memory, huge pages are what it takes first, and each then costs hundreds of faults in the host; small pages are
// more often still there. But small ones cost more to get, to hand to the device and for the device to fill:
// together about as much as a huge page that takes this long. One page may also be slow by chance, several hardly.
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
  const size_t huge = huge_page_nbytes();
  const auto slow = kSlow * static_cast<Clock::rep>(std::max<size_t>(huge / kUsualHugePage, 1));
  for (int i = 0; i < kTrials && first + huge <= end; ++i, first += huge) {
    const auto began = Clock::now();
    if (!populate(first, first + huge) || Clock::now() - began <= slow) return false;
  }
  return true;
}

// Of the ioctl PAGEMAP_SCAN, Linux 6.7: younger than the headers of many systems.
struct PageRegion {
  uint64_t start, end, categories;
};
struct PageScan {
  uint64_t size, flags, start, end, walk_end, regions, region_count, max_pages;
  uint64_t inverted, all_of, any_of, returned;
};
static_assert(sizeof(PageRegion) == 24 && sizeof(PageScan) == 96, "as the kernel has them");
constexpr unsigned long kPageScan = _IOWR('f', 16, PageScan);
constexpr uint64_t kIsPresent = 1U << 3, kIsHuge = 1U << 6;
// The first part of an allocation shows what pages the rest has.
constexpr size_t kLookedAt = 8U << 20;
constexpr size_t kMaxRegions = 16;

// Kept for the next job. Not behind a lock, which a fork could catch while it is held.
std::atomic<Staging*> kept{nullptr};
constexpr size_t kMostKept = 64U << 20;
// While memory is being touched, windows shrink (down to kSmallWindow) so that this many fit into what is there.
constexpr size_t kAtOnce = 4;
// Staging gets its pages in such steps, whatever their size.
constexpr size_t kStep = kUsualHugePage;
constexpr size_t kSmallWindow = kStep / kAtOnce;

}  // namespace

size_t page_nbytes() {
  static const auto nbytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return nbytes;
}

size_t huge_page_nbytes() {
  static const size_t nbytes = [] {
    size_t found = number_in("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "");
    if (found == 0) found = number_in("/proc/meminfo", "Hugepagesize:") << 10;
    const bool is_power_of_two = (found & (found - 1)) == 0;
    return found > page_nbytes() && is_power_of_two ? found : kUsualHugePage;
  }();
  return nbytes;
}

Staging::Staging(size_t nbytes, Pages pages) : nbytes_(nbytes), owner_(forks()) {
  const size_t huge = huge_page_nbytes();
  if (nbytes < huge) pages = Pages::normal;  // not one of them would fit
  mapped_nbytes_ = nbytes + (pages == Pages::huge ? huge : 0);
  mapped_ = sys::map_memory(mapped_nbytes_, "memory for staging");
  ::madvise(mapped_, mapped_nbytes_, MADV_DONTFORK);
  data_ = static_cast<char*>(mapped_);
  if (pages == Pages::normal) return;
  data_ = reinterpret_cast<char*>(up(reinterpret_cast<uintptr_t>(mapped_), huge));
  ::madvise(data_, nbytes / huge * huge, MADV_HUGEPAGE);
}

Staging::~Staging() {
  // A forked child does not have this mapping. Something else may be at its address.
  if (ours()) ::munmap(mapped_, mapped_nbytes_);
}

bool Staging::ours() const { return forks() == owner_; }

Windows::Windows(size_t count, size_t nbytes, Staging::Pages pages)
    : count_(count), window_(nbytes), pages_(pages) {
  if (pages == Staging::Pages::huge) staging_.reset(kept.exchange(nullptr));
  if (!staging_ || !staging_->ours() || staging_->nbytes() < count * nbytes) {
    staging_ = std::make_unique<Staging>(count * nbytes, pages);
  }
}

Windows::~Windows() {
  stop_ = true;
  if (toucher_.joinable()) toucher_.join();
  Staging* nothing = nullptr;
  if (pages_ == Staging::Pages::huge && staging_->nbytes() <= kMostKept &&
      kept.compare_exchange_strong(nothing, staging_.get())) {
    static_cast<void>(staging_.release());
  }
}

void Windows::touch_ahead() {
  const size_t first = std::max(staging_->touched.load(), kStep);  // the job touches the first pages itself
  if (first >= count_ * window_) return;
  staging_->touched = first;
  try {
    toucher_ = std::thread([this, first] {
      const size_t end = count_ * window_;
      for (size_t at = first; at < end && !stop_; at += kStep) {
        // By stores. While madvise populates a page, no thread of the process can map memory. One store gets all
        // of a huge page; the others then find theirs.
        for (size_t inside = at; inside < std::min(at + kStep, end); inside += page_nbytes()) {
          static_cast<volatile char*>(staging_->data())[inside] = 0;
        }
        staging_->touched = at + kStep;
      }
    });
  } catch (const std::system_error&) {
    // No thread can be started: the job touches its pages as it goes.
  }
}

size_t Windows::touched_nbytes() const {
  return toucher_.joinable() ? std::min(staging_->touched.load(), count_ * window_) : count_ * window_;
}

size_t Windows::window() const {
  const size_t room = touched_nbytes();
  if (room == count_ * window_) return window_;
  return std::min(window_, std::max<size_t>(room / kAtOnce / kSmallWindow, 1) * kSmallWindow);
}

char* Windows::next(size_t nbytes) {
  size_t low = up(place_, nbytes);
  if (low + nbytes > touched_nbytes()) low = 0;
  for (const Given& given : given_) {
    if (given.low < low + nbytes && low < given.high) return nullptr;
  }
  place_ = low + nbytes;
  given_.push_back({low, place_});
  return staging_->data() + low;
}

PageSizes::PageSizes() : pagemap_(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}

PageSizes::~PageSizes() {
  if (pagemap_ >= 0) ::close(pagemap_);
}

PageSizes::Kind PageSizes::of(uintptr_t address, size_t nbytes) const {
  const size_t huge_page = huge_page_nbytes();
  const uintptr_t low = up(address, huge_page);
  const uintptr_t high = std::min(address + nbytes, low + std::max(kLookedAt, huge_page)) / huge_page * huge_page;
  if (pagemap_ < 0 || low >= high) return Kind::unknown;
  PageRegion regions[kMaxRegions];
  PageScan scan{};
  scan.size = sizeof scan;
  scan.start = low;
  scan.end = high;
  scan.regions = reinterpret_cast<uintptr_t>(regions);
  scan.region_count = std::size(regions);
  scan.all_of = kIsPresent;
  scan.returned = kIsPresent | kIsHuge;
  const int count = ::ioctl(pagemap_, kPageScan, &scan);
  uint64_t small = 0, huge = 0;
  for (int i = 0; i < count; ++i) {
    ((regions[i].categories & kIsHuge) != 0 ? huge : small) += regions[i].end - regions[i].start;
  }
  if (small + huge == 0) return Kind::unknown;
  return huge > small ? Kind::huge : Kind::small;
}

bool PageSizes::can_be_huge() {
  static const bool can = [] {
    char policy[64] = {};
    const int file = ::open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    const ssize_t nbytes = ::read(file, policy, sizeof policy - 1);
    ::close(file);
    // Staging never uses pages this large.
    if (huge_page_nbytes() > kMostKept) return false;
    return nbytes > 0 && std::string_view(policy).find("[never]") == std::string_view::npos;
  }();
  return can;
}

FreshMemory::FreshMemory(size_t nbytes) : nbytes_(nbytes) {
  try {
    data_ = sys::map_memory(nbytes, "memory to load into");
  } catch (const sys::Error&) {
    throw std::bad_alloc();  // the caller asked for memory and gets a MemoryError
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(data_);
  const size_t huge = huge_page_nbytes();
  const uintptr_t first = up(start, huge);
  if (first + huge > start + nbytes || Clock::now().time_since_epoch().count() < slow_until) return;
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
        next = std::min(up(at + 1, kStep), end);
        if (range.position + (at - start) < reader + margin) continue;
        const uintptr_t low = up(at, page_nbytes());
        const uintptr_t high = next / page_nbytes() * page_nbytes();
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

}  // namespace everystep
