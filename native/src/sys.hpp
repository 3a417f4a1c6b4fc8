// The one seam to the operating system: every call that can change or lose stored bytes goes through here, and
// every mapping of memory.
//
// Tests can make the N-th call of a kind fail, fall short or kill the process (`set_faults`), and can record every
// call with its data (`start_trace`) to enumerate what a power cut could leave behind. With neither switched on,
// the cost is one relaxed atomic load per call.
//
// How failures are reported, here and in all of the core: a function throws `Error`. There is one exception: one
// transfer (`pwritev`, `preadv`, `Transfer::result`) and what stands for a call on a ring return a count, or
// -errno. Their callers continue after short counts, and decide which errors are final: `finish`, `write_all` and
// `read_all` do, and throw. A function that returns a bool or a pointer says what false or null means; it throws
// otherwise.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace everystep::sys {

enum class Call {
  open,
  lease,
  fallocate,
  truncate,
  write,
  read,
  sync,
  sync_dir,
  rename,
  exchange,
  link,
  mkdir,
  rmdir,
  unlink,
  store,
  write_back,
  fence,
  // Not among `any`: how many there are depends on the backend, on memory that is kept, and on chance.
  start_writeback,
  ring,   // every call on an io_uring itself
  probe,  // the trial of what a file system can do
  map,    // of files and of anonymous memory
};
inline constexpr size_t kCallCount = static_cast<size_t>(Call::map) + 1;
std::string_view name(Call call);

// An operating-system error that carries what was being done and to what; becomes OSError in Python.
class Error : public std::exception {
 public:
  Error(int errno_code, Call failed, std::string where);
  [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }

  int code;
  Call call;
  std::string path;

 private:
  std::string text_;
};

// An open directory. Names in it are reached through its descriptor, so renames of its path do not matter.
class Directory {
 public:
  Directory(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory() { close(); }
  void close();
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  // It was renamed.
  void set_path(std::string path) { path_ = std::move(path); }

 private:
  int fd_;
  std::string path_;  // for errors and traces
};

// What a call acts on: a name in an open directory, or a path as the process sees it. `shown` is how errors and
// traces name it.
struct Path {
  Path(std::string path) : name(std::move(path)), shown(name) {}
  Path(std::shared_ptr<const Directory> directory, std::string entry)
      : in(std::move(directory)), name(std::move(entry)), shown(in->path() + "/" + name) {}

  std::shared_ptr<const Directory> in;
  std::string name;
  std::string shown;

  [[nodiscard]] int at() const;
};

// An open file that knows its path (for errors and traces) and closes itself.
class File {
 public:
  File() = default;
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  File(File&& other) noexcept
      : fd_(other.fd_), leased_(other.leased_), fresh_(other.fresh_), path_(std::move(other.path_)) {
    other.fd_ = -1;
  }
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(); }
  void close();
  [[nodiscard]] bool is_open() const { return fd_ >= 0; }
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  // Whether opening it has given its directory a new name.
  [[nodiscard]] bool fresh() const { return fresh_; }

 private:
  friend File open(const Path& path, int flags, mode_t mode);
  friend File open_over(const Path& path, int flags);

  int fd_ = -1;
  bool leased_ = false;
  bool fresh_ = false;
  std::string path_;
};

// None of these retries a failed sync.
File open(const Path& path, int flags, mode_t mode = 0644);
// For reading. Only a regular file, and never waits for the other end of a pipe.
File open_regular(const Path& path, int flags = 0);
// For writing over a file. It must be a regular file with one name, and no other process may have it open or
// mapped. Otherwise, or if that cannot be found out, a new file takes its name. While it is open, others wait to
// open it.
File open_over(const Path& path, int flags = 0);
void fallocate(const File& file, uint64_t nbytes);
void truncate(const File& file, uint64_t nbytes);
void sync(const File& file);
void sync_dir(const Directory& directory);
void sync_dir(const Path& path);
// Lets the device start on bytes of a file in the page cache; `nbytes` 0: all from `offset` on. Throws when the
// file system says that it has lost them: it may say so only once (ext4 does, where it finds no blocks), and the
// sync would have nothing left to do. Where there is no such call, the sync does it all.
void start_writeback(const File& file, uint64_t offset = 0, uint64_t nbytes = 0);
void rename(const Path& from, const Path& to);
void rename_new(const Path& from, const Path& to);  // EEXIST where there is anything of that name
void exchange(const Path& a, const Path& b);
void link(const Path& from, const Path& to);  // a second name; EEXIST where there is anything of that name
void mkdir(const Path& path, mode_t mode = 0755);
void rmdir(const Path& path);
void unlink(const Path& path);
uint64_t size(const File& file);
// Identifies a file or directory. `made_ns` tells it from an earlier one with the same inode.
struct Identity {
  uint64_t device, inode;
  int64_t made_ns;  // 0 where the file system does not keep it
};
Identity identity(const Path& path);
Identity identity(const Directory& directory);
// Whether the name exists. A link that leads nowhere counts, too.
bool exists(const Path& path);
bool is_link(const Path& path);
// Opens a directory, without a lock.
std::shared_ptr<Directory> open_directory(const Path& path, bool follow);
// Opens and locks a directory, exclusively or shared. Null if others hold it, or if it has lost its name
// meanwhile. Without `follow`, a link is an error. Tests cannot make this call fail: locks do not have to survive
// a crash.
std::shared_ptr<Directory> lock_directory(const Path& path, bool exclusive, bool follow);
// Makes a directory and locks it exclusively. Null if another process removed it at once.
std::shared_ptr<Directory> make_directory(const Path& path);
// Whether the path by which a directory was opened still leads to it.
bool is_current(const Directory& directory);
// Call it before closing: a child forked meanwhile shares the lock, and would keep it.
void unlock(const Directory& directory);

// A file for a trial write, without a name (so nothing is left behind), or one that has just been unlinked.
File scratch(const std::string& directory, int flags);

// One transfer: a count, or -errno. The caller continues short counts, also when it gave more segments than the
// kernel takes in one call.
inline constexpr int kMaxSegments = 1024;  // the kernel's UIO_MAXIOV
ssize_t pwritev(const File& file, const iovec* iov, int count, uint64_t offset);
ssize_t preadv(const File& file, const iovec* iov, int count, uint64_t offset);
ssize_t trial_write(const File& file, const void* data, uint64_t nbytes);
// As many transfers as it takes.
void write_all(const File& file, std::span<const iovec> parts, uint64_t offset);
// False where the file ends before.
bool read_all(const File& file, void* to, uint64_t nbytes, uint64_t offset);
uint64_t nbytes_of(std::span<const iovec> parts);
// Drops the first `count` bytes, after a short transfer.
void drop_front(std::vector<iovec>& parts, uint64_t count);

// For a call that is made elsewhere: the errno that it should fail with, or 0 to make it.
int injected_error(Call call);
// Maps a part of a file, or memory without a file, which `what` names in errors.
void* map(const File& file, uint64_t offset, uint64_t nbytes, int protection, int flags);
void* map_memory(size_t nbytes, const char* what);
// For asynchronous transfers the seam is passed in two halves: `intercept` before the submission (a value means
// "pretend the call returned this"), `observe` after the completion.
std::optional<ssize_t> intercept(Call call, uint64_t nbytes);
void observe_write(const File& file, const iovec* iov, int count, uint64_t offset, ssize_t result);

// Stores through a mapping of a file pass the seam in halves, too. After `fence`, everything that was written back
// from the processor's caches before is on the medium.
void fail_store(const File& file);  // throws if a test says so
void observe_store(const File& file, const void* data, uint64_t nbytes, uint64_t offset);
void observe_write_back(const File& file, uint64_t nbytes, uint64_t offset);
void fence(const File& file);

// --- for tests -----------------------------------------------------------------------------------------------

// Makes the `nth` (1-based) call of a kind misbehave; `any` counts calls of all kinds together, up to `fence`.
struct Fault {
  std::optional<Call> call;  // nullopt: any
  uint64_t nth = 1;
  enum class Action { error, short_count, kill, slow } action = Action::error;
  int code = 0;          // errno of an error, milliseconds of a delay
  bool lasting = false;  // also every later call of that kind
};

struct Event {
  Call call;
  std::string path;
  std::string path2;
  uint64_t offset = 0;
  uint64_t nbytes = 0;
  std::string data;
  int64_t result = 0;
  bool creates = false;
};

void set_faults(std::vector<Fault> faults);
uint64_t calls_seen();  // since set_faults
void start_trace();
std::vector<Event> stop_trace();
std::optional<Call> parse_call(std::string_view text);

}  // namespace everystep::sys
