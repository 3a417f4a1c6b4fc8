// Making several files and directories durable at once.
#pragma once

#include <vector>

#include "sys.hpp"

namespace holdfast {

struct Syncing {
  sys::File file;
  bool is_directory = false;
};

// Returns when all are durable; throws the first failure, in their order, after all have ended. Closes them all.
// Together they share a journal commit and a device flush, which one after the other they would each wait for.
void sync_together(std::vector<Syncing> items);

// Lets the device start on a file's bytes in the page cache. On a ring, when there is one: what follows in this
// thread overlaps with it, and the next `sync_together` waits for it, so that all files share one journal commit.
void start_writeback(const sys::File& file);

}  // namespace holdfast
