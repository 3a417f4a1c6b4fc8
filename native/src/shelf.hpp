// A shelf: named entries in one file, changed by transactions that a crash cannot tear.
//
// docs/shelf-format.md is the grammar of the file. How a transaction becomes durable:
//
//   1. The bytes of each new entry are stored in free space: space that neither the newest root nor a reader uses.
//   2. The directory nodes that name the changed entries are stored in free space.
//   3. Unless all of this is small, it is ordered before the root (sync, or fence). What is small is not: it is
//      in the checksums that the next one to open the file verifies before it believes the root.
//   4. The root is stored over the older of two slots, then ordered. With that the transaction is committed.
//   5. What the new root does not use becomes free, once no reader uses it.
//
// Whoever opens a shelf to write stores its newest root again, with what is not known to be on the medium, before
// anything else: a killed process, or a failed sync, may have left it where only this machine sees it.
//
// So the root before always stays whole until the new one is on the medium, and a root that does not verify is
// passed over. A failed sync leaves it open which of the two a crash would leave: the shelf takes no more changes.
//
// Not safe to call from several threads at once: Python's own lock keeps them apart. Long work lets go of that
// lock
// (`let_others_run`), and touches nothing meanwhile that others use.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "shelf_file.hpp"

namespace holdfast {

struct ShelfFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Not a shelf at all; or one of a newer version; or one that is damaged.
struct ShelfForeign : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct ShelfNewer : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct ShelfDamaged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Extent {
  uint64_t offset = 0;
  uint64_t nbytes = 0;  // 0: none
  uint64_t checksum = 0;
  uint64_t born = 0;  // the generation whose transaction stored it
};

struct ShelfEntry {
  uint32_t kind = 0;
  std::string meta;
  Extent data;
};

// Keeps other writers from the space of one generation for as long as it lives.
class GenerationLock {
 public:
  GenerationLock(std::shared_ptr<ShelfFile> file, uint64_t generation);
  ~GenerationLock();
  GenerationLock(const GenerationLock&) = delete;
  GenerationLock& operator=(const GenerationLock&) = delete;
  [[nodiscard]] uint64_t generation() const { return generation_; }

 private:
  std::shared_ptr<ShelfFile> file_;
  uint64_t generation_;
};

// How many arrays of this process lie on each extent, by its offset.
using PinCounts = std::unordered_map<uint64_t, uint64_t>;

// The bytes of an entry in memory. They do not change while this lives.
class Pin {
 public:
  Pin(std::shared_ptr<const Mapping> mapping, Extent extent, std::shared_ptr<PinCounts> counts,
      std::shared_ptr<GenerationLock> lock);
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  [[nodiscard]] char* data() const { return mapping_->at(extent_.offset); }
  [[nodiscard]] uint64_t nbytes() const { return extent_.nbytes; }

 private:
  std::shared_ptr<const Mapping> mapping_;
  Extent extent_;
  std::shared_ptr<PinCounts> counts_;
  std::shared_ptr<GenerationLock> lock_;
};

struct ShelfUsage {
  uint64_t entries, used, file, limit, waiting, generation;
};

class Shelf {
 public:
  static constexpr uint64_t kBlock = 1 << 20;
  static constexpr uint64_t kPage = 4096;

  // The bytes of an empty shelf.
  static std::string empty_file(uint64_t id, uint64_t limit);

  // Throws sys::Error, ShelfForeign, ShelfNewer, ShelfDamaged. `locked` tells a second writer.
  Shelf(const std::string& path, bool writable, std::optional<Medium> forced);
  ~Shelf();
  Shelf(const Shelf&) = delete;
  Shelf& operator=(const Shelf&) = delete;

  [[nodiscard]] bool locked_by_another() const { return locked_by_another_; }
  // Why the newest root was passed over; empty if it was not.
  [[nodiscard]] const std::string& warning() const { return warning_; }
  [[nodiscard]] ShelfUsage usage() const;
  [[nodiscard]] Medium medium() const { return file_->medium(); }
  void set_limit(uint64_t limit);
  // How to run long work.
  using Run = std::function<void(const std::function<void()>&)>;
  void let_others_run(Run run) { run_ = std::move(run); }

  // --- committed state
  [[nodiscard]] const ShelfEntry* find(std::string_view name) const;
  [[nodiscard]] std::vector<std::string> names() const;
  // With `own`, changes to it stay in this process, and in this array.
  std::unique_ptr<Pin> pin(const ShelfEntry& entry, bool own);
  // A message about the first damaged block; empty if there is none.
  std::string damage(const ShelfEntry& entry);
  // For readers: the newest committed state. Whether it is another one than before.
  bool refresh();

  // --- the transaction under way; it begins with the first change
  void put(const std::string& name, uint32_t kind, std::string meta, const void* data, uint64_t nbytes);
  void remove(const std::string& name);
  // What the name has in the transaction: nothing if it is unchanged, null if it is removed.
  [[nodiscard]] std::optional<const ShelfEntry*> changed(std::string_view name) const;
  void copy_changed(std::string_view name, void* to);
  void commit();
  void rollback();
  // Empty unless a commit failed in a way that leaves it open what is on the medium.
  [[nodiscard]] const std::string& failure() const { return failure_; }

  void close();
  void abandon() { file_->abandon(); }

 private:
  struct Bucket {
    std::map<std::string, ShelfEntry, std::less<>> entries;
    Extent node;
  };
  struct State {
    uint64_t generation = 0;
    uint64_t limit = 0;
    uint64_t end = 0;  // the file has to be as long as this
    uint64_t entry_count = 0;
    std::vector<Bucket> buckets;
  };
  struct Root {
    uint64_t generation, limit, end, flags, entry_count;
    std::vector<Extent> nodes;
  };
  struct Freed {
    Extent extent;
    uint64_t died;
  };

  static std::string encode(const State& state, uint64_t id, bool ordered);
  std::optional<Root> parse_root(const std::string& page, std::string& why) const;
  State load(const Root& root);
  void open_newest();
  void find_free_space();
  void settle();
  void reclaim();
  uint64_t allocate(uint64_t nbytes);
  void release(uint64_t offset, uint64_t nbytes);
  void give_back(const Extent& extent) { release(extent.offset, stored_nbytes(extent.nbytes)); }
  Extent store_data(uint64_t offset, const void* data, uint64_t nbytes);
  void read_header();
  void order();
  template <typename Work>
  void run(uint64_t nbytes, Work work);

  static uint64_t stored_nbytes(uint64_t nbytes);  // with the table of block checksums
  static size_t bucket_of(std::string_view name, size_t count);

  std::shared_ptr<ShelfFile> file_;
  bool writable_;
  Run run_ = [](const std::function<void()>& work) { work(); };
  bool locked_by_another_ = false;
  uint64_t id_ = 0;
  State state_;
  std::string warning_;
  std::string failure_;
  std::shared_ptr<PinCounts> counts_ = std::make_shared<PinCounts>();
  std::weak_ptr<GenerationLock> pinned_generation_;  // of the writer's own arrays
  std::shared_ptr<GenerationLock> reading_;          // of a reader's snapshot
  // Space, in bytes: whole pages.
  std::map<uint64_t, uint64_t> free_;  // offset -> nbytes, below end_
  uint64_t end_ = 0;                   // no extent lies beyond
  std::vector<Freed> freed_;
  std::map<uint64_t, uint64_t> quarantined_;  // what readers of unknown older generations may use
  uint64_t opened_generation_ = 0;
  uint64_t used_ = 0;
  // The transaction.
  bool begun_ = false;
  uint64_t stored_ = 0;
  std::vector<Extent> new_nodes_;
  std::map<std::string, std::optional<ShelfEntry>, std::less<>> changes_;
};

}  // namespace holdfast
