// The file of a shelf on its medium: stores, what orders them, mappings to read it by, and its locks.
//
// Three media. Page cache: stores are writes into the file, `order` is a sync. Writes, because the kernel journals
// the first store through a mapping to each page, which made a commit ten times as slow on ext4. Memory (tmpfs):
// stores go through a mapping, and nothing needs to be ordered. Persistent memory (DAX): stores go through a
// mapping made with MAP_SYNC and are written back from the caches, `order` is a fence.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sys.hpp"

namespace everystep {

enum class Medium { page_cache, memory, persistent };

// A part of a file in memory. A private mapping can be changed; the changes do not reach the file.
class Mapping {
 public:
  enum class Use { read, write, write_sync, own };
  // Throws sys::Error.
  Mapping(const sys::File& file, uint64_t begin, uint64_t end, Use use);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  [[nodiscard]] char* at(uint64_t offset) const { return data_ + (offset - begin_); }
  [[nodiscard]] uint64_t end() const { return end_; }

 private:
  char* data_;
  uint64_t begin_, end_;
};

// A range of generations, both ends included, that some reader uses.
using Pinned = std::pair<uint64_t, uint64_t>;

class ShelfFile {
 public:
  ShelfFile(const std::string& path, bool writable, std::optional<Medium> forced);
  ~ShelfFile() = default;
  ShelfFile(const ShelfFile&) = delete;
  ShelfFile& operator=(const ShelfFile&) = delete;

  [[nodiscard]] Medium medium() const { return medium_; }
  [[nodiscard]] const sys::File& file() const { return file_; }
  [[nodiscard]] const std::string& path() const { return file_.path(); }
  [[nodiscard]] uint64_t nbytes() const { return sys::size(file_); }
  // Reads exactly so many bytes; false where the file ends before.
  bool read(uint64_t offset, void* to, uint64_t nbytes) const { return sys::read_all(file_, to, nbytes, offset); }
  // A mapping that reaches `end`, which must not be beyond the end of the file.
  std::shared_ptr<const Mapping> mapped(uint64_t end);
  void grow(uint64_t nbytes, uint64_t wanted);
  // Returns the checksum of what was stored.
  uint64_t store(uint64_t offset, const void* data, uint64_t nbytes);
  // Everything stored so far is on the medium before anything that is stored later.
  void order();

  // Locks. The kernel drops them with the last descriptor; a forked child shares them until it calls `abandon`.
  bool lock_writer();
  void unlock_writer();
  // Whether another one has it open for writing.
  [[nodiscard]] bool has_writer() const;
  // Counted: the kernel drops the lock at the first of several unlocks.
  void lock_generation(uint64_t generation);
  void unlock_generation(uint64_t generation);
  // What readers use. Nothing if there are too many to list.
  [[nodiscard]] std::optional<std::vector<Pinned>> pinned() const;
  // In a forked child: the file is the parent's.
  void abandon();
  [[nodiscard]] bool is_open() const { return file_.is_open(); }

 private:
  const Mapping& stores(uint64_t end);

  sys::File file_;
  bool writable_;
  Medium medium_ = Medium::page_cache;
  uint64_t forks_;
  std::mutex mutex_;  // of the next two
  std::map<uint64_t, uint64_t> locked_;
  std::shared_ptr<const Mapping> read_;
  std::shared_ptr<const Mapping> write_;
};

}  // namespace everystep
