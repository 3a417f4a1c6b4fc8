// XXH3-64, the checksum of every stored chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace holdfast {

uint64_t xxh3(const void* data, size_t nbytes);

// For bytes that exist only piece by piece (gathered, or fetched from a device).
class StreamHash {
 public:
  StreamHash();
  ~StreamHash();
  StreamHash(const StreamHash&) = delete;
  StreamHash& operator=(const StreamHash&) = delete;
  void update(const void* data, size_t nbytes);
  // The hash of all since the last call; starts anew.
  uint64_t take();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace holdfast
