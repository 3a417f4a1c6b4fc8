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

// Lets the device start on bytes of a file in the page cache; `nbytes` 0: all from `offset` on. Throws when the
// file system says that it has lost them: it may say so only once (ext4 does, where it finds no blocks), and the
// sync would have nothing left to do. Where there is no such call, the sync does it all.
void start_writeback(const sys::File& file, uint64_t offset = 0, uint64_t nbytes = 0);

}  // namespace everystep
