#include "sync.hpp"

#include <fcntl.h>

#include <cerrno>

namespace everystep {

void sync_together(std::vector<sys::File> files, const sys::Directory* directory) {
  // First, while the device is still at work on the files' bytes, which it was told to start on.
  if (directory != nullptr) sys::sync_dir(*directory);
  for (const sys::File& file : files) sys::sync(file);
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

}  // namespace everystep
