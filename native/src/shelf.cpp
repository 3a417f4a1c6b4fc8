#include "shelf.hpp"

#include <algorithm>
#include <cstring>

#include "shelf_format.hpp"

namespace everystep {

using namespace shelf_format;

// --- pins ----------------------------------------------------------------------------------------------------

GenerationLock::GenerationLock(std::shared_ptr<ShelfFile> file, uint64_t generation)
    : file_(std::move(file)), generation_(generation) {
  file_->lock_generation(generation_);
}

GenerationLock::~GenerationLock() { file_->unlock_generation(generation_); }

Pin::Pin(std::shared_ptr<const Mapping> mapping, Extent extent, std::shared_ptr<ExtentUses> uses,
         std::shared_ptr<GenerationLock> lock)
    : mapping_(std::move(mapping)), extent_(extent), uses_(std::move(uses)), lock_(std::move(lock)) {
  ++uses_->pins[extent_.offset];
}

Pin::~Pin() {
  const auto found = uses_->pins.find(extent_.offset);
  if (--found->second == 0) uses_->pins.erase(found);
}

std::unique_ptr<Pin> Pin::own() const {
  auto mapping = std::make_shared<const Mapping>(lock_->file().file(), extent_.offset,
                                                 extent_.offset + extent_.nbytes, Mapping::Use::own);
  return std::make_unique<Pin>(std::move(mapping), extent_, uses_, lock_);
}

bool Pin::verified() const {
  const auto found = uses_->verified.find(extent_.offset);
  return found != uses_->verified.end() && found->second == extent_.born;
}

std::string Pin::damage() const {
  const auto bad = bad_block(data(), extent_.nbytes, extent_.checksum, data() + table_offset(extent_.nbytes));
  if (!bad) return {};
  const uint64_t first = *bad * Shelf::kBlock;
  return "the checksum of its bytes " + std::to_string(first) + " to " +
         std::to_string(std::min(first + Shelf::kBlock, extent_.nbytes)) + " does not fit";
}

template <typename Work>
void Shelf::run(uint64_t nbytes, Work work) {
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

// --- space ---------------------------------------------------------------------------------------------------

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

void Shelf::release(uint64_t offset, uint64_t nbytes) noexcept {
  if (nbytes == 0) return;
  std::map<uint64_t, uint64_t>::iterator at;
  try {
    at = free_.emplace(offset, nbytes).first;
  } catch (const std::bad_alloc&) {
    return;
  }
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
    if (used(freed.extent.born, freed.died) || uses_->pins.contains(freed.extent.offset)) return false;
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
    auto space = free_.extract(at);
    if (available > nbytes) {
      space.key() = offset + nbytes;
      space.mapped() = available - nbytes;
      free_.insert(std::move(space));
    }
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

std::optional<Reading> Shelf::read(std::string_view name) {
  const ShelfEntry* const entry = find(name);
  if (entry == nullptr) return std::nullopt;
  const Extent& extent = entry->data;
  Reading found{entry->kind, entry->meta, extent.born, nullptr};
  if (extent.nbytes == 0) return found;
  auto lock = writable_ ? pinned_generation_.lock() : reading_;
  if (writable_ && (!lock || lock->generation() != state_.generation)) {
    lock = std::make_shared<GenerationLock>(file_, state_.generation);
    pinned_generation_ = lock;
  }
  const uint64_t end = extent.offset + stored_nbytes(extent.nbytes);
  auto mapping = file_->mapped(end);
  if (mapping->end() < end) throw ShelfDamaged("the file ends before it");
  found.pin = std::make_unique<Pin>(std::move(mapping), extent, uses_, std::move(lock));
  return found;
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
  // In space of its own, also if this transaction has stored the name before: what fails leaves that as it was.
  Entries made;
  const auto entry = made.emplace(name, ShelfEntry{kind, std::move(meta), {}}).first;
  const uint64_t needed = stored_nbytes(nbytes);
  const uint64_t offset = needed != 0 ? allocate(needed) : 0;
  try {
    entry->second.data = store_data(offset, data, nbytes);
  } catch (...) {
    release(offset, needed);
    throw;
  }
  const auto before = assigned_.find(name);
  if (before != assigned_.end()) {
    give_back(before->second.data);
    before->second = std::move(entry->second);
  } else {
    assigned_.insert(made.extract(entry));
    if (const auto removed = removed_.find(name); removed != removed_.end()) removed_.erase(removed);
  }
}

void Shelf::remove(const std::string& name) {
  if (has(name)) removed_.insert(name);
  const auto assigned = assigned_.find(name);
  if (assigned == assigned_.end()) return;
  give_back(assigned->second.data);
  assigned_.erase(assigned);
}

std::vector<std::string> Shelf::changed_names() const {
  std::vector<std::string> found = names();
  std::erase_if(found,
                [&](const std::string& name) { return removed_.contains(name) || assigned_.contains(name); });
  for (const auto& [name, entry] : assigned_) found.push_back(name);
  return found;
}

std::optional<const ShelfEntry*> Shelf::changed(std::string_view name) const {
  const auto found = assigned_.find(name);
  if (found != assigned_.end()) return &found->second;
  return removed_.contains(name) ? std::optional<const ShelfEntry*>(nullptr) : std::nullopt;
}

const char* Shelf::changed_data(const ShelfEntry& entry) {
  return file_->mapped(entry.data.offset + entry.data.nbytes)->at(entry.data.offset);
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
  if (assigned_.empty() && removed_.empty()) return rollback();
  uint64_t entry_count = state_.entry_count - removed_.size();
  for (const auto& [name, entry] : assigned_) entry_count += has(name) ? 0 : 1;
  if (entry_count > kMostEntries)
    throw ShelfFull("a shelf has at most " + std::to_string(kMostEntries) + " names");
  size_t count = state_.buckets.size();
  while (count < kMostBuckets && entry_count > count * kEntriesPerBucket) count *= 2;
  const bool all = count != state_.buckets.size();

  // The new nodes: old entries and changes merged, nothing copied that stays.
  std::vector<std::string> nodes(count);
  std::vector<bool> touched(count, all);
  for (const std::string& name : removed_) touched[bucket_of(name, count)] = true;
  for (const auto& [name, entry] : assigned_) touched[bucket_of(name, count)] = true;
  for (size_t i = 0; i < state_.buckets.size(); ++i) {
    if (!all && !touched[i]) continue;
    for (const auto& [name, entry] : state_.buckets[i].entries) {
      if (changed(name)) continue;
      append_entry(nodes[all ? bucket_of(name, count) : i], name, entry);
    }
  }
  for (const auto& [name, entry] : assigned_) append_entry(nodes[bucket_of(name, count)], name, entry);
  State next;
  next.generation = state_.generation + 1;
  next.limit = state_.limit;
  next.entry_count = entry_count;
  next.buckets.resize(count);
  new_nodes_.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    if (!touched[i]) {
      next.buckets[i].node = state_.buckets[i].node;
    } else if (!nodes[i].empty()) {
      if (nodes[i].size() > kMostNodeNbytes) {
        throw ShelfFull("the descriptions of its entries have more than " + std::to_string(kMostNodeNbytes) +
                        " bytes in one directory node");
      }
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
  freed_.reserve(freed_.size() + state_.buckets.size() + assigned_.size() + removed_.size());
  try {
    if (ordered) order();
    file_->store(kPage * (1 + next.generation % 2), root.data(), root.size());
    order();
    replace_state(std::move(next), touched);
  } catch (const sys::Error& error) {
    failure_ = "device error";  // short enough to need no memory, should there be none for the next
    failure_ = std::string(sys::name(error.call)) + ": " + std::strerror(error.code);
    throw;
  } catch (...) {
    failure_ = "out of memory";
    throw;
  }
  removed_.clear();
  new_nodes_.clear();
  stored_ = 0;
  begun_ = false;
}

// The new root is on the medium, so none of this may fail: it only moves what there is.
void Shelf::replace_state(State next, const std::vector<bool>& touched) noexcept {
  const size_t count = next.buckets.size();
  const bool all = count != state_.buckets.size();
  const auto free_later = [&](const Extent& extent) {
    if (extent.nbytes == 0) return;
    freed_.push_back({extent, next.generation});  // reserved
    used_ -= stored_nbytes(extent.nbytes);
  };
  for (size_t i = 0; i < state_.buckets.size(); ++i) {
    Bucket& bucket = state_.buckets[i];
    if (all || touched[i]) free_later(bucket.node);
    if (!all) {
      next.buckets[i].entries.swap(bucket.entries);
      continue;
    }
    while (!bucket.entries.empty()) {
      auto moved = bucket.entries.extract(bucket.entries.begin());
      next.buckets[bucket_of(moved.key(), count)].entries.insert(std::move(moved));
    }
  }
  for (const Extent& node : new_nodes_) used_ += stored_nbytes(node.nbytes);
  const auto take_out = [&](const std::string& name) {
    Entries& entries = next.buckets[bucket_of(name, count)].entries;
    if (const auto old = entries.find(name); old != entries.end()) {
      free_later(old->second.data);
      entries.erase(old);
    }
  };
  for (const std::string& name : removed_) take_out(name);
  while (!assigned_.empty()) {
    auto moved = assigned_.extract(assigned_.begin());
    take_out(moved.key());
    used_ += stored_nbytes(moved.mapped().data.nbytes);
    next.buckets[bucket_of(moved.key(), count)].entries.insert(std::move(moved));
  }
  state_ = std::move(next);
}

void Shelf::rollback() noexcept {
  for (const auto& [name, entry] : assigned_) give_back(entry.data);
  for (const Extent& node : new_nodes_) give_back(node);
  assigned_.clear();
  removed_.clear();
  new_nodes_.clear();
  stored_ = 0;
  begun_ = false;
}

}  // namespace everystep
