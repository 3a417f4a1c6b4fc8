#include "sync.hpp"

#include <fcntl.h>

namespace holdfast {

void sync_together(std::vector<Syncing> items) {
  for (const Syncing& item : items) item.is_directory ? sys::sync_dir(item.file) : sys::sync(item.file);
}

void start_writeback(const sys::File& file) { ::sync_file_range(file.fd(), 0, 0, SYNC_FILE_RANGE_WRITE); }

}  // namespace holdfast
