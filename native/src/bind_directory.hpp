// Open directories as Python has them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "forks.hpp"
#include "sys.hpp"

namespace everystep {

// A directory that is open, and locked if that was asked for, until `release`. The destructor releases it, too: an
// interrupt may strike right after the call that opened it, before Python has stored the object. All of this, and
// `close_exclusive`, runs with the GIL held.
class OpenDirectory {
 public:
  OpenDirectory(std::shared_ptr<sys::Directory> directory, bool is_exclusive)
      : path_(directory->path()), directory_(std::move(directory)) {
    if (is_exclusive) exclusive().push_back(this);
  }
  ~OpenDirectory() { release(); }
  OpenDirectory(const OpenDirectory&) = delete;
  OpenDirectory& operator=(const OpenDirectory&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  void set_path(const std::string& path) {
    directory()->set_path(path);
    path_ = path;
  }
  [[nodiscard]] const std::shared_ptr<sys::Directory>& directory() const {
    if (!directory_ || directory_->fd() < 0) throw std::logic_error("the directory " + path_ + " was released");
    return directory_;
  }

  void release() {
    if (!directory_) return;
    exclusive().erase(std::remove(exclusive().begin(), exclusive().end(), this), exclusive().end());
    // A forked child shares the lock with its parent, which still needs it.
    if (forks() == owner_) sys::unlock(*directory_);
    directory_.reset();
  }

  // For a forked child. Its copies of the descriptors would keep the locks if the parent were killed.
  static void close_exclusive() {
    for (OpenDirectory* one : exclusive()) one->directory_->close();
    exclusive().clear();
  }

 private:
  static std::vector<OpenDirectory*>& exclusive() {
    static std::vector<OpenDirectory*> found;
    return found;
  }

  std::string path_;
  std::shared_ptr<sys::Directory> directory_;
  const uint64_t owner_ = forks();
};

// A path, or a name in an open directory.
inline sys::Path to_path(nb::handle path) {
  return nb::isinstance<sys::Path>(path) ? nb::cast<sys::Path&>(path) : sys::Path(fs_path(path));
}

// A directory to sync: one that is open, or the one at a path.
inline std::shared_ptr<sys::Directory> to_directory(nb::handle directory) {
  if (nb::isinstance<OpenDirectory>(directory)) return nb::cast<OpenDirectory&>(directory).directory();
  const sys::Path path = to_path(directory);
  Released release;
  return sys::open_directory(path, true);
}

}  // namespace everystep
