#include "sync.hpp"

#include <fcntl.h>

#include <cerrno>

namespace holdfast {

void sync_together(std::vector<Syncing> items) {
  for (const Syncing& item : items) item.is_directory ? sys::sync_dir(item.file) : sys::sync(item.file);
}

void start_writeback(const sys::File& file, uint64_t offset, uint64_t nbytes) {
  if (::sync_file_range(file.fd(), static_cast<off_t>(offset), static_cast<off_t>(nbytes),
                        SYNC_FILE_RANGE_WRITE) == 0) {
    return;
  }
  switch (errno) {
    case ENOSYS:  // no such call, or not for us, or not for such a file
    case EPERM:
    case EINVAL:
    case ESPIPE:
    case ENOMEM:  // they are all still there
    case EINTR:
      return;
    default:
      throw sys::Error{errno, sys::Call::sync, file.path()};
  }
}

}  // namespace holdfast
