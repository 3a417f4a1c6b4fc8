#include "queue.hpp"

#include <cerrno>

namespace everystep {

void finish(Queue& queue, Transfer& transfer, uint64_t alignment) {
  // A device that makes no progress this often in a row never will.
  constexpr int kMaxStalls = 8;
  const sys::Call call = transfer.is_write ? sys::Call::write : sys::Call::read;
  for (int stalls = 0;;) {
    queue.wait(transfer);
    const int64_t result = transfer.result;
    if (result < 0 && result != -EAGAIN && result != -EINTR) {
      throw sys::Error{static_cast<int>(-result), call, transfer.file->path()};
    }
    uint64_t moved = result > 0 ? static_cast<uint64_t>(result) : 0;
    if (moved >= transfer.nbytes()) return;
    moved = moved / alignment * alignment;
    if (moved == 0 && ++stalls > kMaxStalls) throw sys::Error{EIO, call, transfer.file->path()};
    if (moved > 0) stalls = 0;
    transfer.offset += moved;
    sys::drop_front(transfer.iov, moved);
    queue.submit(transfer);
  }
}

namespace {

// One transfer at a time, in the caller's thread: for so little that starting a thread would be most of the work.
class InlineQueue final : public Queue {
 public:
  void submit(Transfer& transfer) override {
    const auto move = transfer.is_write ? sys::pwritev : sys::preadv;
    transfer.result =
        move(*transfer.file, transfer.iov.data(), static_cast<int>(transfer.iov.size()), transfer.offset);
    transfer.done = true;
  }
  void wait(Transfer&) override {}
};

}  // namespace

const Backend* find_backend(std::string_view name) {
  for (const Backend* backend : kBackends) {
    if (backend->name == name) return backend;
  }
  return nullptr;
}

std::unique_ptr<Queue> make_queue(const Backend& backend, unsigned depth) {
  return depth == 1 ? std::make_unique<InlineQueue>() : backend.make_queue(depth);
}

}  // namespace everystep
