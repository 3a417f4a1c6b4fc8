#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>

#include "align.hpp"
#include "copy.hpp"
#include "hash.hpp"

namespace everystep {

#if defined(__x86_64__)
void copy_past_caches(char* to, const char* from, size_t nbytes) {
  constexpr size_t kLine = 64;
  const size_t ragged = std::min<size_t>(nbytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  std::memcpy(to, from, ragged);
  size_t at = ragged;
  for (; at + kLine <= nbytes; at += kLine) {
    const auto* lines = reinterpret_cast<const __m128i*>(from + at);
    const __m128i a = _mm_loadu_si128(lines), b = _mm_loadu_si128(lines + 1);
    const __m128i c = _mm_loadu_si128(lines + 2), d = _mm_loadu_si128(lines + 3);
    auto* there = reinterpret_cast<__m128i*>(to + at);
    _mm_stream_si128(there, a);
    _mm_stream_si128(there + 1, b);
    _mm_stream_si128(there + 2, c);
    _mm_stream_si128(there + 3, d);
  }
  std::memcpy(to + at, from + at, nbytes - at);
  _mm_sfence();
}
#else
void copy_past_caches(char* to, const char* from, size_t nbytes) { std::memcpy(to, from, nbytes); }
#endif

void copy_pieces(const Plan& plan, char* destination) {
  for (const Piece& piece : plan.pieces) {
    if (piece.nbytes == 0) continue;  // an empty array may have no address at all
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

namespace {
void fetch(const Plan& plan, const Piece& piece, uint64_t offset, uint64_t nbytes, char* to) {
  if (piece.place == Place::memory) std::memcpy(to, reinterpret_cast<const char*>(piece.address) + offset, nbytes);
  if (piece.place == Place::strided) plan.strided[piece.index].gather(offset, nbytes, to);
  if (piece.place == Place::callback) plan.callbacks[piece.index](to, nbytes, offset);
}
}  // namespace

uint64_t fingerprint(const Plan& plan, const Piece& piece) {
  constexpr uint64_t kWhole = 4096;
  constexpr uint64_t kLine = 64;
  constexpr uint64_t kSamples = 16;
  constexpr uint64_t kElement = 16;  // the largest; callbacks that compute elements are asked for whole ones
  std::array<char, kWhole> sample;
  if (piece.nbytes <= kWhole) {
    if (piece.place == Place::memory) return xxh3(reinterpret_cast<const char*>(piece.address), piece.nbytes);
    if (piece.nbytes > 0) fetch(plan, piece, 0, piece.nbytes, sample.data());
    return xxh3(sample.data(), piece.nbytes);
  }
  const uint64_t last = piece.nbytes - kLine;
  for (uint64_t i = 0; i < kSamples; ++i) {
    const uint64_t offset = i + 1 == kSamples ? last : align_down(last * i / (kSamples - 1), kElement);
    fetch(plan, piece, offset, kLine, sample.data() + i * kLine);
  }
  return xxh3(sample.data(), kLine * kSamples);
}

}  // namespace everystep
