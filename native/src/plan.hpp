// What a job moves: pieces of one file, and where each piece's bytes lie in memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "align.hpp"
#include "strided.hpp"

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

}  // namespace everystep
