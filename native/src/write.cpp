// Writing one file at the speed of the device.
//
// The file is cut into windows. The bytes of a window are brought together in staging, and one transfer takes them
// from there to the device. Each byte of the caller's memory is loaded once: what is stored in staging is what is
// hashed. So a file always agrees with its checksums, even if another thread changes the memory meanwhile.
// The copy costs little. It is made in the pass that computes the checksums, and staging lies in huge pages: most
// tensors lie in small ones, which a device takes at half its speed, and which the kernel needs as long to hand
// over as the copy takes. `depth` windows are under way at once and finish in order; the last of them is made
// ready before room is waited for. Some devices tell of completions only when they have nothing left to do: then
// the next window is there at once.
#include "write.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "align.hpp"
#include "hash.hpp"
#include "memory.hpp"

namespace everystep {
namespace {

// The device has nothing to do until the first window is ready, so that is a small one. Each is twice the one
// before, up to what tuning says: copying is more than twice as fast as a device.
constexpr uint64_t kFirstWindow = 512U << 10;
// What goes to the page cache is copied a second time, by the kernel, and should still be in the caches then.
constexpr uint64_t kBufferedWindow = 1U << 20;
// Copied and hashed in steps that stay in the first-level cache.
constexpr uint64_t kStep = 16U << 10;

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
  }

  // Fills `staging` with the bytes [low, high) of the file. Windows are asked for in order.
  void fill(uint64_t low, uint64_t high, char* staging) {
    uint64_t at = low;
    const auto& pieces = plan_.pieces;
    while (current_ < pieces.size() && pieces[current_].end() <= low) ++current_;
    for (size_t i = current_; i < pieces.size() && pieces[i].offset < high; ++i) {
      const uint64_t from = std::max(pieces[i].offset, low);
      const uint64_t to = std::min(pieces[i].end(), high);
      if (from >= to) continue;
      std::memset(staging + (at - low), 0, from - at);
      stage(i, from - pieces[i].offset, to - from, staging + (from - low));
      at = to;
    }
    std::memset(staging + (at - low), 0, high - at);
    out_.stats.staged_nbytes += high - low;
  }

 private:
  // Copies bytes of a piece, from `inside` on, and hashes the copy.
  void stage(size_t number, uint64_t inside, uint64_t nbytes, char* to) {
    const Piece& piece = plan_.pieces[number];
    switch (piece.place) {
      case Place::memory:
        stage_memory(number, inside, nbytes, to);
        break;
      case Place::strided:
        plan_.strided[piece.index].gather(inside, nbytes, to);
        hash_staged(number, inside, nbytes, to);
        break;
      case Place::callback:
        plan_.callbacks[piece.index](to, nbytes, inside);
        hash_staged(number, inside, nbytes, to);
        break;
      case Place::discard:
      case Place::zero:
        std::memset(to, 0, nbytes);
        break;
    }
  }

  // Chunks that lie whole in this window are copied past the caches. This window has only a part of the others.
  void stage_memory(size_t number, uint64_t inside, uint64_t nbytes, char* to) {
    const Piece& piece = plan_.pieces[number];
    const char* data = reinterpret_cast<const char*>(piece.address) + inside;
    const uint64_t end = inside + nbytes;
    const Span whole = whole_chunks(piece, inside, end, tuning_.chunk);
    if (whole.low >= whole.high || !tuning_.backend->direct) {
      return stage_in_steps(number, inside, nbytes, data, to);
    }
    stage_in_steps(number, inside, whole.low - inside, data, to);
    for (uint64_t at = whole.low; at < whole.high; at += tuning_.chunk) {
      const uint64_t count = std::min(tuning_.chunk, whole.high - at);
      out_.hashes[first_hash_[number] + at / tuning_.chunk] =
          copy_and_hash(to + (at - inside), data + (at - inside), count);
    }
    const uint64_t done = whole.high - inside;
    stage_in_steps(number, whole.high, end - whole.high, data + done, to + done);
  }

  void stage_in_steps(size_t number, uint64_t inside, uint64_t nbytes, const char* data, char* to) {
    for (uint64_t at = 0; at < nbytes; at += kStep) {
      const uint64_t count = std::min(kStep, nbytes - at);
      std::memcpy(to + at, data + at, count);
      hash_staged(number, inside + at, count, to + at);
    }
  }

  void hash_staged(size_t number, uint64_t inside, uint64_t nbytes, const char* data) {
    const Piece& piece = plan_.pieces[number];
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
  std::vector<uint64_t> first_hash_;  // per piece: where in `hashes` its first chunk's is
  StreamHash stream_;                 // of the chunk that the last window ended in
  size_t current_ = 0;
};

void set_size(const sys::File& file, uint64_t nbytes, bool preallocate) {
  const uint64_t now = sys::size(file);
  if (now > nbytes) sys::truncate(file, nbytes);
  if (now < nbytes && preallocate) sys::fallocate(file, nbytes);
}

// One copy, one write: for small files the latency of each extra call is what counts.
void write_small(uint64_t nbytes, Writer& writer, Written& out) {
  Staging staging(std::max<uint64_t>(nbytes, 1));
  writer.fill(0, nbytes, staging.data());
  const iovec whole{staging.data(), nbytes};
  if (nbytes > 0) sys::write_all(out.file, {&whole, 1}, 0);
  sys::start_writeback(out.file);
  out.stats.transfers = 1;
}

// What goes through the page cache has smaller windows.
void fit_window(uint64_t nbytes, Tuning& tuning) {
  if (nbytes <= tuning.small) tuning.backend = &kBuffered;
  if (!tuning.backend->direct) tuning.window = std::min(tuning.window, kBufferedWindow);
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
  const auto queue = make_queue(*tuning.backend, tuning.depth);
  if (nbytes > tuning.depth * tuning.window) staging.touch_ahead();

  size_t asked = 0, finished = 0;
  const auto retire = [&] {
    Slot& slot = slots[finished++ % slots.size()];
    const uint64_t low = slot.transfer.offset;
    finish(*queue, slot.transfer, alignment);
    // Let the device start now instead of at the sync.
    if (!tuning.backend->direct) sys::start_writeback(out.file, low, slot.nbytes);
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
    writer.fill(low, high, memory);
    slot.transfer.iov.assign(1, {memory, high - low});
    ++asked;
    if (asked - finished == slots.size() && slots.size() > 1) retire();
    queue->submit(slot.transfer);
    ++out.stats.transfers;
  }
  while (finished < asked) retire();
}

}  // namespace

uint64_t count_writes(uint64_t nbytes, Tuning tuning) {
  if (nbytes <= tuning.small) return 1;
  fit_window(nbytes, tuning);
  uint64_t count = 0;
  for (uint64_t low = 0, window = kFirstWindow / 2; low < nbytes; low += window, ++count) {
    window = std::min(2 * window, tuning.window);
  }
  return count;
}

Written write_file(const sys::Path& path, uint64_t nbytes, bool recycle, const Plan& plan, const Tuning& tuning,
                   Control& control) {
  Written out;
  const bool small = nbytes <= tuning.small;
  const bool direct = !small && tuning.backend->direct;
  Tuning used = tuning;
  fit_window(nbytes, used);
  const int flags = direct ? O_DIRECT : 0;
  out.file = recycle ? sys::open_over(path, flags) : sys::open(path, O_WRONLY | O_CREAT | O_EXCL | flags);
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

}  // namespace everystep
