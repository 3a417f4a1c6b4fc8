// What a job moves: pieces of one file, and where each piece's bytes lie in memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "memory.hpp"
#include "queue.hpp"
#include "strided.hpp"
#include "sys.hpp"

namespace everystep {

enum class Place : uint8_t {
  memory,    // contiguous host memory at `address`
  strided,   // Plan::strided[index]
  callback,  // Plan::callbacks[index] moves a window at a time (device memory)
  discard,   // reading: only the checksum matters
  zero,      // reading: the bytes must be zero (padding)
};

struct Piece {
  uint64_t offset = 0;  // in the file
  uint64_t nbytes = 0;
  Place place = Place::memory;
  uintptr_t address = 0;
  size_t index = 0;

  [[nodiscard]] uint64_t end() const { return offset + nbytes; }
};

using Callback = std::function<void(char* window, uint64_t nbytes, uint64_t offset)>;

// Pieces are sorted by offset and do not overlap; what lies between them is padding (zeros).
struct Plan {
  std::vector<Piece> pieces;
  std::vector<Strided> strided;
  std::vector<Callback> callbacks;
  std::shared_ptr<std::atomic<bool>> in_callback;  // whether one is under way; none where there are no callbacks
};

// Far more than helps, and far less than a product of both could overflow with. (The kernel moves 2 GiB at most in
// one transfer.)
inline constexpr uint64_t kMaxWindow = 1U << 30;
inline constexpr unsigned kMaxDepth = 256;
inline constexpr uint64_t kMaxChunk = 1U << 30;

// Everything but the alignment is given by the caller; the defaults are in src/everystep/engine/tuning.py.
struct Tuning {
  Backend backend = Backend::buffered;
  uint64_t alignment = 4096;  // of addresses, offsets and lengths in direct I/O
  uint64_t window = 0;        // bytes per transfer
  unsigned depth = 0;         // windows under way; depth * window is all the memory a job uses
  uint64_t chunk = 0;         // bytes per checksum
  uint64_t small = 0;         // files up to this size skip direct I/O: its latency costs more than a copy

  [[nodiscard]] uint64_t effective_alignment() const { return backend == Backend::buffered ? 1 : alignment; }
};

struct Stats {
  uint64_t direct_nbytes = 0;  // moved between the device and the caller's own memory
  uint64_t staged_nbytes = 0;  // passed through a copy
  uint64_t transfers = 0;
};

// Seen from outside while the job runs.
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

// Inside-a-piece parts shorter than this are copied: each separate segment costs the kernel a little.
inline constexpr uint64_t kMinDirect = 32U << 10;

constexpr uint64_t align_down(uint64_t value, uint64_t alignment) { return value / alignment * alignment; }
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

// The part of [low, high) of `piece` that can move between the device and the caller's memory without a copy.
struct Span {
  uint64_t low, high;
};
inline Span direct_span(const Piece& piece, uint64_t low, uint64_t high, uint64_t alignment) {
  if (piece.place != Place::memory || (piece.address - piece.offset) % alignment != 0) return {high, high};
  const Span span{align_up(low, alignment), align_down(high, alignment)};
  if (span.high < span.low + kMinDirect) return {high, high};
  return span;
}

inline uint64_t chunk_count(uint64_t nbytes, uint64_t chunk) { return (nbytes + chunk - 1) / chunk; }
// Of a piece that is read. Padding has none: it must be zero.
inline uint64_t checksum_count(const Piece& piece, uint64_t chunk) {
  return piece.place == Place::zero ? 0 : chunk_count(piece.nbytes, chunk);
}

// The chunks that lie whole in the bytes [inside, end) of a piece, as bytes of it; low >= high where there is
// none.
inline Span whole_chunks(const Piece& piece, uint64_t inside, uint64_t end, uint64_t chunk) {
  return {align_up(inside, chunk), end == piece.nbytes ? end : align_down(end, chunk)};
}

// How many writes `write_file` makes for a file of so many bytes, when all of its staging is there.
uint64_t count_writes(uint64_t nbytes, Tuning tuning);

struct Written {
  sys::File file;                // open: the caller syncs it
  std::vector<uint64_t> hashes;  // per piece, per chunk, in order
  Stats stats;
};
// Writes `plan` as the whole content of the file. `recycle`: the file may exist, and is overwritten in place
// unless others use it (`sys::open_over`).
Written write_file(const sys::Path& path, uint64_t nbytes, bool recycle, const Plan& plan, const Tuning& tuning,
                   Control& control);

struct Damage {
  size_t piece;
  uint64_t chunk;
};
struct Read {
  std::vector<Damage> damage;  // chunks whose bytes do not match, at most kMaxDamage
  Stats stats;
};
inline constexpr size_t kMaxDamage = 4096;
// Reads the pieces of `plan`. `expected`: checksums as `write_file` returned them, empty for no verification.
Read read_file(const std::string& path, const Plan& plan, const std::vector<uint64_t>& expected,
               const Tuning& tuning, Control& control);

// Copies to where the processor will not look: it stays out of the caches.
void copy_past_caches(char* to, const char* from, size_t nbytes);
// Copies every piece of `plan` to `destination` + its offset: memory, strided or fetched.
void copy_pieces(const Plan& plan, char* destination);
// A hash over a sample of the piece's bytes, the same however they lie: all of them up to 4 KiB, else cache lines
// spread evenly from end to end. A dense change (an optimizer's step) shows; a change of a few elements may not.
uint64_t fingerprint(const Plan& plan, const Piece& piece);

double raw_write(const std::string& path, uint64_t nbytes, const Tuning& tuning, Staging::Pages pages);
double raw_read(const std::string& path, uint64_t nbytes, const Tuning& tuning, Staging::Pages pages);

}  // namespace everystep
