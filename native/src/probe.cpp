#include "probe.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transfer.hpp"

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

// An unnamed file where the filesystem has them (nothing is left behind, whatever happens), else a named one.
sys::File scratch(const std::string& path, int flags) {
  const int fd = ::open(path.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (fd >= 0) return sys::File(fd, path);
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT) return sys::File();
  std::string name = path + "/.everystep-probe-XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC | flags);
  if (named >= 0) ::unlink(name.c_str());
  return named >= 0 ? sys::File(named, path) : sys::File();
}

}  // namespace

Probe probe_directory(const std::string& path) {
  Probe out;
  const sys::File file = scratch(path, O_DIRECT);
  if (!file.is_open()) {
    const int code = errno;
    // Tell "no direct I/O here" from "no writing here": only the first is for the engine to work around.
    if (!scratch(path, 0).is_open()) throw sys::Error{errno, sys::Call::open, path};
    out.reason = std::string("open with O_DIRECT: ") + std::strerror(code);
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
  const ssize_t done = ::pwrite(file.fd(), block.data(), 4096, 0);
  // What is wrong with the storage today says nothing about what it can do.
  if (done < 0 && (errno == ENOSPC || errno == EDQUOT || errno == EIO)) {
    throw sys::Error{errno, sys::Call::write, path};
  }
  out.direct = done == 4096;
  if (!out.direct) {
    out.reason = std::string("trial direct write: ") + (done < 0 ? std::strerror(errno) : "fell short");
  } else if (out.memory_alignment > 4096 || out.offset_alignment > 4096) {
    out.direct = false;
    out.reason = "the device wants an alignment above 4096 bytes";
  }
  return out;
}

}  // namespace everystep
