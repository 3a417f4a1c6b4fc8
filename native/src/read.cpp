// Reading pieces of one file: the mirror of write.cpp.
//
// Neighbouring pieces are joined into windows; each window is one vectored transfer straight into the caller's
// memory where that is fresh or in huge pages and alignment allows, else through staging (why: write.cpp). Windows
// finish in order. A second thread copies and verifies them, in one pass: fresh memory costs the submitting thread
// page faults, which would otherwise add to the cost of checksums.
#include "read.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "align.hpp"
#include "copy.hpp"
#include "hash.hpp"
#include "memory.hpp"

namespace everystep {
namespace {

// Two pieces closer than this are read together: the device moves the gap faster than it starts a new transfer.
constexpr uint64_t kMaxGap = 64U << 10;

// From here on staging is worth huge pages; in windows so small that all of them fit into what the process keeps.
constexpr uint64_t kMuchStaged = 16U << 20;
constexpr uint64_t kStagedWindow = 4U << 20;

// Inside-a-piece parts shorter than this are copied: each separate segment costs the kernel a little.
constexpr uint64_t kMinDirect = 32U << 10;

// The part of [low, high) of `piece` that can move between the device and the caller's memory without a copy.
Span direct_span(const Piece& piece, uint64_t low, uint64_t high, uint64_t alignment) {
  if (piece.place != Place::memory || (piece.address - piece.offset) % alignment != 0) return {high, high};
  const Span span{align_up(low, alignment), align_down(high, alignment)};
  if (span.high < span.low + kMinDirect) return {high, high};
  return span;
}

struct Slot {
  Transfer transfer;
  struct Copy {
    size_t piece;
    uint64_t inside;
    uint64_t nbytes;
    const char* staged;
  };
  std::vector<Copy> copies;
  uint64_t nbytes = 0;
  uint64_t high = 0;
};

class Reader {
 public:
  // `direct`: per piece, whether the device may write into the caller's memory.
  Reader(const Plan& plan, const std::vector<uint64_t>& expected, const std::vector<bool>& direct,
         const Tuning& tuning, Read& out)
      : plan_(plan), expected_(expected), direct_(direct), tuning_(tuning), out_(out) {
    uint64_t count = 0;
    for (const Piece& piece : plan.pieces) {
      first_hash_.push_back(count);
      count += checksum_count(piece, tuning.chunk);
    }
  }

  // Describes the next window, at most so long, in `slot`; false when everything has been asked for.
  bool next(Slot& slot, char* staging, uint64_t window) {
    const auto& pieces = plan_.pieces;
    const uint64_t alignment = tuning_.effective_alignment();
    while (current_ < pieces.size() && std::max(pieces[current_].offset, at_) >= pieces[current_].end())
      ++current_;
    if (current_ == pieces.size()) return false;
    const uint64_t low = align_down(std::max(pieces[current_].offset, at_), alignment);
    const uint64_t limit = low + window;
    uint64_t high = low;
    size_t last = current_;
    for (; last < pieces.size() && pieces[last].offset < limit; ++last) {
      if (last > current_ && pieces[last].offset > high + kMaxGap) break;
      high = std::max(high, std::min(pieces[last].end(), limit));
    }
    high = std::min(align_up(high, alignment), limit);

    slot.copies.clear();
    slot.transfer.iov.clear();
    slot.transfer.is_write = false;
    slot.transfer.offset = low;
    char* run = staging;
    uint64_t run_from = low;
    const auto close_run = [&](uint64_t to) {
      if (to == run_from) return;
      slot.transfer.iov.push_back({run, to - run_from});
      out_.stats.staged_nbytes += to - run_from;
      run += to - run_from;
    };
    const auto stage = [&](size_t number, uint64_t from, uint64_t to) {
      if (from < to) {
        slot.copies.push_back({number, from - pieces[number].offset, to - from, run + (from - run_from)});
      }
    };
    for (size_t i = current_; i < last; ++i) {
      const uint64_t from = std::max({pieces[i].offset, low, at_});
      const uint64_t to = std::min(pieces[i].end(), high);
      if (from >= to) continue;
      const Span span = direct_[i] ? direct_span(pieces[i], from, to, alignment) : Span{to, to};
      if (span.low < span.high) {
        stage(i, from, span.low);
        close_run(span.low);
        const uintptr_t address = pieces[i].address + (span.low - pieces[i].offset);
        slot.transfer.iov.push_back({reinterpret_cast<void*>(address), span.high - span.low});
        out_.stats.direct_nbytes += span.high - span.low;
        run_from = span.high;
        stage(i, span.high, to);
      } else {
        stage(i, from, to);
      }
    }
    close_run(high);
    at_ = high;
    slot.high = high;
    slot.nbytes = high - low;
    return true;
  }

  // Hands out what was staged and verifies what is now complete. Windows arrive here in order.
  void deliver(const Slot& slot) {
    whole_.clear();
    next_whole_ = 0;
    for (const Slot::Copy& copy : slot.copies) {
      const Piece& piece = plan_.pieces[copy.piece];
      switch (piece.place) {
        case Place::memory:
          hand_out(copy);
          break;
        case Place::strided:
          stream(copy);
          plan_.strided[piece.index].scatter(copy.inside, copy.nbytes, copy.staged);
          break;
        case Place::callback:
          stream(copy);
          plan_.callbacks[piece.index](const_cast<char*>(copy.staged), copy.nbytes, copy.inside);
          break;
        case Place::discard:
          stream(copy);
          break;
        case Place::zero:
          if (std::any_of(copy.staged, copy.staged + copy.nbytes, [](char byte) { return byte != 0; })) {
            report(copy.piece, copy.inside / tuning_.chunk);
          }
          break;
      }
    }
    if (!expected_.empty()) verify_up_to(slot.high);
  }

 private:
  // Chunks that lie whole in this window are copied when they are verified.
  void hand_out(const Slot::Copy& copy) {
    const Piece& piece = plan_.pieces[copy.piece];
    char* to = reinterpret_cast<char*>(piece.address) + copy.inside;
    const uint64_t end = copy.inside + copy.nbytes;
    const Span whole = whole_chunks(piece, copy.inside, end, tuning_.chunk);
    if (expected_.empty() || whole.low >= whole.high) return copy_past_caches(to, copy.staged, copy.nbytes);
    copy_past_caches(to, copy.staged, whole.low - copy.inside);
    for (uint64_t at = whole.low; at < whole.high; at += tuning_.chunk) {
      whole_.push_back({copy.piece, at / tuning_.chunk, copy.staged + (at - copy.inside)});
    }
    const uint64_t done = whole.high - copy.inside;
    copy_past_caches(to + done, copy.staged + done, end - whole.high);
  }

  void report(size_t piece, uint64_t chunk) {
    if (out_.damage.size() < kMaxDamage) out_.damage.push_back({piece, chunk});
  }

  void compare(size_t piece, uint64_t chunk, uint64_t hash) {
    if (hash != expected_[first_hash_[piece] + chunk]) report(piece, chunk);
  }

  void verify_up_to(uint64_t high) {
    due_.clear();
    due_at_.clear();
    collect(high);
    xxh3_each(due_);
    for (size_t i = 0; i < due_.size(); ++i) compare(due_at_[i].piece, due_at_[i].chunk, due_[i].value);
  }

  void collect(uint64_t high) {
    const auto& pieces = plan_.pieces;
    for (; hash_piece_ < pieces.size(); ++hash_piece_, hash_chunk_ = 0) {
      const Piece& piece = pieces[hash_piece_];
      if (piece.place != Place::memory) {
        if (piece.end() > high) return;
        continue;
      }
      const uint64_t count = chunk_count(piece.nbytes, tuning_.chunk);
      for (; hash_chunk_ < count; ++hash_chunk_) {
        const uint64_t from = hash_chunk_ * tuning_.chunk;
        const uint64_t to = std::min(from + tuning_.chunk, piece.nbytes);
        if (piece.offset + to > high) return;
        char* there = reinterpret_cast<char*>(piece.address) + from;
        if (next_whole_ < whole_.size() && whole_[next_whole_].piece == hash_piece_ &&
            whole_[next_whole_].chunk == hash_chunk_) {
          due_.push_back({whole_[next_whole_++].staged, to - from, there});
        } else {
          due_.push_back({there, to - from});
        }
        due_at_.push_back({hash_piece_, hash_chunk_});
      }
    }
  }

  void stream(const Slot::Copy& copy) {
    if (expected_.empty()) return;
    const Piece& piece = plan_.pieces[copy.piece];
    const char* data = copy.staged;
    uint64_t inside = copy.inside;
    for (const uint64_t end = inside + copy.nbytes; inside < end;) {
      const uint64_t chunk = inside / tuning_.chunk;
      const uint64_t stop = std::min((chunk + 1) * tuning_.chunk, piece.nbytes);
      const uint64_t count = std::min(stop, end) - inside;
      stream_.update(data, count);
      data += count;
      inside += count;
      if (inside == stop) compare(copy.piece, chunk, stream_.take());
    }
  }

  const Plan& plan_;
  const std::vector<uint64_t>& expected_;
  const std::vector<bool>& direct_;
  const Tuning& tuning_;
  Read& out_;
  std::vector<uint64_t> first_hash_;
  StreamHash stream_;
  struct Whole {
    size_t piece;
    uint64_t chunk;
    const char* staged;
  };
  std::vector<Whole> whole_;  // chunks that lie whole in the window being delivered, in order
  size_t next_whole_ = 0;
  size_t current_ = 0;
  uint64_t at_ = 0;
  size_t hash_piece_ = 0;
  uint64_t hash_chunk_ = 0;
  std::vector<Hashing> due_;
  std::vector<Damage> due_at_;  // whose checksum each is to be compared with
};

// Delivers windows in the order they are handed over, on a thread of its own or at once.
class Deliveries {
 public:
  Deliveries(Reader& reader, Control& control, bool own_thread) : reader_(reader), control_(control) {
    if (own_thread) thread_ = std::thread([this] { work(); });
  }
  ~Deliveries() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  Deliveries(const Deliveries&) = delete;
  Deliveries& operator=(const Deliveries&) = delete;

  void hand_over(const Slot& slot) {
    if (!thread_.joinable()) return deliver(slot);
    {
      std::lock_guard lock(mutex_);
      waiting_.push_back(&slot);
    }
    changed_.notify_all();
  }

  // Returns when at most `count` windows are waiting or being delivered: how many are. Throws what a delivery
  // threw.
  size_t wait_until(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return error_ || waiting_.size() <= count; });
    if (error_) std::rethrow_exception(error_);
    return waiting_.size();
  }

 private:
  void deliver(const Slot& slot) {
    reader_.deliver(slot);
    control_.advance(slot.nbytes);
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
      if (waiting_.empty() || error_) return;
      const Slot& slot = *waiting_.front();
      lock.unlock();
      std::exception_ptr error;
      try {
        deliver(slot);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      waiting_.pop_front();  // only now: the slot is in use until here
      error_ = error;
      changed_.notify_all();
    }
  }

  Reader& reader_;
  Control& control_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<const Slot*> waiting_;
  bool closing_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

// A file may refuse direct I/O though its directory's file system allows it: in an overlay (a container's image)
// the file lies on another one. It is then read through the page cache, and `tuning` says so.
sys::File open_for(const std::string& path, Tuning& tuning) {
  if (tuning.backend->direct) {
    try {
      return sys::open_regular(path, O_DIRECT);
    } catch (const sys::Error& error) {
      if (error.code != EINVAL) throw;
      tuning.backend = &kBuffered;
    }
  }
  return sys::open_regular(path);
}

// Per piece, whether the device shall write into the caller's memory: not where that lies in small pages.
std::vector<bool> directness(const Plan& plan, const Tuning& tuning) {
  std::vector<bool> direct(plan.pieces.size(), true);
  // A buffered read makes a copy of its own.
  if (!tuning.backend->direct || !PageSizes::can_be_huge()) return direct;
  const PageSizes pages;
  for (size_t i = 0; i < plan.pieces.size(); ++i) {
    const Piece& piece = plan.pieces[i];
    direct[i] = piece.place == Place::memory && pages.of(piece.address, piece.nbytes) != PageSizes::Kind::small;
  }
  return direct;
}

uint64_t staged_nbytes(const Plan& plan, const std::vector<bool>& direct) {
  uint64_t nbytes = 0;
  for (size_t i = 0; i < plan.pieces.size(); ++i) nbytes += direct[i] ? 0 : plan.pieces[i].nbytes;
  return nbytes;
}

// The caller's memory that the device will write into.
std::vector<Populator::Range> direct_ranges(const Plan& plan, const std::vector<bool>& direct,
                                            const Tuning& tuning) {
  std::vector<Populator::Range> ranges;
  for (size_t i = 0; i < plan.pieces.size(); ++i) {
    if (!direct[i]) continue;
    const Piece& piece = plan.pieces[i];
    const Span span = direct_span(piece, piece.offset, piece.end(), tuning.effective_alignment());
    if (span.low >= span.high) continue;
    ranges.push_back(
        {span.low, reinterpret_cast<char*>(piece.address + (span.low - piece.offset)), span.high - span.low});
  }
  return ranges;
}

// Few bytes need fewer and smaller windows, so that all of them are under way at once.
void fit(Tuning& tuning, uint64_t wanted) {
  if (wanted >= tuning.window * tuning.depth) return;
  if (!tuning.backend->direct && wanted <= tuning.window) {
    tuning.window = std::max<uint64_t>(64U << 10, align_up(wanted, 64U << 10));
    tuning.depth = 1;
    return;
  }
  tuning.window =
      std::min(tuning.window, std::max<uint64_t>(64U << 10, align_up(wanted / tuning.depth, 64U << 10)));
  tuning.depth = static_cast<unsigned>(std::min<uint64_t>(tuning.depth, wanted / tuning.window + 1));
}

// Thrown if the file refuses the first direct read, before any bytes were delivered.
struct DirectRefused : std::exception {};

Read read_windows(const sys::File& file, const Plan& plan, const std::vector<uint64_t>& expected, Tuning used,
                  uint64_t wanted, Control& control) {
  Read out;
  fit(used, wanted);
  const bool large = wanted > (8U << 20);
  // Beyond those under way, some for windows that have arrived and wait for their verification.
  const size_t waiting = large ? used.depth / 2 + 1 : 0;

  const std::vector<bool> direct = directness(plan, used);
  const uint64_t staged = staged_nbytes(plan, direct);
  const auto pages = staged > kMuchStaged ? Staging::Pages::huge : Staging::Pages::normal;
  if (pages == Staging::Pages::huge) used.window = std::min(used.window, kStagedWindow);
  Reader reader(plan, expected, direct, used, out);
  std::vector<Slot> slots(used.depth + waiting);
  Windows staging(slots.size(), used.window, pages);
  Deliveries deliveries(reader, control, large);
  const auto queue = make_queue(*used.backend, used.depth);  // after the memory: drained before that goes
  if (staged > slots.size() * used.window) staging.touch_ahead();
  // Last: while it touches pages, whatever maps memory (a ring, a thread's stack) waits for milliseconds.
  Populator populator(large ? direct_ranges(plan, direct, used) : std::vector<Populator::Range>{},
                      2 * used.window);
  size_t asked = 0, arrived = 0, delivered = 0;
  const auto arrive = [&] {
    Slot& slot = slots[arrived % slots.size()];
    try {
      finish(*queue, slot.transfer, used.effective_alignment());
    } catch (const sys::Error& error) {
      if (error.code == EINVAL && arrived == 0 && used.backend->direct) throw DirectRefused{};
      throw;
    }
    deliveries.hand_over(slot);
    ++arrived;
  };
  const auto deliver_all_but = [&](size_t count) {
    for (const size_t left = deliveries.wait_until(count); delivered < arrived - left; ++delivered) {
      staging.give_back();
    }
  };
  for (;; ++asked) {
    if (control.cancelled) throw Cancelled{};
    if (asked - arrived == used.depth) arrive();
    deliver_all_but(slots.size() - (asked - arrived) - 1);
    const size_t window = staging.window();
    char* memory = nullptr;
    while ((memory = staging.next(window)) == nullptr) {
      if (delivered == arrived) arrive();
      deliver_all_but(arrived - delivered - 1);
    }
    Slot& slot = slots[asked % slots.size()];
    if (!reader.next(slot, memory, window)) break;
    slot.transfer.file = &file;
    populator.reader_is_at(slot.transfer.offset);
    queue->submit(slot.transfer);
    ++out.stats.transfers;
  }
  while (arrived < asked) arrive();
  deliveries.wait_until(0);
  return out;
}

}  // namespace

Read read_file(const std::string& path, const Plan& plan, const std::vector<uint64_t>& expected,
               const Tuning& tuning, Control& control) {
  Tuning used = tuning;
  uint64_t wanted = 0;
  for (const Piece& piece : plan.pieces) wanted += piece.nbytes;
  if (wanted <= tuning.small) used.backend = &kBuffered;
  sys::File file = open_for(path, used);
  const uint64_t file_nbytes = sys::size(file);
  if (file_nbytes % used.effective_alignment() != 0) {
    // Direct reads cannot end inside a block. Our own shards never do; files of other systems may.
    used.backend = &kBuffered;
    file = open_for(path, used);
  }
  if (!plan.pieces.empty() && plan.pieces.back().end() > file_nbytes) {
    throw sys::Error{ENODATA, sys::Call::read, path};
  }
  try {
    return read_windows(file, plan, expected, used, wanted, control);
  } catch (const DirectRefused&) {
    // Some file systems take O_DIRECT when a file is opened, and refuse to read so.
    used.backend = &kBuffered;
    file = open_for(path, used);
  }
  return read_windows(file, plan, expected, used, wanted, control);
}

}  // namespace everystep
