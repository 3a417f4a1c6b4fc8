#include "probe.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "memory.hpp"
#include "sys.hpp"

namespace everystep {
namespace {

#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x00002000U
#endif

// The two fields follow stx_mnt_id in the kernel's struct; older headers keep that space as spare.
struct DirectAlignment {
  uint32_t memory;
  uint32_t offset;
};
constexpr size_t kDirectAlignmentAt = 0x98;
static_assert(sizeof(struct statx) >= kDirectAlignmentAt + sizeof(DirectAlignment));

}  // namespace

Probe probe_directory(const std::string& path) {
  Probe out;
  sys::File file;
  try {
    file = sys::scratch(path, O_DIRECT);
  } catch (const sys::Error& error) {
    // Tell "no direct I/O here" from "no writing here": only the first is for the engine to work around.
    sys::scratch(path, 0);
    out.reason = std::string("open with O_DIRECT: ") + std::strerror(error.code);
    return out;
  }
  struct statx info{};
  if (::statx(file.fd(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0) {
    DirectAlignment alignment{};
    std::memcpy(&alignment, reinterpret_cast<const char*>(&info) + kDirectAlignmentAt, sizeof alignment);
    out.memory_alignment = alignment.memory;
    out.offset_alignment = alignment.offset;
    if (alignment.offset == 0) {
      out.reason = "statx: the filesystem has no direct I/O";
      return out;
    }
  }
  const Staging block(4096);
  std::memset(block.data(), 0, 4096);
  const ssize_t done = sys::trial_write(file, block.data(), block.nbytes());
  // What is wrong with the storage today says nothing about what it can do.
  if (done == -ENOSPC || done == -EDQUOT || done == -EIO) {
    throw sys::Error{static_cast<int>(-done), sys::Call::probe, path};
  }
  out.direct = done == static_cast<ssize_t>(block.nbytes());
  if (!out.direct) {
    out.reason =
        std::string("trial direct write: ") + (done < 0 ? std::strerror(static_cast<int>(-done)) : "fell short");
  } else if (out.memory_alignment > 4096 || out.offset_alignment > 4096) {
    out.direct = false;
    out.reason = "the device wants an alignment above 4096 bytes";
  }
  return out;
}

}  // namespace everystep
