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
// Opening a shelf for writing first stores its newest root again, with everything that is not known to be on the
// medium. A killed process, or a failed sync, may have left these bytes in the page cache only.
//
// So the root before always stays whole until the new one is on the medium, and a root that does not verify is
// passed over. If anything fails from step 3 on (a sync, an allocation), a crash may leave either of the two, so
// the shelf takes no more changes until it is opened again. Before step 3 a failure changes nothing: each
// call allocates what it needs before it changes anything, and `rollback` cannot fail.
//
// Not safe to call from several threads at once: Python's own lock keeps them apart. Long work lets go of that
// lock (`let_others_run`), and touches nothing meanwhile that others use. An entry that is read is pinned by the
// call that finds it (`read`), so that what others commit meanwhile does not change its bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "shelf_file.hpp"

namespace everystep {

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
  [[nodiscard]] const ShelfFile& file() const { return *file_; }

 private:
  std::shared_ptr<ShelfFile> file_;
  uint64_t generation_;
};

// What this process does with extents, by their offset. Pins outlive the shelf, and so does this.
struct ExtentUses {
  std::unordered_map<uint64_t, uint64_t> pins;      // how many there are
  std::unordered_map<uint64_t, uint64_t> verified;  // the generation whose bytes fit their checksum
};

// The bytes of an entry in memory. They do not change while this lives.
class Pin {
 public:
  Pin(std::shared_ptr<const Mapping> mapping, Extent extent, std::shared_ptr<ExtentUses> uses,
      std::shared_ptr<GenerationLock> lock);
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  [[nodiscard]] char* data() const { return mapping_->at(extent_.offset); }
  [[nodiscard]] uint64_t nbytes() const { return extent_.nbytes; }
  // The same bytes, where changes stay in this process and in what it gives.
  [[nodiscard]] std::unique_ptr<Pin> own() const;
  [[nodiscard]] bool verified() const;
  // A message about the first damaged block; empty if there is none. Uses nothing but the pinned bytes.
  [[nodiscard]] std::string damage() const;
  void set_verified() { uses_->verified[extent_.offset] = extent_.born; }

 private:
  std::shared_ptr<const Mapping> mapping_;
  Extent extent_;
  std::shared_ptr<ExtentUses> uses_;
  std::shared_ptr<GenerationLock> lock_;
};

// An entry of the committed state: a copy, as the state may change while its caller works.
struct Reading {
  uint32_t kind;
  std::string meta;
  uint64_t born;
  std::unique_ptr<Pin> pin;  // null if the entry has no data
};

struct ShelfUsage {
  uint64_t entries, used, file, limit, waiting, generation;
};

class Shelf {
 public:
  static constexpr uint64_t kBlock = 1 << 20;
  static constexpr uint64_t kPage = 4096;
  static constexpr uint64_t kLong = 256 << 10;  // shorter work keeps Python's lock: letting go would cost more

  // The bytes of an empty shelf.
  static std::string empty_file(uint64_t id, uint64_t limit);

  // Throws sys::Error, ShelfForeign, ShelfNewer, ShelfDamaged. `locked_by_another` tells a second writer.
  Shelf(const std::string& path, bool writable, std::optional<Medium> forced);
  ~Shelf();
  Shelf(const Shelf&) = delete;
  Shelf& operator=(const Shelf&) = delete;

  [[nodiscard]] bool locked_by_another() const { return locked_by_another_; }
  // Why the newest root was passed over; empty if it was not.
  [[nodiscard]] const std::string& warning() const { return warning_; }
  [[nodiscard]] ShelfUsage usage() const;
  [[nodiscard]] bool is_writable() const { return writable_; }
  [[nodiscard]] Medium medium() const { return file_->medium(); }
  void set_limit(uint64_t limit);
  // How to run long work.
  using Run = std::function<void(const std::function<void()>&)>;
  void let_others_run(Run run) { run_ = std::move(run); }

  // --- committed state
  [[nodiscard]] bool has(std::string_view name) const { return find(name) != nullptr; }
  [[nodiscard]] std::vector<std::string> names() const;
  // Pins the data of an entry, if there is such an entry.
  std::optional<Reading> read(std::string_view name);
  // For readers: the newest committed state. Whether it is another one than before.
  bool refresh();

  // --- the transaction under way; it begins with the first change. A change that fails changes nothing.
  void put(const std::string& name, uint32_t kind, std::string meta, const void* data, uint64_t nbytes);
  void remove(const std::string& name);
  // The names as the transaction would leave them.
  [[nodiscard]] std::vector<std::string> changed_names() const;
  // What the name has in the transaction: nothing if it is unchanged, null if it is removed.
  [[nodiscard]] std::optional<const ShelfEntry*> changed(std::string_view name) const;
  // The bytes that the transaction has stored, as long as no other change follows.
  [[nodiscard]] const char* changed_data(const ShelfEntry& entry);
  void commit();
  void rollback() noexcept;
  // Empty, unless a commit failed and it is unknown what is on the medium.
  [[nodiscard]] const std::string& failure() const { return failure_; }

  void close();
  void abandon() { file_->abandon(); }

 private:
  using Entries = std::map<std::string, ShelfEntry, std::less<>>;
  struct Bucket {
    Entries entries;
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
  // If memory runs out, the space stays unused until the shelf is opened again.
  void release(uint64_t offset, uint64_t nbytes) noexcept;
  void give_back(const Extent& extent) noexcept { release(extent.offset, stored_nbytes(extent.nbytes)); }
  Extent store_data(uint64_t offset, const void* data, uint64_t nbytes);
  void read_header();
  [[nodiscard]] const ShelfEntry* find(std::string_view name) const;
  void order();
  void replace_state(State next, const std::vector<bool>& touched) noexcept;
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
  std::shared_ptr<ExtentUses> uses_ = std::make_shared<ExtentUses>();
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
  Entries assigned_;
  std::set<std::string, std::less<>> removed_;
};

}  // namespace everystep
