// Small files, written whole and at once: what a checkpoint of a small state, and every manifest, consists of.
#pragma once

#include <span>
#include <vector>

#include "plan.hpp"
#include "sys.hpp"

namespace everystep {

// Copies every piece of `plan` to `destination` + its offset, zeros what lies between them up to `nbytes`, and
// returns the checksums of the copies: per piece, per chunk, in order. What the copies hold is thereby certain,
// whatever happens to the sources meanwhile.
std::vector<uint64_t> pack_pieces(const Plan& plan, char* destination, uint64_t nbytes, uint64_t chunk);

// Makes the parts, one after the other, the whole content of a file, which may be longer before: through the page
// cache, in one call. The device starts on them at once; the caller syncs.
void write_small_file(const sys::File& file, std::span<const iovec> parts);

}  // namespace everystep
