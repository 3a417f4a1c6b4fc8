// What the parts of a shelf's code share of its format: docs/shelf-format.md is the grammar.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "hash.hpp"
#include "shelf.hpp"

namespace everystep::shelf_format {

inline constexpr std::string_view kHeaderMagic = "esshelf\n", kRootMagic = "esroot1\n";
inline constexpr uint32_t kVersion = 1;
inline constexpr uint64_t kHeaderNbytes = 64;
inline constexpr uint64_t kSpace = 3 * Shelf::kPage;  // behind the header and two roots
inline constexpr uint32_t kMostBuckets = 64;
inline constexpr uint64_t kEntriesPerBucket = 16;
inline constexpr uint64_t kRefs = 64, kRefNbytes = 32;
inline constexpr uint64_t kEntryNbytes = 48;
inline constexpr uint64_t kOrdered = 1;  // a root's flag
// What is not more than this is verified on opening, instead of a sync of its own in each commit.
inline constexpr uint64_t kSmall = 1 << 20;
// Bounds against files that lie.
inline constexpr uint64_t kMostNbytes = uint64_t{1} << 47;
inline constexpr uint64_t kMostGenerations = uint64_t{1} << 59;
inline constexpr uint64_t kMostEntries = 1 << 20;
inline constexpr uint64_t kMostNodeNbytes = 1 << 30;
inline constexpr uint64_t kLeastGrowth = 256 << 10, kMostGrowth = 64 << 20;
inline constexpr int kTries = 1000,
                     kTriesOfDamaged = 4;  // of a reader that a writer overtakes; of a file that stays bad

// The numbers of a file are copied as they are in memory, and records at fixed distances.
static_assert(std::endian::native == std::endian::little, "shelves are little-endian");
static_assert(kHeaderMagic.size() == 8 && kRootMagic.size() == 8);
static_assert(sizeof(Extent) == 4 * sizeof(uint64_t) && kRefNbytes == sizeof(Extent));
static_assert(kEntryNbytes == 4 * sizeof(uint32_t) + sizeof(Extent),
              "three numbers, a gap, and where the data lie");
static_assert(kRefs + kMostBuckets * kRefNbytes + sizeof(uint64_t) <= Shelf::kPage, "a root is one page");

inline uint64_t pages(uint64_t nbytes) { return (nbytes + Shelf::kPage - 1) / Shelf::kPage * Shelf::kPage; }

template <typename Number>
void put_number(char* at, Number value) {
  std::memcpy(at, &value, sizeof value);
}

template <typename Number>
Number get_number(const char* at) {
  Number value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline uint64_t block_count(uint64_t nbytes) { return (nbytes + Shelf::kBlock - 1) / Shelf::kBlock; }
// The table of block checksums stands behind the data, where there is more than one block.
inline uint64_t table_offset(uint64_t nbytes) { return (nbytes + 7) / 8 * 8; }

// The first block whose checksum does not fit, or nothing. `table` may be null for one block.
inline std::optional<uint64_t> bad_block(const char* data, uint64_t nbytes, uint64_t checksum, const char* table) {
  const uint64_t blocks = block_count(nbytes);
  if (blocks <= 1) return xxh3(data, nbytes) == checksum ? std::nullopt : std::optional<uint64_t>(0);
  if (xxh3(table, 8 * blocks) != checksum) return 0;
  constexpr uint64_t kAtOnce = 64;
  std::vector<Hashing> hashing;
  for (uint64_t first = 0; first < blocks; first += kAtOnce) {
    hashing.clear();
    for (uint64_t i = first; i < std::min(blocks, first + kAtOnce); ++i) {
      hashing.push_back({data + i * Shelf::kBlock, std::min(Shelf::kBlock, nbytes - i * Shelf::kBlock)});
    }
    xxh3_each(hashing);
    for (uint64_t i = 0; i < hashing.size(); ++i) {
      if (hashing[i].value != get_number<uint64_t>(table + 8 * (first + i))) return first + i;
    }
  }
  return std::nullopt;
}

}  // namespace everystep::shelf_format
