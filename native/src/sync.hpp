// Making several files and directories durable together.
#pragma once

#include <vector>

#include "sys.hpp"

namespace everystep {

// Returns when all are durable, one after the other, the directory first, if one is given; throws the first
// failure. Closes the files. Where the write-back of all of them was started before, the first sync's journal
// commit serves the others too: theirs cost a flush. (Syncing them at once, on a ring or on threads, was measured
// to be slower: waking the workers costs more than it saves.)
void sync_together(std::vector<sys::File> files, const sys::Directory* directory);

}  // namespace everystep
