#include "sync.hpp"

namespace everystep {

void sync_together(std::vector<sys::File> files, const sys::Directory* directory) {
  // First, while the device is still at work on the files' bytes, which it was told to start on.
  if (directory != nullptr) sys::sync_dir(*directory);
  for (const sys::File& file : files) sys::sync(file);
}

}  // namespace everystep
