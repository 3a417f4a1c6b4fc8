#include "sync.hpp"

namespace everystep {

void sync_together(std::vector<sys::File> files, const sys::Directory* directory) {
  // The directory comes first: meanwhile the device works on the files' bytes, whose write-back was started
  // before.
  if (directory != nullptr) sys::sync_dir(*directory);
  for (const sys::File& file : files) sys::sync(file);
}

}  // namespace everystep
