// Rounding to blocks.
#pragma once

#include <cstdint>

namespace everystep {

constexpr uint64_t align_down(uint64_t value, uint64_t alignment) { return value / alignment * alignment; }
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

// Bytes [low, high); none where low >= high.
struct Span {
  uint64_t low, high;
};

}  // namespace everystep
