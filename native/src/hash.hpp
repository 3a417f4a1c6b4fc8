// XXH3-64, the checksum of every stored chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace everystep {

uint64_t xxh3(const void* data, size_t nbytes);

// Copies, past the processor's caches, and returns `xxh3` of what it stored. Every byte is loaded once: if another
// thread changes them meanwhile, copy and checksum still agree.
uint64_t copy_and_hash(char* to, const char* from, size_t nbytes);

// A block to hash, and its hash. If `copy` is not null, the block is copied there, and the hash is that of the
// copy.
struct Hashing {
  const char* data;
  size_t nbytes;
  char* copy = nullptr;
  uint64_t value = 0;
};
enum class Instructions { best, common };  // of this processor; or those that every one of its kind has
// The same as `xxh3` of each, sooner. Copies go past the processor's caches: they are for a device.
void xxh3_each(std::vector<Hashing>& blocks, Instructions instructions = Instructions::best);

// For bytes that exist only piece by piece (gathered, or fetched from a device).
class StreamHash {
 public:
  StreamHash();
  ~StreamHash();
  StreamHash(const StreamHash&) = delete;
  StreamHash& operator=(const StreamHash&) = delete;
  void update(const void* data, size_t nbytes);
  // The hash of everything since the last call. The next call starts from nothing.
  uint64_t take();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace everystep
