// Making several files and directories durable together.
#pragma once

#include <vector>

#include "sys.hpp"

namespace holdfast {

struct Syncing {
  sys::File file;
  bool is_directory = false;
};

// Returns when all are durable, one after the other; throws the first failure. Closes them all. Where the
// write-back of all files was started before, the first sync's journal commit serves the others too: theirs cost a
// flush. (Syncing them at once, on a ring or on threads, was measured to be slower: waking the workers costs more
// than it saves.)
void sync_together(std::vector<Syncing> items);

// Lets the device start on a file's bytes in the page cache. A hint: what it cannot start, the sync does.
void start_writeback(const sys::File& file);

}  // namespace holdfast
