#include "hash.hpp"

// Inlined from the system's header: the hash is memory-bound, and the extension needs no library at run time.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace everystep {

uint64_t xxh3(const void* data, size_t nbytes) { return XXH3_64bits(data, nbytes); }

struct alignas(64) StreamHash::State {
  XXH3_state_t xxh;
};

StreamHash::StreamHash() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh); }
StreamHash::~StreamHash() = default;

void StreamHash::update(const void* data, size_t nbytes) { XXH3_64bits_update(&state_->xxh, data, nbytes); }

uint64_t StreamHash::take() {
  const uint64_t value = XXH3_64bits_digest(&state_->xxh);
  XXH3_64bits_reset(&state_->xxh);
  return value;
}

}  // namespace everystep
