// The device's own limit: the same queues over one aligned buffer, nothing else. What everything is compared with.
#include "raw.hpp"

#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "align.hpp"

namespace everystep {
namespace {

// Larger than any cache, so that the device fetches from memory as it does in a real save.
constexpr uint64_t kBuffer = 128U << 20;

double run(const sys::File& file, uint64_t nbytes, bool is_write, const Tuning& tuning, Staging::Pages pages) {
  const uint64_t buffer =
      align_up(std::max(std::min(nbytes, kBuffer), tuning.depth * tuning.window), tuning.window);
  const Staging memory(buffer, pages);
  std::memset(memory.data(), 0x5a, buffer);
  std::vector<Transfer> slots(tuning.depth);
  const auto queue = make_queue(*tuning.backend, tuning.depth);
  const auto start = std::chrono::steady_clock::now();
  if (is_write) sys::fallocate(file, nbytes);
  size_t number = 0;
  for (uint64_t low = 0; low < nbytes; low += tuning.window, ++number) {
    Transfer& slot = slots[number % slots.size()];
    if (slot.file != nullptr) finish(*queue, slot, tuning.effective_alignment());
    slot.is_write = is_write;
    slot.file = &file;
    slot.offset = low;
    slot.iov.assign(1, {memory.data() + low % buffer, std::min(tuning.window, nbytes - low)});
    queue->submit(slot);
  }
  for (Transfer& slot : slots) {
    if (slot.file != nullptr) finish(*queue, slot, tuning.effective_alignment());
  }
  if (is_write) sys::sync(file);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int direct_flag(const Tuning& tuning) { return tuning.backend->direct ? O_DIRECT : 0; }

}  // namespace

double raw_write(const std::string& path, uint64_t nbytes, const Tuning& tuning, Staging::Pages pages) {
  const sys::File file = sys::open(path, O_WRONLY | O_CREAT | O_EXCL | direct_flag(tuning));
  return run(file, align_down(nbytes, tuning.alignment), true, tuning, pages);
}

double raw_read(const std::string& path, uint64_t nbytes, const Tuning& tuning, Staging::Pages pages) {
  const sys::File file = sys::open(path, O_RDONLY | direct_flag(tuning));
  return run(file, align_down(std::min(nbytes, sys::size(file)), tuning.alignment), false, tuning, pages);
}

}  // namespace everystep
