#include "shelf.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

#include "hash.hpp"

namespace holdfast {
namespace {

constexpr std::string_view kHeaderMagic = "hfshelf\n", kRootMagic = "hfroot1\n";
constexpr uint32_t kVersion = 1;
constexpr uint64_t kHeaderNbytes = 64;
constexpr uint64_t kSpace = 3 * Shelf::kPage;  // behind the header and two roots
constexpr uint32_t kMostBuckets = 64;
constexpr uint64_t kEntriesPerBucket = 16;
constexpr uint64_t kRefs = 64, kRefNbytes = 32;
constexpr uint64_t kEntryNbytes = 48;
constexpr uint64_t kOrdered = 1;  // a root's flag
// What is not more than this is verified on opening, instead of a sync of its own in each commit.
constexpr uint64_t kSmall = 1 << 20;
// Bounds against files that lie.
constexpr uint64_t kMostNbytes = uint64_t{1} << 47;
constexpr uint64_t kMostGenerations = uint64_t{1} << 59;
constexpr uint64_t kMostEntries = 1 << 20;
constexpr uint64_t kMostNodeNbytes = 1 << 30;
constexpr uint64_t kLeastGrowth = 256 << 10, kMostGrowth = 64 << 20;
constexpr int kTries = 1000, kTriesOfDamaged = 4;  // of a reader that a writer overtakes; of a file that stays bad

uint64_t pages(uint64_t nbytes) { return (nbytes + Shelf::kPage - 1) / Shelf::kPage * Shelf::kPage; }

template <typename Number>
void put_number(char* at, Number value) {  // files are little-endian, and so are the processors that this is for
  std::memcpy(at, &value, sizeof value);
}

template <typename Number>
Number get_number(const char* at) {
  Number value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

uint64_t block_count(uint64_t nbytes) { return (nbytes + Shelf::kBlock - 1) / Shelf::kBlock; }
// The table of block checksums stands behind the data, where there is more than one block.
uint64_t table_offset(uint64_t nbytes) { return (nbytes + 7) / 8 * 8; }

// The first block whose checksum does not fit, or nothing. `table` may be null for one block.
std::optional<uint64_t> bad_block(const char* data, uint64_t nbytes, uint64_t checksum, const char* table) {
  const uint64_t blocks = block_count(nbytes);
  if (blocks <= 1) return xxh3(data, nbytes) == checksum ? std::nullopt : std::optional<uint64_t>(0);
  if (xxh3(table, 8 * blocks) != checksum) return 0;
  constexpr uint64_t kAtOnce = 64;
  std::vector<Hashing> hashing;
  for (uint64_t first = 0; first < blocks; first += kAtOnce) {
    hashing.clear();
    for (uint64_t i = first; i < std::min(blocks, first + kAtOnce); ++i) {
      hashing.push_back({data + i * Shelf::kBlock, std::min(Shelf::kBlock, nbytes - i * Shelf::kBlock)});
    }
    xxh3_each(hashing);
    for (uint64_t i = 0; i < hashing.size(); ++i) {
      if (hashing[i].value != get_number<uint64_t>(table + 8 * (first + i))) return first + i;
    }
  }
  return std::nullopt;
}

}  // namespace

// --- pins ----------------------------------------------------------------------------------------------------

GenerationLock::GenerationLock(std::shared_ptr<ShelfFile> file, uint64_t generation)
    : file_(std::move(file)), generation_(generation) {
  file_->lock_generation(generation_);
}

GenerationLock::~GenerationLock() { file_->unlock_generation(generation_); }

Pin::Pin(std::shared_ptr<const Mapping> mapping, Extent extent, std::shared_ptr<PinCounts> counts,
         std::shared_ptr<GenerationLock> lock)
    : mapping_(std::move(mapping)), extent_(extent), counts_(std::move(counts)), lock_(std::move(lock)) {
  ++(*counts_)[extent_.offset];
}

Pin::~Pin() {
  const auto found = counts_->find(extent_.offset);
  if (--found->second == 0) counts_->erase(found);
}

// --- bytes ---------------------------------------------------------------------------------------------------

struct Shelf::Root {
  uint64_t generation, limit, end, flags, entry_count;
  std::vector<Extent> nodes;
};

uint64_t Shelf::stored_nbytes(uint64_t nbytes) {
  const uint64_t blocks = block_count(nbytes);
  return pages(blocks > 1 ? table_offset(nbytes) + 8 * blocks : nbytes);
}

size_t Shelf::bucket_of(std::string_view name, size_t count) {
  return xxh3(name.data(), name.size()) & (count - 1);  // a power of two
}

std::string Shelf::encode(const State& state, uint64_t id, bool ordered) {
  std::string page(kPage, '\0');
  char* const at = page.data();
  uint64_t end = kSpace;
  for (size_t i = 0; i < state.buckets.size(); ++i) {
    const Bucket& bucket = state.buckets[i];
    char* const ref = at + kRefs + i * kRefNbytes;
    put_number(ref, bucket.node.offset);
    put_number(ref + 8, bucket.node.nbytes);
    put_number(ref + 16, bucket.node.checksum);
    put_number(ref + 24, bucket.node.born);
    if (bucket.node.nbytes != 0) end = std::max(end, bucket.node.offset + stored_nbytes(bucket.node.nbytes));
  }
  std::memcpy(at, kRootMagic.data(), kRootMagic.size());
  put_number(at + 8, id);
  put_number(at + 16, state.generation);
  put_number(at + 24, state.limit);
  put_number(at + 32, std::max(end, state.end));
  put_number(at + 40, ordered ? kOrdered : uint64_t{0});
  put_number(at + 48, static_cast<uint32_t>(state.buckets.size()));
  put_number(at + 52, static_cast<uint32_t>(state.entry_count));
  put_number(at + kPage - 8, xxh3(at, kPage - 8));
  return page;
}

std::string Shelf::empty_file(uint64_t id, uint64_t limit) {
  std::string file(kSpace, '\0');
  char* const at = file.data();
  std::memcpy(at, kHeaderMagic.data(), kHeaderMagic.size());
  put_number(at + 8, kVersion);
  put_number(at + 12, static_cast<uint32_t>(kPage));
  put_number(at + 16, id);
  put_number(at + kHeaderNbytes - 8, xxh3(at, kHeaderNbytes - 8));
  State state;
  state.generation = 1;
  state.limit = limit;
  state.buckets.resize(1);
  const std::string root = encode(state, id, true);
  std::memcpy(at + 2 * kPage, root.data(), root.size());  // slot 1: that of odd generations
  return file;
}

template <typename Work>
void Shelf::run(uint64_t nbytes, Work work) {
  constexpr uint64_t kLong = 256 << 10;  // below, letting go of the lock would cost more
  if (nbytes < kLong) {
    work();
  } else {
    run_(work);
  }
}

void Shelf::order() {
  if (file_->medium() == Medium::page_cache) {
    run_([&] { file_->order(); });
  } else {
    file_->order();
  }
}

// --- opening -------------------------------------------------------------------------------------------------

Shelf::Shelf(const std::string& path, bool writable, std::optional<Medium> forced)
    : file_(std::make_shared<ShelfFile>(path, writable, forced)), writable_(writable) {
  read_header();
  if (writable && !file_->lock_writer()) {
    locked_by_another_ = true;
    return;
  }
  open_newest();
  if (!writable) return;
  settle();
  find_free_space();
}

Shelf::~Shelf() { close(); }

void Shelf::close() {
  if (writable_ && !locked_by_another_) file_->unlock_writer();
  reading_.reset();
}

void Shelf::read_header() {
  char header[kHeaderNbytes] = {};
  const bool whole = file_->read(0, header, sizeof header);
  if (std::string_view(header, kHeaderMagic.size()) != kHeaderMagic) {
    throw ShelfForeign(whole || file_->nbytes() != 0 ? "it does not begin as a shelf does" : "it is empty");
  }
  if (!whole) throw ShelfDamaged("the file ends inside of its header");
  if (get_number<uint64_t>(header + kHeaderNbytes - 8) != xxh3(header, kHeaderNbytes - 8)) {
    throw ShelfDamaged("the checksum of its header does not fit");
  }
  const auto version = get_number<uint32_t>(header + 8);
  if (version != kVersion || get_number<uint32_t>(header + 12) != kPage) {
    throw ShelfNewer("its format is version " + std::to_string(version) + ", and this Holdfast reads version 1");
  }
  id_ = get_number<uint64_t>(header + 16);
  if (file_->nbytes() < kSpace) throw ShelfDamaged("the file ends inside of its roots");
}

std::optional<Shelf::Root> Shelf::parse_root(const std::string& page, std::string& why) const {
  const char* const at = page.data();
  if (std::string_view(at, kRootMagic.size()) != kRootMagic ||
      get_number<uint64_t>(at + kPage - 8) != xxh3(at, kPage - 8)) {
    // A slot that was never written, or was cleared, is no damage.
    if (std::any_of(page.begin(), page.end(), [](char c) { return c != 0; }))
      why = "a root's checksum does not fit";
    return std::nullopt;
  }
  const Root bad{};
  Root root{get_number<uint64_t>(at + 16), get_number<uint64_t>(at + 24), get_number<uint64_t>(at + 32),
            get_number<uint64_t>(at + 40), get_number<uint32_t>(at + 52), {}};
  const auto count = get_number<uint32_t>(at + 48);
  if (get_number<uint64_t>(at + 8) != id_) {
    why = "a root belongs to another shelf";
  } else if (root.generation == 0 || root.generation >= kMostGenerations || root.limit > kMostNbytes ||
             root.end > kMostNbytes || root.entry_count > kMostEntries || count == 0 || count > kMostBuckets ||
             (count & (count - 1)) != 0 || root.flags > kOrdered) {
    why = "a root's numbers are out of range";
  } else if (root.end > file_->nbytes()) {
    why = "the file is " + std::to_string(file_->nbytes()) + " bytes long and should be at least " +
          std::to_string(root.end);
  } else {
    for (uint32_t i = 0; i < count; ++i) {
      const char* const ref = at + kRefs + i * kRefNbytes;
      root.nodes.push_back({get_number<uint64_t>(ref), get_number<uint64_t>(ref + 8),
                            get_number<uint64_t>(ref + 16), get_number<uint64_t>(ref + 24)});
    }
    return root;
  }
  return std::nullopt;
}

Shelf::State Shelf::load(const Root& root) {
  State state;
  state.generation = root.generation;
  state.limit = root.limit;
  state.end = root.end;
  state.entry_count = root.entry_count;
  state.buckets.resize(root.nodes.size());
  std::vector<std::pair<uint64_t, uint64_t>> taken;
  const auto claim = [&](const Extent& extent, const std::string& what) {
    if (extent.nbytes == 0) return;
    const bool fits = extent.offset % kPage == 0 && extent.offset >= kSpace && extent.nbytes <= kMostNbytes &&
                      extent.offset <= root.end && stored_nbytes(extent.nbytes) <= root.end - extent.offset &&
                      extent.born <= root.generation;
    if (!fits) throw ShelfDamaged(what + " lies outside of the file");
    taken.emplace_back(extent.offset, stored_nbytes(extent.nbytes));
  };
  std::string bytes;
  const auto fetch = [&](const Extent& extent, const std::string& what) {
    const uint64_t blocks = block_count(extent.nbytes);
    bytes.resize(blocks > 1 ? table_offset(extent.nbytes) + 8 * blocks : extent.nbytes);
    if (!file_->read(extent.offset, bytes.data(), bytes.size())) throw ShelfDamaged(what + " is cut off");
    const char* const table = blocks > 1 ? bytes.data() + table_offset(extent.nbytes) : nullptr;
    if (bad_block(bytes.data(), extent.nbytes, extent.checksum, table)) {
      throw ShelfDamaged("the checksum of " + what + " does not fit");
    }
  };
  uint64_t seen = 0, fresh_nbytes = 0;
  std::vector<std::pair<std::string, Extent>> fresh;
  for (size_t i = 0; i < root.nodes.size(); ++i) {
    const Extent& node = root.nodes[i];
    state.buckets[i].node = node;
    claim(node, "a directory node");
    if (node.nbytes > kMostNodeNbytes) throw ShelfDamaged("a directory node is too large");
    if (node.nbytes == 0) continue;
    fetch(node, "a directory node");
    const char* at = bytes.data();
    uint64_t left = node.nbytes;
    while (left > 0) {
      if (left < kEntryNbytes) throw ShelfDamaged("a directory node is cut off");
      const uint64_t name_nbytes = get_number<uint32_t>(at), meta_nbytes = get_number<uint32_t>(at + 8);
      const uint64_t entry_nbytes = (kEntryNbytes + name_nbytes + meta_nbytes + 7) / 8 * 8;
      if (entry_nbytes > left || name_nbytes == 0) throw ShelfDamaged("a directory node is cut off");
      ShelfEntry entry{get_number<uint32_t>(at + 4),
                       std::string(at + kEntryNbytes + name_nbytes, meta_nbytes),
                       {get_number<uint64_t>(at + 16), get_number<uint64_t>(at + 24),
                        get_number<uint64_t>(at + 32), get_number<uint64_t>(at + 40)}};
      std::string name(at + kEntryNbytes, name_nbytes);
      claim(entry.data, "an entry's data");
      if ((root.flags & kOrdered) == 0 && entry.data.nbytes != 0 && entry.data.born == root.generation) {
        fresh.emplace_back(name, entry.data);
        fresh_nbytes += entry.data.nbytes;
      }
      if (bucket_of(name, root.nodes.size()) != i) throw ShelfDamaged("an entry is in the wrong directory node");
      if (!state.buckets[i].entries.emplace(std::move(name), std::move(entry)).second) {
        throw ShelfDamaged("two entries have one name");
      }
      ++seen;
      at += entry_nbytes;
      left -= entry_nbytes;
    }
  }
  if (seen != root.entry_count) throw ShelfDamaged("its directory is not complete");
  std::sort(taken.begin(), taken.end());
  for (size_t i = 1; i < taken.size(); ++i) {
    if (taken[i - 1].first + taken[i - 1].second > taken[i].first) throw ShelfDamaged("two entries overlap");
  }
  // A small transaction is in the file with its root or without: its data tell.
  if (fresh_nbytes > kSmall) throw ShelfDamaged("a transaction is larger than its root says");
  for (const auto& [name, extent] : fresh) fetch(extent, "an entry of the last transaction");
  return state;
}

void Shelf::open_newest() {
  std::string pages_of[2] = {std::string(kPage, '\0'), std::string(kPage, '\0')};
  const auto roots = [&](std::string& why) {
    std::vector<Root> found;
    for (int slot = 0; slot < 2; ++slot) {
      if (!file_->read(kPage * static_cast<uint64_t>(1 + slot), pages_of[slot].data(), kPage)) {
        throw ShelfDamaged("the file ends inside of its roots");
      }
      auto root = parse_root(pages_of[slot], why);
      if (root && root->generation % 2 != static_cast<uint64_t>(slot)) {
        why = "a root is in the wrong place";
      } else if (root) {
        found.push_back(std::move(*root));
      }
    }
    std::sort(found.begin(), found.end(),
              [](const Root& a, const Root& b) { return a.generation > b.generation; });
    return found;
  };
  std::string why;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    // A writer may be at work meanwhile: then what a reader sees is judged again.
    if (attempt > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    why.clear();
    const std::vector<Root> found = roots(why);
    const uint64_t newest = found.empty() ? 0 : found.front().generation;
    const auto overtaken = [&] {
      std::string ignored;
      const auto now = roots(ignored);
      return !writable_ && !now.empty() && now.front().generation != newest;
    };
    bool again = false;
    for (const Root& root : found) {
      std::shared_ptr<GenerationLock> lock;
      if (!writable_) {
        lock = std::make_shared<GenerationLock>(file_, root.generation);
        if (overtaken()) {
          again = true;
          break;
        }
      }
      try {
        state_ = load(root);
      } catch (const ShelfDamaged& damage) {
        if (overtaken()) {
          again = true;
          break;
        }
        why = damage.what();
        continue;
      }
      reading_ = std::move(lock);
      // A reader that comes while a writer overwrites the older root sees one that does not fit: no damage.
      const bool passed_over = newest != root.generation || (!why.empty() && writable_);
      warning_ = passed_over ? why : std::string();
      if (writable_ && passed_over) {
        // It must not come back to life when its space has been used for something else.
        const uint64_t slot = (root.generation + 1) % 2;
        const std::string nothing(kPage, '\0');
        file_->store(kPage * (1 + slot), nothing.data(), kPage);
        file_->order();
      }
      return;
    }
    if (!again && (writable_ || attempt >= kTriesOfDamaged)) break;
  }
  throw ShelfDamaged(why.empty() ? "it has no root" : why);
}

// What a killed process has stored is seen here, and yet a power cut may lose it: then the root before is the
// newest, and its space must not have been used for anything else. Stored again, not only synced: after a sync
// that failed, the kernel takes the pages for clean.
void Shelf::settle() {
  std::string page(kPage, '\0');
  const uint64_t slot = kPage * (1 + state_.generation % 2);
  if (!file_->read(slot, page.data(), kPage)) throw ShelfDamaged("the file ends inside of its roots");
  if (get_number<uint64_t>(page.data() + 40) != kOrdered) {
    std::string bytes;
    const auto again = [&](const Extent& extent) {
      if (extent.nbytes == 0 || extent.born != state_.generation) return;
      bytes.resize(extent.nbytes);
      if (!file_->read(extent.offset, bytes.data(), bytes.size())) throw ShelfDamaged("the file is cut off");
      file_->store(extent.offset, bytes.data(), bytes.size());
    };
    for (const Bucket& bucket : state_.buckets) {
      again(bucket.node);
      for (const auto& [name, entry] : bucket.entries) again(entry.data);
    }
  }
  file_->store(slot, page.data(), kPage);
  file_->order();
}

bool Shelf::refresh() {
  const uint64_t before = state_.generation;
  // A glance at the other slot, before everything is read again.
  std::string page(kPage, '\0'), why;
  if (file_->read(kPage * (1 + (before + 1) % 2), page.data(), kPage)) {
    const auto other = parse_root(page, why);
    if (other && other->generation < before) return false;
  }
  open_newest();
  return state_.generation != before;
}

void Shelf::find_free_space() {
  std::map<uint64_t, uint64_t> taken;
  const auto add = [&](const Extent& extent) {
    if (extent.nbytes != 0) taken[extent.offset] = stored_nbytes(extent.nbytes);
  };
  for (const Bucket& bucket : state_.buckets) {
    add(bucket.node);
    for (const auto& [name, entry] : bucket.entries) add(entry.data);
  }
  end_ = kSpace;
  for (const auto& [offset, nbytes] : taken) {
    if (offset > end_) free_[end_] = offset - end_;
    end_ = offset + nbytes;
    used_ += nbytes;
  }
  opened_generation_ = state_.generation;
  const auto pinned = file_->pinned();
  const bool older = !pinned || std::any_of(pinned->begin(), pinned->end(),
                                            [&](const Pinned& range) { return range.first < opened_generation_; });
  if (older) {
    // Readers use generations whose directory is gone. All that is not the newest's own may be theirs.
    const uint64_t whole = file_->nbytes() / kPage * kPage;
    if (whole > end_) free_[end_] = whole - end_;
    end_ = std::max(end_, whole);
    quarantined_.swap(free_);
  }
}

// --- space ---------------------------------------------------------------------------------------------------

void Shelf::release(uint64_t offset, uint64_t nbytes) {
  if (nbytes == 0) return;
  auto [at, fresh] = free_.emplace(offset, nbytes);
  if (const auto next = std::next(at); next != free_.end() && offset + nbytes == next->first) {
    at->second += next->second;
    free_.erase(next);
  }
  if (at != free_.begin()) {
    const auto before = std::prev(at);
    if (before->first + before->second == at->first) {
      before->second += at->second;
      free_.erase(at);
    }
  }
}

void Shelf::reclaim() {
  if (freed_.empty() && quarantined_.empty()) return;
  const auto pinned = file_->pinned();
  if (!pinned) return;
  const auto used = [&](uint64_t born, uint64_t died) {
    return std::any_of(pinned->begin(), pinned->end(),
                       [&](const Pinned& range) { return range.first < died && range.second >= born; });
  };
  if (!quarantined_.empty() && !used(0, opened_generation_)) {
    for (const auto& [offset, nbytes] : quarantined_) release(offset, nbytes);
    quarantined_.clear();
  }
  std::erase_if(freed_, [&](const Freed& freed) {
    if (used(freed.extent.born, freed.died) || counts_->contains(freed.extent.offset)) return false;
    give_back(freed.extent);
    return true;
  });
}

uint64_t Shelf::allocate(uint64_t nbytes) {
  if (!begun_) {
    reclaim();
    begun_ = true;
  }
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->second < nbytes) continue;
    const auto [offset, available] = *at;
    free_.erase(at);
    if (available > nbytes) free_[offset + nbytes] = available - nbytes;
    return offset;
  }
  uint64_t offset = end_;
  if (!free_.empty()) {
    const auto last = std::prev(free_.end());
    if (last->first + last->second == end_) offset = last->first;
  }
  const uint64_t end = offset + nbytes;
  if (end > state_.limit || end < offset) {
    uint64_t waiting = 0;
    for (const Freed& freed : freed_) waiting += stored_nbytes(freed.extent.nbytes);
    for (const auto& [at, quarantined] : quarantined_) waiting += quarantined;
    throw ShelfFull(std::to_string(nbytes) + " bytes more are needed, its limit is " +
                    std::to_string(state_.limit) + " bytes, of which " + std::to_string(used_) +
                    " hold the committed state and " + std::to_string(waiting) + " are held by readers");
  }
  if (const uint64_t now = file_->nbytes(); end > now) {
    const uint64_t more = std::clamp(now / 4, kLeastGrowth, kMostGrowth);
    file_->grow(end, std::max(end, std::min(pages(end + more), state_.limit / kPage * kPage)));
  }
  if (offset != end_) free_.erase(offset);
  end_ = end;
  return offset;
}

// --- the committed state -------------------------------------------------------------------------------------

ShelfUsage Shelf::usage() const {
  uint64_t waiting = 0;
  for (const Freed& freed : freed_) waiting += stored_nbytes(freed.extent.nbytes);
  for (const auto& [offset, nbytes] : quarantined_) waiting += nbytes;
  return {state_.entry_count, used_,   file_->is_open() ? file_->nbytes() : 0,
          state_.limit,       waiting, state_.generation};
}

void Shelf::set_limit(uint64_t limit) { state_.limit = std::min(limit, kMostNbytes); }

const ShelfEntry* Shelf::find(std::string_view name) const {
  if (state_.buckets.empty()) return nullptr;
  const auto& entries = state_.buckets[bucket_of(name, state_.buckets.size())].entries;
  const auto found = entries.find(name);
  return found == entries.end() ? nullptr : &found->second;
}

std::vector<std::string> Shelf::names() const {
  std::vector<std::string> found;
  for (const Bucket& bucket : state_.buckets) {
    for (const auto& [name, entry] : bucket.entries) found.push_back(name);
  }
  return found;
}

std::unique_ptr<Pin> Shelf::pin(const ShelfEntry& entry, bool own) {
  auto lock = writable_ ? pinned_generation_.lock() : reading_;
  if (writable_ && (!lock || lock->generation() != state_.generation)) {
    lock = std::make_shared<GenerationLock>(file_, state_.generation);
    pinned_generation_ = lock;
  }
  const uint64_t end = entry.data.offset + entry.data.nbytes;
  const auto mapping =
      own ? std::make_shared<const Mapping>(file_->file(), entry.data.offset, end, Mapping::Use::own)
          : file_->mapped(end);
  return std::make_unique<Pin>(mapping, entry.data, counts_, std::move(lock));
}

std::string Shelf::damage(const ShelfEntry& entry) {
  const Extent extent = entry.data;  // others may change the entry while this lets them run
  if (extent.nbytes == 0) return {};
  const uint64_t end = extent.offset + stored_nbytes(extent.nbytes);
  if (end > file_->nbytes()) return "the file ends before it";
  const auto mapping = file_->mapped(end);
  const char* const data = mapping->at(extent.offset);
  std::optional<uint64_t> bad;
  run(extent.nbytes,
      [&] { bad = bad_block(data, extent.nbytes, extent.checksum, data + table_offset(extent.nbytes)); });
  if (!bad) return {};
  const uint64_t first = *bad * kBlock;
  return "the checksum of its bytes " + std::to_string(first) + " to " +
         std::to_string(std::min(first + kBlock, extent.nbytes)) + " does not fit";
}

// --- transactions --------------------------------------------------------------------------------------------

Extent Shelf::store_data(uint64_t offset, const void* data, uint64_t nbytes) {
  const auto* const from = static_cast<const char*>(data);
  const uint64_t blocks = block_count(nbytes), born = state_.generation + 1;
  if (nbytes == 0) return {0, 0, 0, born};
  stored_ += nbytes;
  if (blocks == 1) return {offset, nbytes, file_->store(offset, from, nbytes), born};
  std::string table(8 * blocks, '\0');
  uint64_t checksum = 0;
  run(nbytes, [&] {
    for (uint64_t i = 0; i < blocks; ++i) {
      const uint64_t at = i * kBlock;
      put_number(table.data() + 8 * i, file_->store(offset + at, from + at, std::min(kBlock, nbytes - at)));
    }
    checksum = file_->store(offset + table_offset(nbytes), table.data(), table.size());
  });
  return {offset, nbytes, checksum, born};
}

void Shelf::put(const std::string& name, uint32_t kind, std::string meta, const void* data, uint64_t nbytes) {
  const auto found = changes_.find(name);
  const uint64_t needed = stored_nbytes(nbytes);
  const bool again = found != changes_.end() && found->second.has_value();
  if (again && stored_nbytes(found->second->data.nbytes) == needed) {
    // Stored before in this transaction: no root knows of it yet.
    const uint64_t offset = found->second->data.offset;
    found->second->data = store_data(offset, data, nbytes);
    found->second->kind = kind;
    found->second->meta = std::move(meta);
    return;
  }
  const uint64_t offset = needed != 0 ? allocate(needed) : 0;
  Extent extent;
  try {
    extent = store_data(offset, data, nbytes);
  } catch (...) {
    release(offset, needed);
    throw;
  }
  if (again) give_back(found->second->data);
  changes_.insert_or_assign(name, ShelfEntry{kind, std::move(meta), extent});
}

void Shelf::remove(const std::string& name) {
  const auto found = changes_.find(name);
  if (found != changes_.end() && found->second) give_back(found->second->data);
  if (find(name) != nullptr) {
    changes_.insert_or_assign(name, std::nullopt);
  } else {
    changes_.erase(name);
  }
}

std::optional<const ShelfEntry*> Shelf::changed(std::string_view name) const {
  const auto found = changes_.find(name);
  if (found == changes_.end()) return std::nullopt;
  return found->second ? &*found->second : nullptr;
}

void Shelf::copy_changed(std::string_view name, void* to) {
  const auto found = changed(name);
  if (!found || *found == nullptr) return;
  const Extent& extent = (*found)->data;
  if (extent.nbytes != 0) {
    std::memcpy(to, file_->mapped(extent.offset + extent.nbytes)->at(extent.offset), extent.nbytes);
  }
}

namespace {

void append_entry(std::string& node, const std::string& name, const ShelfEntry& entry) {
  const size_t begin = node.size();
  node.resize(begin + (kEntryNbytes + name.size() + entry.meta.size() + 7) / 8 * 8, '\0');
  char* const at = node.data() + begin;
  put_number(at, static_cast<uint32_t>(name.size()));
  put_number(at + 4, entry.kind);
  put_number(at + 8, static_cast<uint32_t>(entry.meta.size()));
  put_number(at + 16, entry.data.offset);
  put_number(at + 24, entry.data.nbytes);
  put_number(at + 32, entry.data.checksum);
  put_number(at + 40, entry.data.born);
  std::memcpy(at + kEntryNbytes, name.data(), name.size());
  std::memcpy(at + kEntryNbytes + name.size(), entry.meta.data(), entry.meta.size());
}

}  // namespace

void Shelf::commit() {
  if (changes_.empty()) return rollback();
  uint64_t entry_count = state_.entry_count;
  for (const auto& [name, entry] : changes_) {
    const bool had = find(name) != nullptr, has = entry.has_value();
    entry_count = entry_count + (has && !had) - (had && !has);
  }
  if (entry_count > kMostEntries)
    throw ShelfFull("a shelf has at most " + std::to_string(kMostEntries) + " names");
  size_t count = state_.buckets.size();
  while (count < kMostBuckets && entry_count > count * kEntriesPerBucket) count *= 2;
  const bool all = count != state_.buckets.size();

  // The new nodes: old entries and changes merged, nothing copied that stays.
  std::vector<std::string> nodes(count);
  std::vector<bool> touched(count, all);
  for (const auto& [name, entry] : changes_) touched[bucket_of(name, count)] = true;
  for (size_t i = 0; i < state_.buckets.size(); ++i) {
    if (!all && !touched[i]) continue;
    for (const auto& [name, entry] : state_.buckets[i].entries) {
      if (!changes_.contains(name)) append_entry(nodes[all ? bucket_of(name, count) : i], name, entry);
    }
  }
  for (const auto& [name, entry] : changes_) {
    if (entry) append_entry(nodes[bucket_of(name, count)], name, *entry);
  }
  State next;
  next.generation = state_.generation + 1;
  next.limit = state_.limit;
  next.entry_count = entry_count;
  next.buckets.resize(count);
  for (size_t i = 0; i < count; ++i) {
    if (!touched[i]) {
      next.buckets[i].node = state_.buckets[i].node;
    } else if (!nodes[i].empty()) {
      const uint64_t needed = stored_nbytes(nodes[i].size());
      const uint64_t offset = allocate(needed);
      new_nodes_.push_back({offset, nodes[i].size(), 0, next.generation});
      next.buckets[i].node = store_data(offset, nodes[i].data(), nodes[i].size());
    }
  }
  next.end = end_;
  // Page cache: one sync for small transactions. Elsewhere ordering costs next to nothing.
  const bool ordered = file_->medium() != Medium::page_cache || stored_ > kSmall;
  const std::string root = encode(next, id_, ordered);
  try {
    if (ordered) order();
    file_->store(kPage * (1 + next.generation % 2), root.data(), root.size());
    order();
  } catch (const sys::Error& error) {
    failure_ = std::string(sys::name(error.call)) + ": " + std::strerror(error.code);
    throw;
  }

  // Committed. From here on nothing can fail but for want of memory.
  const auto free_later = [&](const Extent& extent) {
    if (extent.nbytes == 0) return;
    freed_.push_back({extent, next.generation});
    used_ -= stored_nbytes(extent.nbytes);
  };
  for (size_t i = 0; i < state_.buckets.size(); ++i) {
    if (all || touched[i]) free_later(state_.buckets[i].node);
  }
  for (const Extent& node : new_nodes_) used_ += stored_nbytes(node.nbytes);
  for (size_t i = 0; i < state_.buckets.size(); ++i) {
    if (!all) {
      next.buckets[i].entries.swap(state_.buckets[i].entries);
      continue;
    }
    auto& entries = state_.buckets[i].entries;
    while (!entries.empty()) {
      auto moved = entries.extract(entries.begin());
      next.buckets[bucket_of(moved.key(), count)].entries.insert(std::move(moved));
    }
  }
  for (auto& [name, entry] : changes_) {
    auto& entries = next.buckets[bucket_of(name, count)].entries;
    const auto old = entries.find(name);
    if (old != entries.end()) free_later(old->second.data);
    if (entry) {
      used_ += stored_nbytes(entry->data.nbytes);
      if (old != entries.end()) {
        old->second = std::move(*entry);
      } else {
        entries.emplace(name, std::move(*entry));
      }
    } else if (old != entries.end()) {
      entries.erase(old);
    }
  }
  state_ = std::move(next);
  changes_.clear();
  new_nodes_.clear();
  stored_ = 0;
  begun_ = false;
}

void Shelf::rollback() {
  for (const auto& [name, entry] : changes_) {
    if (entry) give_back(entry->data);
  }
  for (const Extent& node : new_nodes_) give_back(node);
  changes_.clear();
  new_nodes_.clear();
  stored_ = 0;
  begun_ = false;
}

}  // namespace holdfast
