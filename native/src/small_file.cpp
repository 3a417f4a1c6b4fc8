#include "small_file.hpp"

#include <cstring>

#include "copy.hpp"
#include "hash.hpp"

namespace everystep {

std::vector<uint64_t> pack_pieces(const Plan& plan, char* destination, uint64_t nbytes, uint64_t chunk) {
  uint64_t at = 0;
  for (const Piece& piece : plan.pieces) {
    std::memset(destination + at, 0, piece.offset - at);
    at = piece.end();
  }
  std::memset(destination + at, 0, nbytes - at);
  copy_pieces(plan, destination);
  std::vector<uint64_t> hashes;
  hashes.reserve(plan.pieces.size());
  for (const Piece& piece : plan.pieces) {
    for (uint64_t from = 0; from < piece.nbytes; from += chunk) {
      hashes.push_back(xxh3(destination + piece.offset + from, std::min(chunk, piece.nbytes - from)));
    }
  }
  return hashes;
}

void write_small_file(const sys::File& file, std::span<const iovec> parts) {
  const uint64_t nbytes = sys::nbytes_of(parts);
  if (sys::size(file) > nbytes) sys::truncate(file, nbytes);
  sys::write_all(file, parts, 0);
  sys::start_writeback(file);
}

}  // namespace everystep
