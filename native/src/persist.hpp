// Writing processor caches back to persistent memory: for files on a DAX file system, which no system call syncs.
#pragma once

#include <cstddef>

namespace everystep {

// Starts to write the cache lines of these bytes back to memory. They are there after the next `persist_fence`.
void write_back(const void* data, size_t nbytes);
void persist_fence();
// The instruction that `write_back` uses on this processor.
const char* write_back_instruction();

}  // namespace everystep
