// Writing one file.
#pragma once

#include <cstdint>
#include <vector>

#include "control.hpp"
#include "plan.hpp"
#include "sys.hpp"
#include "tuning.hpp"

namespace everystep {

// How many writes `write_file` makes for a file of so many bytes, when all of its staging is there.
uint64_t count_writes(uint64_t nbytes, Tuning tuning);

struct Written {
  sys::File file;                // open: the caller syncs it
  std::vector<uint64_t> hashes;  // per piece, per chunk, in order
  Stats stats;
};
// Writes `plan` as the whole content of the file. `recycle`: the file may exist, and is overwritten in place
// unless others use it (`sys::open_over`).
Written write_file(const sys::Path& path, uint64_t nbytes, bool recycle, const Plan& plan, const Tuning& tuning,
                   Control& control);

}  // namespace everystep
