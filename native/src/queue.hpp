// Asynchronous transfers: one interface, several ways of doing them.
//
// A queue holds up to `depth` transfers under way and knows nothing about what the bytes are. Its users
// (write.cpp, read.cpp) keep the memory alive, and continue transfers that fell short.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sys.hpp"

namespace everystep {

struct Transfer {
  bool is_write = true;
  const sys::File* file = nullptr;
  uint64_t offset = 0;
  std::vector<iovec> iov;
  // Written by the queue:
  int64_t result = 0;  // a count, or -errno
  bool done = true;

  [[nodiscard]] uint64_t nbytes() const { return sys::nbytes_of(iov); }
};

class Queue {
 public:
  virtual ~Queue() = default;
  virtual void submit(Transfer& transfer) = 0;
  // Returns when `transfer.done`; completions of others are noted on the way.
  virtual void wait(Transfer& transfer) = 0;
};

// One way of moving bytes. To add one, write a file that defines it and add its name to the list below (and to
// `Backend` in src/everystep/engine/probe.py, which decides when it is used).
struct Backend {
  std::string_view name;
  bool direct;  // past the page cache (O_DIRECT): addresses, offsets and lengths are aligned
  std::unique_ptr<Queue> (*make_queue)(unsigned depth);
};
extern const Backend kUring, kThreads, kBuffered;
inline constexpr const Backend* kBackends[] = {&kUring, &kThreads, &kBuffered};
// Null if no backend has that name.
const Backend* find_backend(std::string_view name);

// A depth of one needs no queue: the caller's thread does the work.
std::unique_ptr<Queue> make_queue(const Backend& backend, unsigned depth);

// Whether this kernel lets this process create a ring (containers often forbid it); `reason` says why not.
bool uring_available(std::string& reason);

// Waits for the transfer and continues it while it falls short; throws sys::Error when it fails finally.
// `alignment` > 1: a short count is rounded down to it, so that the rest stays legal for direct I/O.
void finish(Queue& queue, Transfer& transfer, uint64_t alignment);

}  // namespace everystep
