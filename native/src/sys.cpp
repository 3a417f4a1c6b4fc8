#include "sys.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <thread>

namespace holdfast::sys {
namespace {

constexpr std::array<std::string_view, kCallCount> kNames = {"open",     "fallocate", "truncate", "write",
                                                             "read",     "sync",      "sync_dir", "rename",
                                                             "exchange", "mkdir",     "rmdir",    "unlink"};

struct Seam {
  std::atomic<bool> active{false};
  std::mutex mutex;
  std::vector<Fault> faults;
  std::array<uint64_t, kCallCount> seen{};
  uint64_t seen_any = 0;
  bool tracing = false;
  std::vector<Event> events;
};

// Never destroyed: threads of the engine may still be at work when exit handlers run.
Seam& seam() {
  static Seam& instance = *new Seam;
  return instance;
}

struct Verdict {
  bool intervene = false;
  int code = 0;  // errno to report, 0: fall short
};

Verdict decide(Call call) {
  Seam& s = seam();
  if (!s.active.load(std::memory_order_relaxed)) return {};
  std::unique_lock lock(s.mutex);
  if (s.faults.empty()) return {};
  const uint64_t of_kind = ++s.seen[static_cast<size_t>(call)];
  const uint64_t of_any = ++s.seen_any;
  for (const Fault& fault : s.faults) {
    if (fault.call && *fault.call != call) continue;
    const uint64_t count = fault.call ? of_kind : of_any;
    if (count != fault.nth && !(fault.lasting && count > fault.nth)) continue;
    if (fault.action == Fault::Action::kill) ::raise(SIGKILL);
    if (fault.action == Fault::Action::slow) {
      const std::chrono::milliseconds delay(fault.code);
      lock.unlock();
      std::this_thread::sleep_for(delay);
      return {};
    }
    return {true, fault.action == Fault::Action::short_count ? 0 : fault.code};
  }
  return {};
}

void record(Event event) {
  Seam& s = seam();
  if (!s.active.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(s.mutex);
  if (s.tracing) s.events.push_back(std::move(event));
}

// For calls that cannot fall short, a short-count fault has nothing to do and lets the call pass.
void fail_if_told(Call call, const std::string& path) {
  const Verdict verdict = decide(call);
  if (verdict.intervene && verdict.code != 0) throw Error{verdict.code, call, path};
}

void check(int result, Call call, const std::string& path) {
  if (result < 0) throw Error{errno, call, path};
}

template <typename Function>
auto retry_interrupted(Function function) {
  auto result = function();
  while (result < 0 && errno == EINTR) result = function();
  return result;
}

std::string gather(const iovec* iov, int count, size_t nbytes) {
  std::string data;
  data.reserve(nbytes);
  for (int i = 0; i < count && data.size() < nbytes; ++i) {
    data.append(static_cast<const char*>(iov[i].iov_base), std::min(iov[i].iov_len, nbytes - data.size()));
  }
  return data;
}

uint64_t total(const iovec* iov, int count) {
  uint64_t sum = 0;
  for (int i = 0; i < count; ++i) sum += iov[i].iov_len;
  return sum;
}

// What a device may do when it falls short: half the bytes, cut to a sector so that direct I/O can go on.
uint64_t short_of(uint64_t nbytes) { return nbytes >= 8192 ? nbytes / 2 / 4096 * 4096 : nbytes / 2; }

}  // namespace

std::string_view name(Call call) { return kNames[static_cast<size_t>(call)]; }

std::optional<Call> parse_call(std::string_view text) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == text) return static_cast<Call>(i);
  }
  return std::nullopt;
}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.fd_;
    path_ = std::move(other.path_);
    other.fd_ = -1;
  }
  return *this;
}

void File::close() {
  // Data is on the device or reported lost at `sync`; a close has nothing more to say.
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

File open(const std::string& path, int flags, mode_t mode) {
  fail_if_told(Call::open, path);
  const bool creates = (flags & O_CREAT) != 0 && seam().active && ::access(path.c_str(), F_OK) != 0;
  const int fd = retry_interrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC, mode); });
  check(fd, Call::open, path);
  if (flags & O_CREAT) record({Call::open, path, {}, 0, 0, {}, 0, creates});
  return File(fd, path);
}

void fallocate(const File& file, uint64_t nbytes) {
  fail_if_told(Call::fallocate, file.path());
  const int result = retry_interrupted([&] { return ::fallocate(file.fd(), 0, 0, static_cast<off_t>(nbytes)); });
  // Filesystems without preallocation still take the writes; only the early "disk full" is lost.
  if (result < 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) return truncate(file, nbytes);
  check(result, Call::fallocate, file.path());
  record({Call::fallocate, file.path(), {}, 0, nbytes, {}, 0, false});
}

void truncate(const File& file, uint64_t nbytes) {
  fail_if_told(Call::truncate, file.path());
  check(retry_interrupted([&] { return ::ftruncate(file.fd(), static_cast<off_t>(nbytes)); }), Call::truncate,
        file.path());
  record({Call::truncate, file.path(), {}, 0, nbytes, {}, 0, false});
}

void sync(const File& file) {
  fail_if_told(Call::sync, file.path());
  // fdatasync also flushes the size and the extents, all that reading the data back needs.
  check(::fdatasync(file.fd()), Call::sync, file.path());
  record({Call::sync, file.path(), {}, 0, 0, {}, 0, false});
}

void sync_dir(const File& directory) {
  fail_if_told(Call::sync_dir, directory.path());
  check(::fsync(directory.fd()), Call::sync_dir, directory.path());
  record({Call::sync_dir, directory.path(), {}, 0, 0, {}, 0, false});
}

void sync_dir(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  check(fd, Call::sync_dir, path);
  sync_dir(File(fd, path));
}

void rename(const std::string& from, const std::string& to) {
  fail_if_told(Call::rename, to);
  check(::rename(from.c_str(), to.c_str()), Call::rename, to);
  record({Call::rename, from, to, 0, 0, {}, 0, false});
}

void rename_new(const std::string& from, const std::string& to) {
  fail_if_told(Call::rename, to);
  int result = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE);
  if (result < 0 && (errno == EINVAL || errno == ENOSYS)) {
    // A file system that cannot tell: then there is a moment between looking and doing.
    if (exists(to)) throw Error{EEXIST, Call::rename, to};
    result = ::rename(from.c_str(), to.c_str());
  }
  check(result, Call::rename, to);
  record({Call::rename, from, to, 0, 0, {}, 0, false});
}

void exchange(const std::string& a, const std::string& b) {
  fail_if_told(Call::exchange, b);
  check(::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE), Call::exchange, b);
  record({Call::exchange, a, b, 0, 0, {}, 0, false});
}

void mkdir(const std::string& path, mode_t mode) {
  fail_if_told(Call::mkdir, path);
  check(::mkdir(path.c_str(), mode), Call::mkdir, path);
  record({Call::mkdir, path, {}, 0, 0, {}, 0, false});
}

void rmdir(const std::string& path) {
  fail_if_told(Call::rmdir, path);
  check(::rmdir(path.c_str()), Call::rmdir, path);
  record({Call::rmdir, path, {}, 0, 0, {}, 0, false});
}

void unlink(const std::string& path) {
  fail_if_told(Call::unlink, path);
  check(::unlink(path.c_str()), Call::unlink, path);
  record({Call::unlink, path, {}, 0, 0, {}, 0, false});
}

uint64_t size(const File& file) {
  struct stat info{};
  check(::fstat(file.fd(), &info), Call::open, file.path());
  return static_cast<uint64_t>(info.st_size);
}

Identity identity(const std::string& path) {
  struct statx info{};
  check(::statx(AT_FDCWD, path.c_str(), 0, STATX_INO | STATX_BTIME, &info), Call::open, path);
  const uint64_t device = (static_cast<uint64_t>(info.stx_dev_major) << 32) | info.stx_dev_minor;
  const bool known = (info.stx_mask & STATX_BTIME) != 0;
  return {device, info.stx_ino, known ? info.stx_btime.tv_sec * 1'000'000'000 + info.stx_btime.tv_nsec : 0};
}

bool exists(const std::string& path) {
  struct stat info{};
  return ::lstat(path.c_str(), &info) == 0;
}

std::optional<int> hold_directory(const std::string& path, bool exclusive) {
  // Who writes or removes must not be led elsewhere by a link; a reader may have named one.
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | (exclusive ? O_NOFOLLOW : 0));
  if (fd < 0) throw Error{errno == ELOOP && exclusive ? ENOTDIR : errno, Call::open, path};
  struct stat ours{}, named{};
  const int failed = [&] {
    if (::flock(fd, (exclusive ? LOCK_EX : LOCK_SH) | LOCK_NB) != 0) return errno;
    if (::fstat(fd, &ours) != 0 || ::stat(path.c_str(), &named) != 0) return errno;
    return 0;
  }();
  if (failed == 0 && ours.st_ino == named.st_ino && ours.st_dev == named.st_dev) return fd;
  ::close(fd);
  if (failed != 0 && failed != EWOULDBLOCK && failed != ENOENT) throw Error{failed, Call::open, path};
  return std::nullopt;
}

std::optional<int> make_directory(const std::string& path) {
  mkdir(path);
  try {
    return hold_directory(path, true);
  } catch (const Error& error) {
    if (error.code == ENOENT) return std::nullopt;  // somebody took it for a leftover and has swept it
    ::rmdir(path.c_str());
    throw;
  }
}

void release_directory(int fd) {
  ::flock(fd, LOCK_UN);
  ::close(fd);
}

std::optional<ssize_t> intercept(Call call, uint64_t nbytes) {
  const Verdict verdict = decide(call);
  if (!verdict.intervene) return std::nullopt;
  if (verdict.code != 0) return -verdict.code;
  return static_cast<ssize_t>(short_of(nbytes));
}

void observe_write(const File& file, const iovec* iov, int count, uint64_t offset, ssize_t result) {
  if (result <= 0 || !seam().active.load(std::memory_order_relaxed)) return;
  record({Call::write,
          file.path(),
          {},
          offset,
          static_cast<uint64_t>(result),
          gather(iov, count, static_cast<size_t>(result)),
          result,
          false});
}

namespace {
template <typename Transfer>
ssize_t transfer(Call call, const iovec* iov, int count, Transfer function) {
  count = std::min(count, kMaxSegments);
  const auto told = intercept(call, total(iov, count));
  if (told && *told <= 0) return *told;
  if (told) {
    // A short count must really have moved the bytes it claims.
    std::vector<iovec> part;
    auto left = static_cast<size_t>(*told);
    for (int i = 0; i < count && left > 0; ++i) {
      part.push_back({iov[i].iov_base, std::min(iov[i].iov_len, left)});
      left -= part.back().iov_len;
    }
    const ssize_t done = retry_interrupted([&] { return function(part.data(), static_cast<int>(part.size())); });
    return done < 0 ? -errno : done;
  }
  const ssize_t done = retry_interrupted([&] { return function(iov, count); });
  return done < 0 ? -errno : done;
}
}  // namespace

ssize_t pwritev(const File& file, const iovec* iov, int count, uint64_t offset) {
  const ssize_t done = transfer(Call::write, iov, count, [&](const iovec* v, int n) {
    return ::pwritev(file.fd(), v, n, static_cast<off_t>(offset));
  });
  observe_write(file, iov, count, offset, done);
  return done;
}

ssize_t preadv(const File& file, const iovec* iov, int count, uint64_t offset) {
  return transfer(Call::read, iov, count,
                  [&](const iovec* v, int n) { return ::preadv(file.fd(), v, n, static_cast<off_t>(offset)); });
}

void set_faults(std::vector<Fault> faults) {
  Seam& s = seam();
  std::lock_guard lock(s.mutex);
  s.faults = std::move(faults);
  s.seen.fill(0);
  s.seen_any = 0;
  s.active = s.tracing || !s.faults.empty();
}

uint64_t calls_seen() {
  Seam& s = seam();
  std::lock_guard lock(s.mutex);
  return s.seen_any;
}

void start_trace() {
  Seam& s = seam();
  std::lock_guard lock(s.mutex);
  s.events.clear();
  s.tracing = true;
  s.active = true;
}

std::vector<Event> stop_trace() {
  Seam& s = seam();
  std::lock_guard lock(s.mutex);
  s.tracing = false;
  s.active = !s.faults.empty();
  return std::move(s.events);
}

}  // namespace holdfast::sys
