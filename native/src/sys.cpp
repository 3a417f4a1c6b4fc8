#include "sys.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "persist.hpp"

namespace everystep::sys {
namespace {

constexpr std::string_view kNames[] = {"open",  "lease",    "fallocate", "truncate",   "write", "read",
                                       "sync",  "sync_dir", "rename",    "exchange",   "link",  "mkdir",
                                       "rmdir", "unlink",   "store",     "write_back", "fence", "start_writeback",
                                       "ring",  "probe",    "map"};
static_assert(std::size(kNames) == kCallCount, "every call has a name");

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
  const bool in_any = call < Call::start_writeback;
  const uint64_t of_any = s.seen_any += in_any ? 1 : 0;
  for (const Fault& fault : s.faults) {
    if (fault.call ? *fault.call != call : !in_any) continue;
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

void fail_if_told(Call call, const std::string& path) {
  if (const int code = injected_error(call)) throw Error{code, call, path};
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

// What a device may do when it falls short: half the bytes, cut to a sector so that direct I/O can go on.
uint64_t short_of(uint64_t nbytes) { return nbytes >= 8192 ? nbytes / 2 / 4096 * 4096 : nbytes / 2; }

}  // namespace

Error::Error(int errno_code, Call failed, std::string where)
    : code(errno_code),
      call(failed),
      path(std::move(where)),
      text_(path + ": " + std::strerror(code) + " (" + std::string(name(call)) + ")") {}

std::string_view name(Call call) { return kNames[static_cast<size_t>(call)]; }

std::optional<Call> parse_call(std::string_view text) {
  for (size_t i = 0; i < kCallCount; ++i) {
    if (kNames[i] == text) return static_cast<Call>(i);
  }
  return std::nullopt;
}

int Path::at() const { return in ? in->fd() : AT_FDCWD; }

void Directory::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.fd_;
    leased_ = other.leased_;
    fresh_ = other.fresh_;
    path_ = std::move(other.path_);
    other.fd_ = -1;
  }
  return *this;
}

void File::close() {
  if (fd_ < 0) return;
  // A child forked meanwhile shares the lease, and readers would wait until it closes the file, too.
  if (leased_) ::fcntl(fd_, F_SETLEASE, F_UNLCK);
  // Data is on the device or reported lost at `sync`; a close has nothing more to say.
  ::close(fd_);
  fd_ = -1;
}

File open(const Path& path, int flags, mode_t mode) {
  fail_if_told(Call::open, path.shown);
  const bool creates = (flags & O_CREAT) != 0 && seam().active && !exists(path);
  const int fd =
      retry_interrupted([&] { return ::openat(path.at(), path.name.c_str(), flags | O_CLOEXEC, mode); });
  check(fd, Call::open, path.shown);
  if (flags & O_CREAT) record({Call::open, path.shown, {}, 0, 0, {}, 0, creates});
  File file(fd, path.shown);
  file.fresh_ = (flags & O_CREAT) != 0;
  return file;
}

namespace {

// With O_NONBLOCK, which a regular file has no use for later: a pipe would wait for its other end.
int open_at_once(const Path& path, int flags) {
  int fd =
      retry_interrupted([&] { return ::openat(path.at(), path.name.c_str(), flags | O_NONBLOCK | O_CLOEXEC); });
  if (fd < 0 && errno == EWOULDBLOCK && (flags & O_ACCMODE) == O_RDONLY) {
    // Another process, for example a file server, has a lease on the file and gives it up when asked. Pipes have
    // none.
    fd = retry_interrupted([&] { return ::openat(path.at(), path.name.c_str(), flags | O_CLOEXEC); });
  }
  return fd;
}

bool give_flags(int fd, int flags) { return ::fcntl(fd, F_SETFL, flags & O_DIRECT) == 0; }

// Whether only this process has the file open or mapped, from now until it closes it: the kernel gives a lease for
// writing under no other terms. Others who open the file meanwhile wait, and the kernel signals the holder. That
// would be SIGIO, which ends a process by default, so it is made SIGURG, which is ignored by default, and sent to
// no process.
bool take_lease(int fd) {
  if (injected_error(Call::lease) != 0) return false;
  struct stat info{};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_nlink != 1) return false;
  if (::fcntl(fd, F_SETSIG, SIGURG) != 0 || ::fcntl(fd, F_SETLEASE, F_WRLCK) != 0) return false;
  ::fcntl(fd, F_SETOWN, 0);
  return true;
}

}  // namespace

File open_regular(const Path& path, int flags) {
  fail_if_told(Call::open, path.shown);
  const int fd = open_at_once(path, O_RDONLY | flags);
  check(fd, Call::open, path.shown);
  File file(fd, path.shown);
  struct stat info{};
  check(::fstat(fd, &info), Call::open, path.shown);
  if (!S_ISREG(info.st_mode)) throw Error{S_ISDIR(info.st_mode) ? EISDIR : ESPIPE, Call::open, path.shown};
  check(give_flags(fd, flags) ? 0 : -1, Call::open, path.shown);
  return file;
}

File open_over(const Path& path, int flags) {
  fail_if_told(Call::open, path.shown);
  const int fd = open_at_once(path, O_WRONLY | O_NOFOLLOW | flags);
  if (fd < 0) {
    switch (errno) {
      case ENOENT:
        return open(path, O_WRONLY | O_CREAT | O_EXCL | flags);
      case ELOOP:  // a link, a pipe, a running program, a lease of another process, another owner
      case ENXIO:
      case ETXTBSY:
      case EWOULDBLOCK:
      case EACCES:
      case EPERM:
        break;
      default:
        throw Error{errno, Call::open, path.shown};
    }
  } else {
    File file(fd, path.shown);
    if (take_lease(fd)) {
      file.leased_ = true;
      check(give_flags(fd, flags) ? 0 : -1, Call::open, path.shown);
      record({Call::open, path.shown, {}, 0, 0, {}, 0, false});
      return file;
    }
  }
  unlink(path);
  return open(path, O_WRONLY | O_CREAT | O_EXCL | flags);
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

void sync_dir(const Directory& directory) {
  fail_if_told(Call::sync_dir, directory.path());
  check(::fsync(directory.fd()), Call::sync_dir, directory.path());
  record({Call::sync_dir, directory.path(), {}, 0, 0, {}, 0, false});
}

void sync_dir(const Path& path) {
  const int fd = ::openat(path.at(), path.name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  check(fd, Call::sync_dir, path.shown);
  sync_dir(Directory(fd, path.shown));
}

void start_writeback(const File& file, uint64_t offset, uint64_t nbytes) {
  int code = injected_error(Call::start_writeback);
  if (code == 0 && ::sync_file_range(file.fd(), static_cast<off_t>(offset), static_cast<off_t>(nbytes),
                                     SYNC_FILE_RANGE_WRITE) != 0) {
    code = errno;
  }
  switch (code) {
    case 0:
    case ENOSYS:  // no such call, or not for us, or not for such a file
    case EPERM:
    case EINVAL:
    case ESPIPE:
    case ENOMEM:  // they are all still there
    case EINTR:
      return;
    default:
      throw Error{code, Call::start_writeback, file.path()};
  }
}

void rename(const Path& from, const Path& to) {
  fail_if_told(Call::rename, to.shown);
  check(::renameat(from.at(), from.name.c_str(), to.at(), to.name.c_str()), Call::rename, to.shown);
  record({Call::rename, from.shown, to.shown, 0, 0, {}, 0, false});
}

void rename_new(const Path& from, const Path& to) {
  fail_if_told(Call::rename, to.shown);
  int result = ::renameat2(from.at(), from.name.c_str(), to.at(), to.name.c_str(), RENAME_NOREPLACE);
  if (result < 0 && (errno == EINVAL || errno == ENOSYS)) {
    // This file system cannot do it in one step, so there is a moment between the check and the rename.
    if (exists(to)) throw Error{EEXIST, Call::rename, to.shown};
    result = ::renameat(from.at(), from.name.c_str(), to.at(), to.name.c_str());
  }
  check(result, Call::rename, to.shown);
  record({Call::rename, from.shown, to.shown, 0, 0, {}, 0, false});
}

void exchange(const Path& a, const Path& b) {
  fail_if_told(Call::exchange, b.shown);
  check(::renameat2(a.at(), a.name.c_str(), b.at(), b.name.c_str(), RENAME_EXCHANGE), Call::exchange, b.shown);
  record({Call::exchange, a.shown, b.shown, 0, 0, {}, 0, false});
}

void link(const Path& from, const Path& to) {
  fail_if_told(Call::link, to.shown);
  check(::linkat(from.at(), from.name.c_str(), to.at(), to.name.c_str(), 0), Call::link, to.shown);
  record({Call::link, from.shown, to.shown, 0, 0, {}, 0, false});
}

void mkdir(const Path& path, mode_t mode) {
  fail_if_told(Call::mkdir, path.shown);
  check(::mkdirat(path.at(), path.name.c_str(), mode), Call::mkdir, path.shown);
  record({Call::mkdir, path.shown, {}, 0, 0, {}, 0, false});
}

void rmdir(const Path& path) {
  fail_if_told(Call::rmdir, path.shown);
  check(::unlinkat(path.at(), path.name.c_str(), AT_REMOVEDIR), Call::rmdir, path.shown);
  record({Call::rmdir, path.shown, {}, 0, 0, {}, 0, false});
}

void unlink(const Path& path) {
  fail_if_told(Call::unlink, path.shown);
  check(::unlinkat(path.at(), path.name.c_str(), 0), Call::unlink, path.shown);
  record({Call::unlink, path.shown, {}, 0, 0, {}, 0, false});
}

uint64_t size(const File& file) {
  struct stat info{};
  check(::fstat(file.fd(), &info), Call::open, file.path());
  return static_cast<uint64_t>(info.st_size);
}

namespace {

Identity identity_at(int at, const char* name, int flags, const std::string& shown) {
  struct statx info{};
  check(::statx(at, name, flags, STATX_INO | STATX_BTIME, &info), Call::open, shown);
  const uint64_t device = (static_cast<uint64_t>(info.stx_dev_major) << 32) | info.stx_dev_minor;
  const bool known = (info.stx_mask & STATX_BTIME) != 0;
  return {device, info.stx_ino, known ? info.stx_btime.tv_sec * 1'000'000'000 + info.stx_btime.tv_nsec : 0};
}

bool same(const struct stat& a, const struct stat& b) { return a.st_ino == b.st_ino && a.st_dev == b.st_dev; }

}  // namespace

Identity identity(const Path& path) { return identity_at(path.at(), path.name.c_str(), 0, path.shown); }

Identity identity(const Directory& directory) {
  return identity_at(directory.fd(), "", AT_EMPTY_PATH, directory.path());
}

bool exists(const Path& path) {
  struct stat info{};
  return ::fstatat(path.at(), path.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
}

bool is_link(const Path& path) {
  struct stat info{};
  return ::fstatat(path.at(), path.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(info.st_mode);
}

std::shared_ptr<Directory> open_directory(const Path& path, bool follow) {
  const int fd =
      ::openat(path.at(), path.name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | (follow ? 0 : O_NOFOLLOW));
  if (fd < 0) throw Error{errno == ELOOP && !follow ? ENOTDIR : errno, Call::open, path.shown};
  return std::make_shared<Directory>(fd, path.shown);
}

std::shared_ptr<Directory> lock_directory(const Path& path, bool exclusive, bool follow) {
  auto directory = open_directory(path, follow);
  struct stat ours{}, named{};
  const int failed = [&] {
    if (::flock(directory->fd(), (exclusive ? LOCK_EX : LOCK_SH) | LOCK_NB) != 0) return errno;
    if (::fstat(directory->fd(), &ours) != 0) return errno;
    if (::fstatat(path.at(), path.name.c_str(), &named, follow ? 0 : AT_SYMLINK_NOFOLLOW) != 0) return errno;
    return 0;
  }();
  if (failed == 0 && same(ours, named)) return directory;
  if (failed != 0 && failed != EWOULDBLOCK && failed != ENOENT) throw Error{failed, Call::open, path.shown};
  return nullptr;
}

std::shared_ptr<Directory> make_directory(const Path& path) {
  mkdir(path);
  try {
    return lock_directory(path, true, false);
  } catch (const Error& error) {
    if (error.code == ENOENT) return nullptr;  // another process took it for a leftover and removed it
    ::unlinkat(path.at(), path.name.c_str(), AT_REMOVEDIR);
    throw;
  }
}

bool is_current(const Directory& directory) {
  struct stat ours{}, named{};
  check(::fstat(directory.fd(), &ours), Call::open, directory.path());
  if (::stat(directory.path().c_str(), &named) == 0) return same(ours, named);
  if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) return false;
  throw Error{errno, Call::open, directory.path()};
}

void unlock(const Directory& directory) { ::flock(directory.fd(), LOCK_UN); }

// For calls that cannot fall short, a short-count fault has nothing to do and lets the call pass.
int injected_error(Call call) {
  const Verdict verdict = decide(call);
  return verdict.intervene ? verdict.code : 0;
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
  const auto told = intercept(call, nbytes_of({iov, static_cast<size_t>(count)}));
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

ssize_t trial_write(const File& file, const void* data, uint64_t nbytes) {
  const iovec whole{const_cast<void*>(data), nbytes};
  return transfer(Call::probe, &whole, 1, [&](const iovec* v, int n) { return ::pwritev(file.fd(), v, n, 0); });
}

File scratch(const std::string& directory, int flags) {
  fail_if_told(Call::probe, directory);
  const int fd = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (fd >= 0) return File(fd, directory);
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT) throw Error{errno, Call::probe, directory};
  std::string name = directory + "/.everystep-probe-XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC | flags);
  check(named, Call::probe, directory);
  ::unlink(name.c_str());
  return File(named, directory);
}

void write_all(const File& file, std::span<const iovec> parts, uint64_t offset) {
  std::vector<iovec> rest;
  while (!parts.empty()) {
    const ssize_t done = pwritev(file, parts.data(), static_cast<int>(parts.size()), offset);
    if (done <= 0) throw Error{done < 0 ? static_cast<int>(-done) : EIO, Call::write, file.path()};
    const auto count = static_cast<uint64_t>(done);
    if (count == nbytes_of(parts)) return;
    offset += count;
    if (rest.empty()) rest.assign(parts.begin(), parts.end());
    drop_front(rest, count);
    parts = rest;
  }
}

bool read_all(const File& file, void* to, uint64_t nbytes, uint64_t offset) {
  for (auto* at = static_cast<char*>(to); nbytes > 0;) {
    const iovec part{at, nbytes};
    const ssize_t done = preadv(file, &part, 1, offset);
    if (done < 0) throw Error{static_cast<int>(-done), Call::read, file.path()};
    if (done == 0) return false;
    at += done;
    offset += static_cast<uint64_t>(done);
    nbytes -= static_cast<uint64_t>(done);
  }
  return true;
}

uint64_t nbytes_of(std::span<const iovec> parts) {
  uint64_t sum = 0;
  for (const iovec& part : parts) sum += part.iov_len;
  return sum;
}

void drop_front(std::vector<iovec>& parts, uint64_t count) {
  size_t gone = 0;
  while (gone < parts.size() && count >= parts[gone].iov_len) count -= parts[gone++].iov_len;
  parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(gone));
  if (count > 0) {
    parts[0].iov_base = static_cast<char*>(parts[0].iov_base) + count;
    parts[0].iov_len -= count;
  }
}

void* map(const File& file, uint64_t offset, uint64_t nbytes, int protection, int flags) {
  fail_if_told(Call::map, file.path());
  void* const found = ::mmap(nullptr, nbytes, protection, flags, file.fd(), static_cast<off_t>(offset));
  check(found == MAP_FAILED ? -1 : 0, Call::map, file.path());
  return found;
}

void* map_memory(size_t nbytes, const char* what) {
  fail_if_told(Call::map, what);
  void* const found = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  check(found == MAP_FAILED ? -1 : 0, Call::map, what);
  return found;
}

void fail_store(const File& file) { fail_if_told(Call::store, file.path()); }

void observe_store(const File& file, const void* data, uint64_t nbytes, uint64_t offset) {
  if (!seam().active.load(std::memory_order_relaxed)) return;
  record({Call::store,
          file.path(),
          {},
          offset,
          nbytes,
          std::string(static_cast<const char*>(data), nbytes),
          0,
          false});
}

void observe_write_back(const File& file, uint64_t nbytes, uint64_t offset) {
  if (!seam().active.load(std::memory_order_relaxed)) return;
  record({Call::write_back, file.path(), {}, offset, nbytes, {}, 0, false});
}

void fence(const File& file) {
  fail_if_told(Call::fence, file.path());
  persist_fence();
  if (seam().active.load(std::memory_order_relaxed)) record({Call::fence, file.path(), {}, 0, 0, {}, 0, false});
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

}  // namespace everystep::sys
