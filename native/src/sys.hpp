// The one seam to the operating system: every call that can change or lose stored bytes goes through here.
//
// Each wrapper returns the call's result, or -errno. Tests can make the N-th call of a kind fail, fall short or
// kill the process (`faults`), and can record every call with its data (`trace`) to enumerate what a power cut
// could leave behind. With neither switched on, the cost is one relaxed atomic load per call.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace holdfast::sys {

enum class Call { open, fallocate, truncate, write, read, sync, sync_dir, rename, exchange, mkdir, rmdir, unlink };
inline constexpr int kCallCount = 12;
std::string_view name(Call call);

// An operating-system error that carries what was being done and to what; becomes OSError in Python.
struct Error {
  int code;
  Call call;
  std::string path;
};

// An open file that knows its path (for errors and traces) and closes itself.
class File {
 public:
  File() = default;
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  File(File&& other) noexcept : fd_(other.fd_), path_(std::move(other.path_)) { other.fd_ = -1; }
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(); }
  void close();
  [[nodiscard]] bool is_open() const { return fd_ >= 0; }
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  int fd_ = -1;
  std::string path_;
};

// All of these throw Error; none retries a failed sync.
File open(const std::string& path, int flags, mode_t mode = 0644);
void fallocate(const File& file, uint64_t nbytes);
void truncate(const File& file, uint64_t nbytes);
void sync(const File& file);
void sync_dir(const File& directory);
void sync_dir(const std::string& path);
void rename(const std::string& from, const std::string& to);
void rename_new(const std::string& from, const std::string& to);  // EEXIST where there is anything of that name
void exchange(const std::string& a, const std::string& b);
void mkdir(const std::string& path, mode_t mode = 0755);
void rmdir(const std::string& path);
void unlink(const std::string& path);
uint64_t size(const File& file);
// What tells a file or directory from all others, also from one that had its inode before it was made.
struct Identity {
  uint64_t device, inode;
  int64_t made_ns;  // 0 where the file system does not keep it
};
Identity identity(const std::string& path);
// Whether anything of that name can be seen, be it a link that leads nowhere.
bool exists(const std::string& path);
// Opens and locks a directory, for one alone or shared. Nothing when others hold it, or when it has lost its name
// meanwhile. For one alone, a link is not followed. Not a call that can be told to fail: locks are no part of what
// has to survive.
std::optional<int> hold_directory(const std::string& path, bool exclusive);
// Makes a directory, and holds it for one alone.
std::optional<int> make_directory(const std::string& path);
// Unlocks before it closes: closing alone would leave the lock to a child forked meanwhile, while that lives.
void release_directory(int fd);

// Transfers: the result of one call, -errno on failure. Short counts are the caller's to continue; segments beyond
// those that the kernel takes in one call are left to such a continuation.
inline constexpr int kMaxSegments = 1024;  // the kernel's UIO_MAXIOV
ssize_t pwritev(const File& file, const iovec* iov, int count, uint64_t offset);
ssize_t preadv(const File& file, const iovec* iov, int count, uint64_t offset);

// For asynchronous transfers the seam is passed in two halves: `intercept` before the submission (a value means
// "pretend the call returned this"), `observe` after the completion.
std::optional<ssize_t> intercept(Call call, uint64_t nbytes);
void observe_write(const File& file, const iovec* iov, int count, uint64_t offset, ssize_t result);

// --- for tests -----------------------------------------------------------------------------------------------

// Makes the `nth` (1-based) call of a kind misbehave; `any` counts calls of all kinds together.
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

}  // namespace holdfast::sys
