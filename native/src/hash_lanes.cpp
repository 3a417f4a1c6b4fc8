// XXH3-64 of several long blocks at once.
//
// One core reads memory faster in four places than in one: the processor's prefetchers follow each of them, and
// stop at the end of every page. Four blocks hashed in step take two thirds of the time of one after the other.
// Storing what has been loaded anyway makes a copy at little cost; then one place at a time is faster, since
// stores past the caches of several get in each other's way. Only this loop (hash_four.hpp) is written here; short
// blocks, streams and processors other than x86-64 and arm64 use the library.
#include <cstring>
#include <iterator>

#include "hash.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define EVERYSTEP_LANES 1
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_neon.h>
#define EVERYSTEP_LANES 1
#else
#define EVERYSTEP_LANES 0
#endif

#if EVERYSTEP_LANES

namespace everystep {
namespace {

constexpr size_t kLanes = 4;
constexpr size_t kStripe = 64;
constexpr size_t kStripesPerBlock = 16;
constexpr size_t kBlock = kStripe * kStripesPerBlock;
// Shorter blocks gain nothing from running in step (and up to 240 bytes the algorithm differs).
constexpr size_t kLong = 4 * kBlock;

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5, kPrimeMx1 = 0x165667919E3779F9;
constexpr uint64_t kStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

// The algorithm's default secret, and where its parts are taken from.
constexpr size_t kSecretSize = 192, kSecretStep = 8, kLastStripeShift = 7, kMergeShift = 11;
alignas(64) constexpr uint8_t kSecret[kSecretSize] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t secret_word(size_t at) {
  uint64_t word;
  std::memcpy(&word, kSecret + at, sizeof word);
  return word;
}

uint64_t fold(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merge(const uint64_t* sums, size_t nbytes) {
  uint64_t value = nbytes * kPrime64_1;
  for (size_t i = 0; i < 8; i += 2) {
    const size_t at = kMergeShift + 8 * i;
    value += fold(sums[i] ^ secret_word(at), sums[i + 1] ^ secret_word(at + 8));
  }
  value ^= value >> 37;
  value *= kPrimeMx1;
  return value ^ (value >> 32);
}

constexpr size_t least(size_t a, size_t b) { return a < b ? a : b; }

struct Loops {
  void (*four)(Hashing* const*);
  void (*one)(Hashing&);
};

#if defined(__x86_64__)

// What every x86-64 has.
#define EVERYSTEP_TARGET
namespace sse2 {
using Vector = __m128i;
EVERYSTEP_TARGET inline Vector load(const void* from) { return _mm_loadu_si128(static_cast<const Vector*>(from)); }
// Keeps the compiler from loading the same memory again where it needs the value again.
EVERYSTEP_TARGET inline void load_once(Vector& a) { asm("" : "+x"(a)); }
EVERYSTEP_TARGET inline void store_past_caches(void* to, Vector a) {
  _mm_stream_si128(static_cast<Vector*>(to), a);
}
EVERYSTEP_TARGET inline Vector exclusive_or(Vector a, Vector b) { return _mm_xor_si128(a, b); }
EVERYSTEP_TARGET inline Vector add(Vector a, Vector b) { return _mm_add_epi64(a, b); }
EVERYSTEP_TARGET inline Vector multiply_low_halves(Vector a, Vector b) { return _mm_mul_epu32(a, b); }
EVERYSTEP_TARGET inline Vector swap_neighbours(Vector a) { return _mm_shuffle_epi32(a, _MM_SHUFFLE(1, 0, 3, 2)); }
EVERYSTEP_TARGET inline Vector everywhere(uint64_t a) { return _mm_set1_epi64x(static_cast<long long>(a)); }
template <int N>
EVERYSTEP_TARGET inline Vector shift_right(Vector a) {
  return _mm_srli_epi64(a, N);
}
template <int N>
EVERYSTEP_TARGET inline Vector shift_left(Vector a) {
  return _mm_slli_epi64(a, N);
}

#include "hash_four.hpp"
}  // namespace sse2
#undef EVERYSTEP_TARGET

#define EVERYSTEP_TARGET __attribute__((target("avx2")))
namespace avx2 {
using Vector = __m256i;
EVERYSTEP_TARGET inline Vector load(const void* from) {
  return _mm256_loadu_si256(static_cast<const Vector*>(from));
}
EVERYSTEP_TARGET inline void load_once(Vector& a) { asm("" : "+x"(a)); }
EVERYSTEP_TARGET inline void store_past_caches(void* to, Vector a) {
  _mm256_stream_si256(static_cast<Vector*>(to), a);
}
EVERYSTEP_TARGET inline Vector exclusive_or(Vector a, Vector b) { return _mm256_xor_si256(a, b); }
EVERYSTEP_TARGET inline Vector add(Vector a, Vector b) { return _mm256_add_epi64(a, b); }
EVERYSTEP_TARGET inline Vector multiply_low_halves(Vector a, Vector b) { return _mm256_mul_epu32(a, b); }
EVERYSTEP_TARGET inline Vector swap_neighbours(Vector a) {
  return _mm256_shuffle_epi32(a, _MM_SHUFFLE(1, 0, 3, 2));
}
EVERYSTEP_TARGET inline Vector everywhere(uint64_t a) { return _mm256_set1_epi64x(static_cast<long long>(a)); }
template <int N>
EVERYSTEP_TARGET inline Vector shift_right(Vector a) {
  return _mm256_srli_epi64(a, N);
}
template <int N>
EVERYSTEP_TARGET inline Vector shift_left(Vector a) {
  return _mm256_slli_epi64(a, N);
}

#include "hash_four.hpp"
}  // namespace avx2
#undef EVERYSTEP_TARGET

Loops loops(Instructions instructions) {
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2 && instructions == Instructions::best) return {avx2::hash_four, avx2::hash_one};
  return {sse2::hash_four, sse2::hash_one};
}

// What went past the caches is there for a device, too.
void make_visible() { _mm_sfence(); }

#else

// What every arm64 has.
#define EVERYSTEP_TARGET
namespace neon {
using Vector = uint64x2_t;
inline Vector load(const void* from) { return vreinterpretq_u64_u8(vld1q_u8(static_cast<const uint8_t*>(from))); }
inline void load_once(Vector& a) { asm("" : "+w"(a)); }
// C++ has no intrinsic for stores past the caches here.
inline void store_past_caches(void* to, Vector a) { vst1q_u8(static_cast<uint8_t*>(to), vreinterpretq_u8_u64(a)); }
inline Vector exclusive_or(Vector a, Vector b) { return veorq_u64(a, b); }
inline Vector add(Vector a, Vector b) { return vaddq_u64(a, b); }
inline Vector multiply_low_halves(Vector a, Vector b) { return vmull_u32(vmovn_u64(a), vmovn_u64(b)); }
inline Vector swap_neighbours(Vector a) { return vextq_u64(a, a, 1); }
inline Vector everywhere(uint64_t a) { return vdupq_n_u64(a); }
template <int N>
inline Vector shift_right(Vector a) {
  return vshrq_n_u64(a, N);
}
template <int N>
inline Vector shift_left(Vector a) {
  return vshlq_n_u64(a, N);
}

#include "hash_four.hpp"
}  // namespace neon
#undef EVERYSTEP_TARGET

Loops loops(Instructions) { return {neon::hash_four, neon::hash_one}; }
void make_visible() {}  // a device sees what the caches hold

#endif

}  // namespace

namespace {

void hash_short(Hashing& block) {
  if (block.copy != nullptr) std::memcpy(block.copy, block.data, block.nbytes);
  block.value = xxh3(block.copy != nullptr ? block.copy : block.data, block.nbytes);
}

}  // namespace

uint64_t copy_and_hash(char* to, const char* from, size_t nbytes) {
  Hashing block{from, nbytes, to};
  if (nbytes < kLong) {
    hash_short(block);
    return block.value;
  }
  loops(Instructions::best).one(block);
  make_visible();
  return block.value;
}

void xxh3_each(std::vector<Hashing>& blocks, Instructions instructions) {
  const auto [hash_four, hash_one] = loops(instructions);
  Hashing* group[kLanes];
  size_t count = 0;
  for (Hashing& block : blocks) {
    if (block.nbytes < kLong) {
      hash_short(block);
      continue;
    }
    if (block.copy != nullptr) {
      hash_one(block);
      continue;
    }
    group[count++] = &block;
    if (count == kLanes) {
      hash_four(group);
      count = 0;
    }
  }
  for (size_t i = 0; i < count; ++i) hash_one(*group[i]);
  make_visible();
}

}  // namespace everystep

#else

namespace everystep {

uint64_t copy_and_hash(char* to, const char* from, size_t nbytes) {
  std::memcpy(to, from, nbytes);
  return xxh3(to, nbytes);
}

void xxh3_each(std::vector<Hashing>& blocks, Instructions) {
  for (Hashing& block : blocks) {
    block.value = block.copy != nullptr ? copy_and_hash(block.copy, block.data, block.nbytes)
                                        : xxh3(block.data, block.nbytes);
  }
}

}  // namespace everystep

#endif
