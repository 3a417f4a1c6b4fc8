// Writing one file at the speed of the device.
//
// The file is cut into windows, each one vectored transfer. Its segments point straight into the caller's memory
// where that lies in huge pages and address and offset allow it. Memory in small pages passes through staging,
// which is in huge ones: a device takes scattered pages at half its speed, and to hand them over costs the kernel
// as much as the copy, which is made while the checksums are computed. So do ragged heads and tails, small pieces,
// strided and device data, and padding. `depth` windows are under way at once and finish in order; the last of
// them is made ready before room is waited for. Some devices tell of completions only when they have nothing left
// to do: then the next window is there at once.
#include <fcntl.h>

#include <algorithm>

#include "hash.hpp"
#include "sync.hpp"
#include "transfer.hpp"

namespace holdfast {
namespace {

// The device has nothing to do until the first window is ready, so that is a small one. Each is twice the one
// before, up to what tuning says: copying is more than twice as fast as a device.
constexpr uint64_t kFirstWindow = 512U << 10;

class Writer {
 public:
  Writer(const Plan& plan, const Tuning& tuning, Written& out) : plan_(plan), tuning_(tuning), out_(out) {
    uint64_t count = 0;
    first_hash_.reserve(plan.pieces.size());
    for (const Piece& piece : plan.pieces) {
      first_hash_.push_back(count);
      count += chunk_count(piece.nbytes, tuning.chunk);
    }
    out.hashes.resize(count);
    // A buffered write makes a copy of its own.
    const bool all = tuning.backend == Backend::buffered || !PageSizes::can_be_huge();
    direct_.resize(plan.pieces.size(), all);
    if (all) return;
    const PageSizes pages;
    for (size_t i = 0; i < plan.pieces.size(); ++i) {
      const Piece& piece = plan.pieces[i];
      direct_[i] = piece.place == Place::memory && pages.of(piece.address, piece.nbytes) == PageSizes::Kind::huge;
    }
  }

  // Points `iov` at the bytes of [low, high): caller's memory where possible, else `staging`, which is filled.
  void assemble(uint64_t low, uint64_t high, char* staging, std::vector<iovec>& iov) {
    staging_ = staging;
    run_start_ = staging;
    iov_ = &iov;
    iov.clear();
    copies_.clear();
    next_copy_ = 0;
    uint64_t at = low;
    const auto& pieces = plan_.pieces;
    while (current_ < pieces.size() && pieces[current_].end() <= low) ++current_;
    for (size_t i = current_; i < pieces.size() && pieces[i].offset < high; ++i) {
      const Piece& piece = pieces[i];
      const uint64_t from = std::max(piece.offset, low);
      const uint64_t to = std::min(piece.end(), high);
      if (from >= to) continue;
      stage_zeros(from - at);
      const Span span = direct_[i] ? direct_span(piece, from, to, tuning_.effective_alignment()) : Span{to, to};
      if (span.low < span.high) {
        stage(i, from, span.low);
        close_run();
        iov.push_back({reinterpret_cast<void*>(piece.address + (span.low - piece.offset)), span.high - span.low});
        out_.stats.direct_nbytes += span.high - span.low;
        stage(i, span.high, to);
      } else {
        stage(i, from, to);
      }
      at = to;
    }
    stage_zeros(high - at);
    close_run();
  }

  // What does not go to the device from where it lies, ragged ends aside.
  [[nodiscard]] uint64_t staged_nbytes() const {
    uint64_t nbytes = 0;
    for (size_t i = 0; i < direct_.size(); ++i) nbytes += direct_[i] ? 0 : plan_.pieces[i].nbytes;
    return nbytes;
  }

  // Whether the last window needs its checksums computed before it is complete.
  [[nodiscard]] bool copies_wait() const { return !copies_.empty(); }

  // Checksums of the chunks of in-memory pieces that end at or before `high`, and the copies that wait for them.
  void hash_up_to(uint64_t high) {
    due_.clear();
    due_at_.clear();
    collect(high);
    xxh3_each(due_);
    for (size_t i = 0; i < due_.size(); ++i) out_.hashes[due_at_[i]] = due_[i].value;
  }

 private:
  void collect(uint64_t high) {
    const auto& pieces = plan_.pieces;
    for (; hash_piece_ < pieces.size(); ++hash_piece_, hash_chunk_ = 0) {
      const Piece& piece = pieces[hash_piece_];
      if (piece.place != Place::memory) {
        if (piece.end() > high) return;
        continue;  // hashed while it was staged
      }
      const uint64_t count = chunk_count(piece.nbytes, tuning_.chunk);
      for (; hash_chunk_ < count; ++hash_chunk_) {
        const uint64_t from = hash_chunk_ * tuning_.chunk;
        const uint64_t to = std::min(from + tuning_.chunk, piece.nbytes);
        if (piece.offset + to > high) return;
        const uint64_t number = first_hash_[hash_piece_] + hash_chunk_;
        char* copy = nullptr;
        if (next_copy_ < copies_.size() && copies_[next_copy_].hash == number) copy = copies_[next_copy_++].to;
        due_.push_back({reinterpret_cast<const char*>(piece.address) + from, to - from, copy});
        due_at_.push_back(number);
      }
    }
  }

  void close_run() {
    if (staging_ != run_start_) iov_->push_back({run_start_, static_cast<size_t>(staging_ - run_start_)});
    out_.stats.staged_nbytes += static_cast<uint64_t>(staging_ - run_start_);
    run_start_ = staging_;
  }

  void stage_zeros(uint64_t nbytes) {
    std::memset(staging_, 0, nbytes);
    staging_ += nbytes;
  }

  void stage(size_t number, uint64_t from, uint64_t to) {
    if (from >= to) return;
    const Piece& piece = plan_.pieces[number];
    const uint64_t inside = from - piece.offset;
    const uint64_t nbytes = to - from;
    switch (piece.place) {
      case Place::memory:
        stage_memory(number, inside, nbytes);
        break;
      case Place::strided:
        plan_.strided[piece.index].gather(inside, nbytes, staging_);
        stream(number, inside, nbytes);
        break;
      case Place::callback:
        plan_.callbacks[piece.index](staging_, nbytes, inside);
        stream(number, inside, nbytes);
        break;
      case Place::discard:
      case Place::zero:
        std::memset(staging_, 0, nbytes);
        break;
    }
    staging_ += nbytes;
  }

  // Chunks that lie whole in this window are copied when they are hashed, in one pass over the memory.
  void stage_memory(size_t number, uint64_t inside, uint64_t nbytes) {
    const Piece& piece = plan_.pieces[number];
    const char* data = reinterpret_cast<const char*>(piece.address) + inside;
    const uint64_t end = inside + nbytes;
    const Span whole = whole_chunks(piece, inside, end, tuning_.chunk);
    if (whole.low >= whole.high) return copy_past_caches(staging_, data, nbytes);
    copy_past_caches(staging_, data, whole.low - inside);
    for (uint64_t at = whole.low; at < whole.high; at += tuning_.chunk) {
      copies_.push_back({first_hash_[number] + at / tuning_.chunk, staging_ + (at - inside)});
    }
    const uint64_t done = whole.high - inside;
    copy_past_caches(staging_ + done, data + done, end - whole.high);
  }

  void stream(size_t number, uint64_t inside, uint64_t nbytes) {
    const Piece& piece = plan_.pieces[number];
    const char* data = staging_;
    for (uint64_t end = inside + nbytes; inside < end;) {
      const uint64_t chunk = inside / tuning_.chunk;
      const uint64_t stop = std::min((chunk + 1) * tuning_.chunk, piece.nbytes);
      const uint64_t count = std::min(stop, end) - inside;
      stream_.update(data, count);
      data += count;
      inside += count;
      if (inside == stop) out_.hashes[first_hash_[number] + chunk] = stream_.take();
    }
  }

  const Plan& plan_;
  const Tuning& tuning_;
  Written& out_;
  std::vector<uint64_t> first_hash_;
  std::vector<bool> direct_;  // per piece: in memory that the device takes as fast as any
  struct Copy {
    uint64_t hash;  // in `hashes`
    char* to;
  };
  std::vector<Copy> copies_;  // in order
  size_t next_copy_ = 0;
  StreamHash stream_;
  size_t current_ = 0;
  size_t hash_piece_ = 0;
  uint64_t hash_chunk_ = 0;
  std::vector<Hashing> due_;
  std::vector<uint64_t> due_at_;  // where in `hashes` each belongs
  char* staging_ = nullptr;
  char* run_start_ = nullptr;
  std::vector<iovec>* iov_ = nullptr;
};

void set_size(const sys::File& file, uint64_t nbytes, bool preallocate) {
  const uint64_t now = sys::size(file);
  if (now > nbytes) sys::truncate(file, nbytes);
  if (now < nbytes && preallocate) sys::fallocate(file, nbytes);
}

// One copy, one write: for small files the latency of each extra call is what counts.
void write_small(uint64_t nbytes, Writer& writer, Written& out) {
  Staging staging(std::max<uint64_t>(nbytes, 1));
  Transfer transfer;
  transfer.file = &out.file;
  writer.assemble(0, nbytes, staging.data(), transfer.iov);
  writer.hash_up_to(nbytes);
  while (!transfer.iov.empty()) {
    const ssize_t done =
        sys::pwritev(out.file, transfer.iov.data(), static_cast<int>(transfer.iov.size()), transfer.offset);
    if (done < 0) throw sys::Error{static_cast<int>(-done), sys::Call::write, out.file.path()};
    if (done == 0) throw sys::Error{EIO, sys::Call::write, out.file.path()};
    transfer.advance(static_cast<uint64_t>(done));
  }
  start_writeback(out.file);
  out.stats.transfers = 1;
}

void write_windows(uint64_t nbytes, const Tuning& tuning, Writer& writer, Written& out, Control& control) {
  const uint64_t alignment = tuning.effective_alignment();
  struct Slot {
    Transfer transfer;
    uint64_t nbytes;
  };
  Windows staging(tuning.depth, tuning.window);
  std::vector<Slot> slots(tuning.depth);
  // Declared last, so destroyed first: it drains what is under way before the memory goes.
  const auto queue = make_queue(tuning.backend, tuning.depth);
  if (writer.staged_nbytes() > tuning.depth * tuning.window) staging.touch_ahead();

  size_t asked = 0, finished = 0;
  const auto retire = [&] {
    Slot& slot = slots[finished++ % slots.size()];
    const uint64_t low = slot.transfer.offset;
    finish(*queue, slot.transfer, alignment);
    // Let the device start now instead of at the sync.
    if (tuning.backend == Backend::buffered) start_writeback(out.file, low, slot.nbytes);
    control.advance(slot.nbytes);
    staging.give_back();
  };

  uint64_t window = kFirstWindow / 2;
  for (uint64_t low = 0, high = 0; low < nbytes; low = high) {
    if (control.cancelled) throw Cancelled{};
    if (asked - finished == slots.size()) retire();
    window = std::min<uint64_t>(2 * window, staging.window());
    high = std::min(low + window, nbytes);
    char* memory = nullptr;
    while ((memory = staging.next(window)) == nullptr) retire();
    Slot& slot = slots[asked % slots.size()];
    slot.transfer.file = &out.file;
    slot.transfer.offset = low;
    slot.nbytes = high - low;
    writer.assemble(low, high, memory, slot.transfer.iov);
    const bool copies = writer.copies_wait();
    if (copies) writer.hash_up_to(high);
    ++asked;
    if (asked - finished == slots.size() && slots.size() > 1) retire();
    queue->submit(slot.transfer);
    ++out.stats.transfers;
    if (!copies) writer.hash_up_to(high);  // while the device works
  }
  while (finished < asked) retire();
}

}  // namespace

Written write_file(const std::string& path, uint64_t nbytes, bool recycle, const Plan& plan, const Tuning& tuning,
                   Control& control) {
  Written out;
  const bool small = nbytes <= tuning.small;
  const bool direct = !small && tuning.backend != Backend::buffered;
  Tuning used = tuning;
  if (small) used.backend = Backend::buffered;
  out.file = sys::open(path, O_WRONLY | O_CREAT | (recycle ? O_NOFOLLOW : O_EXCL) | (direct ? O_DIRECT : 0));
  set_size(out.file, nbytes, !small);
  Writer writer(plan, used, out);
  if (small) {
    write_small(nbytes, writer, out);
    control.advance(nbytes);
  } else {
    write_windows(nbytes, used, writer, out, control);
  }
  return out;
}

}  // namespace holdfast
