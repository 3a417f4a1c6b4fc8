// Memory to memory: snapshots of pieces, and fingerprints that tell whether memory has changed since.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan.hpp"

namespace everystep {

// Copies past the processor's caches.
void copy_past_caches(char* to, const char* from, size_t nbytes);
// Copies every piece of `plan` to `destination` + its offset: memory, strided or fetched.
void copy_pieces(const Plan& plan, char* destination);
// A hash over a sample of the piece's bytes, the same however they lie: all of them up to 4 KiB, else cache lines
// spread evenly from end to end. A dense change (an optimizer's step) shows; a change of a few elements may not.
uint64_t fingerprint(const Plan& plan, const Piece& piece);

}  // namespace everystep
