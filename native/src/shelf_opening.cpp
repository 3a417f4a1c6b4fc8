// From a file to a shelf's state: the header, two roots, the directory, and what a crash may have left of them.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "shelf.hpp"
#include "shelf_format.hpp"

namespace everystep {

using namespace shelf_format;

// --- bytes ---------------------------------------------------------------------------------------------------

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
  state.limit = std::min(limit, kMostNbytes);
  state.buckets.resize(1);
  const std::string root = encode(state, id, true);
  std::memcpy(at + 2 * kPage, root.data(), root.size());  // slot 1: that of odd generations
  return file;
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
    throw ShelfNewer("its format is version " + std::to_string(version) + ", and this Everystep reads version 1");
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
      const bool passed_over = newest != root.generation || (!why.empty() && (writable_ || !file_->has_writer()));
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

}  // namespace everystep
