// Tells this process from those it was forked from. Process ids cannot: they are given out again.
#pragma once

#include <cstdint>

namespace everystep {

// How many forks lie between this process and the first one that asked. An object made at another count belongs to
// a parent.
uint64_t forks();

}  // namespace everystep
