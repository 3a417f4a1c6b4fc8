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

// A directory that is open, and locked if it was asked for, until `release`, or until nothing refers to it any
// more: where an interrupt strikes right after the call that took it, nobody has its descriptor yet. Made and
// destroyed with the GIL held, as is what a fork does about it.
class HeldDirectory {
 public:
  HeldDirectory(std::shared_ptr<sys::Directory> directory, bool is_exclusive)
      : path_(directory->path()), directory_(std::move(directory)) {
    if (is_exclusive) exclusive().push_back(this);
  }
  ~HeldDirectory() { release(); }
  HeldDirectory(const HeldDirectory&) = delete;
  HeldDirectory& operator=(const HeldDirectory&) = delete;

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
    // A forked child shares the lock with its parent, who goes on.
    if (forks() == owner_) sys::unlock(*directory_);
    directory_.reset();
  }

  // In a forked child: were the parent killed while it writes, the child would hold its directories.
  static void leave_to_the_parent() {
    for (HeldDirectory* held : exclusive()) held->directory_->close();
    exclusive().clear();
  }

 private:
  static std::vector<HeldDirectory*>& exclusive() {
    static std::vector<HeldDirectory*> found;
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
  if (nb::isinstance<HeldDirectory>(directory)) return nb::cast<HeldDirectory&>(directory).directory();
  const sys::Path path = to_path(directory);
  Released release;
  return sys::open_directory(path, true);
}

}  // namespace everystep
