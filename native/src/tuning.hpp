// How a job moves bytes: by which backend, in windows of what size.
#pragma once

#include <cstdint>

#include "queue.hpp"

namespace everystep {

// Far more than helps, and far less than a product of both could overflow with. (The kernel moves 2 GiB at most in
// one transfer.)
inline constexpr uint64_t kMaxWindow = 1U << 30;
inline constexpr unsigned kMaxDepth = 256;
inline constexpr uint64_t kMaxChunk = 1U << 30;

// Everything but the alignment is given by the caller; the defaults are in src/everystep/engine/tuning.py.
struct Tuning {
  const Backend* backend = &kBuffered;
  uint64_t alignment = 4096;  // of addresses, offsets and lengths in direct I/O
  uint64_t window = 0;        // bytes per transfer
  unsigned depth = 0;         // windows under way; depth * window is all the memory a job uses
  uint64_t chunk = 0;         // bytes per checksum
  uint64_t small = 0;         // files up to this size skip direct I/O: its latency costs more than a copy

  [[nodiscard]] uint64_t effective_alignment() const { return backend->direct ? alignment : 1; }
};

}  // namespace everystep
