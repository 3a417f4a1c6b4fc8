// Memory to memory: snapshots of pieces, and fingerprints that tell whether memory has changed since.
#include <array>
#include <cstring>

#include "hash.hpp"
#include "transfer.hpp"

namespace holdfast {

void copy_pieces(const Plan& plan, char* destination) {
  for (const Piece& piece : plan.pieces) {
    char* to = destination + piece.offset;
    switch (piece.place) {
      case Place::memory:
        std::memcpy(to, reinterpret_cast<const char*>(piece.address), piece.nbytes);
        break;
      case Place::strided:
        plan.strided[piece.index].gather(0, piece.nbytes, to);
        break;
      case Place::callback:
        plan.callbacks[piece.index](to, piece.nbytes, 0);
        break;
      case Place::discard:
      case Place::zero:
        std::memset(to, 0, piece.nbytes);
        break;
    }
  }
}

uint64_t fingerprint(const char* data, uint64_t nbytes) {
  constexpr uint64_t kWhole = 4096;
  constexpr uint64_t kLine = 64;
  constexpr uint64_t kSamples = 16;
  if (nbytes <= kWhole) return xxh3(data, nbytes);
  std::array<char, kLine * kSamples> sample;
  const uint64_t last = nbytes - kLine;
  for (uint64_t i = 0; i < kSamples; ++i) {
    std::memcpy(sample.data() + i * kLine, data + last * i / (kSamples - 1), kLine);
  }
  return xxh3(sample.data(), sample.size());
}

}  // namespace holdfast
