#include "shelf_file.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "forks.hpp"
#include "hash.hpp"
#include "memory.hpp"
#include "persist.hpp"

namespace everystep {
namespace {

// Locks lie where no byte of a shelf is: the file ends long before.
constexpr int64_t kWriterByte = int64_t{1} << 62;
constexpr int64_t kReaderBytes = kWriterByte + 1;
constexpr int64_t kGenerations = int64_t{1} << 60;
constexpr size_t kMostPinned = 256;
constexpr uint64_t kZeroedAtOnce = 1 << 20;

struct flock lock_of(short type, int64_t start, int64_t length) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = start;
  lock.l_len = length;
  return lock;
}

bool is_memory(const sys::File& file) {
  struct statfs info{};
  if (::fstatfs(file.fd(), &info) != 0) throw sys::Error{errno, sys::Call::open, file.path()};
  return info.f_type == TMPFS_MAGIC || info.f_type == RAMFS_MAGIC;
}

// Only a file system that keeps no page cache for the file takes such a mapping.
bool is_persistent(const sys::File& file) {
  try {
    ::munmap(sys::map(file, 0, 4096, PROT_READ, MAP_SHARED_VALIDATE | MAP_SYNC), 4096);
    return true;
  } catch (const sys::Error&) {
    return false;
  }
}

}  // namespace

Mapping::Mapping(const sys::File& file, uint64_t begin, uint64_t end, Use use)
    : begin_(begin / page_nbytes() * page_nbytes()), end_(end) {
  const int protection = PROT_READ | (use == Use::read ? 0 : PROT_WRITE);
  const int flags = use == Use::own          ? MAP_PRIVATE
                    : use == Use::write_sync ? MAP_SHARED_VALIDATE | MAP_SYNC
                                             : MAP_SHARED;
  data_ = static_cast<char*>(sys::map(file, begin_, end_ - begin_, protection, flags));
}

Mapping::~Mapping() { ::munmap(data_, end_ - begin_); }

ShelfFile::ShelfFile(const std::string& path, bool writable, std::optional<Medium> forced)
    : file_(sys::open(path, (writable ? O_RDWR : O_RDONLY) | O_NONBLOCK | O_NOCTTY)),
      writable_(writable),
      forks_(forks()) {
  struct stat info{};
  if (::fstat(file_.fd(), &info) != 0) throw sys::Error{errno, sys::Call::open, path};
  if (!S_ISREG(info.st_mode)) throw sys::Error{S_ISDIR(info.st_mode) ? EISDIR : ESPIPE, sys::Call::open, path};
  if (forced) {
    medium_ = *forced;
  } else if (is_memory(file_)) {
    medium_ = Medium::memory;
  } else if (is_persistent(file_)) {
    medium_ = Medium::persistent;
  }
}

std::shared_ptr<const Mapping> ShelfFile::mapped(uint64_t end) {
  const std::lock_guard lock(mutex_);
  if (!read_ || read_->end() < end) read_ = std::make_shared<Mapping>(file_, 0, nbytes(), Mapping::Use::read);
  return read_;
}

const Mapping& ShelfFile::stores(uint64_t end) {
  if (!write_ || write_->end() < end) {
    // A copy of a shelf may have holes where there were zeros: a store to one, when there is no space, is a
    // SIGBUS.
    if (!write_) sys::fallocate(file_, nbytes());
    // A medium that was forced, by a test, has no MAP_SYNC.
    const bool sync = medium_ == Medium::persistent && is_persistent(file_);
    write_ = std::make_shared<Mapping>(file_, 0, nbytes(), sync ? Mapping::Use::write_sync : Mapping::Use::write);
  }
  return *write_;
}

void ShelfFile::grow(uint64_t nbytes, uint64_t wanted) {
  const uint64_t before = this->nbytes();
  // Space is reserved before anything is stored: a store through a mapping that finds the disk full is a SIGBUS.
  try {
    sys::fallocate(file_, wanted);
  } catch (const sys::Error& error) {
    if (error.code != ENOSPC || wanted <= nbytes) throw;
    sys::fallocate(file_, nbytes);
    wanted = nbytes;
  }
  if (medium_ == Medium::page_cache && wanted - before <= kZeroedAtOnce) {
    // Blocks that were written once are overwritten without a change to the file's extents, which a sync would
    // have to write to the journal.
    const std::vector<char> zeros(wanted - before);
    store(before, zeros.data(), zeros.size());
  }
}

uint64_t ShelfFile::store(uint64_t offset, const void* data, uint64_t nbytes) {
  if (nbytes == 0) return xxh3(data, 0);
  if (medium_ != Medium::page_cache) {
    char* const to = stores(offset + nbytes).at(offset);
    sys::fail_store(file_);
    std::memcpy(to, data, nbytes);
    sys::observe_store(file_, data, nbytes, offset);
    if (medium_ == Medium::persistent) {
      write_back(to, nbytes);
      sys::observe_write_back(file_, nbytes, offset);
    }
    return xxh3(to, nbytes);
  }
  const iovec part{const_cast<void*>(data), nbytes};
  sys::write_all(file_, {&part, 1}, offset);
  // Of what the file holds now: another thread may have changed the bytes that were given, meanwhile.
  return xxh3(mapped(offset + nbytes)->at(offset), nbytes);
}

void ShelfFile::order() {
  switch (medium_) {
    case Medium::page_cache:
      sys::sync(file_);
      break;
    case Medium::persistent:
      sys::fence(file_);
      break;
    case Medium::memory:
      // Readers in other processes must see the stores in this order, too.
      sys::fence(file_);
      break;
  }
}

bool ShelfFile::lock_writer() {
  struct flock lock = lock_of(F_WRLCK, kWriterByte, 1);
  if (::fcntl(file_.fd(), F_OFD_SETLK, &lock) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  throw sys::Error{errno, sys::Call::open, file_.path()};
}

void ShelfFile::unlock_writer() {
  if (!file_.is_open() || forks_ != forks()) return;
  struct flock lock = lock_of(F_UNLCK, kWriterByte, 1);
  ::fcntl(file_.fd(), F_OFD_SETLK, &lock);
}

bool ShelfFile::has_writer() const {
  struct flock lock = lock_of(F_WRLCK, kWriterByte, 1);
  return ::fcntl(file_.fd(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

void ShelfFile::lock_generation(uint64_t generation) {
  const std::lock_guard guard(mutex_);
  uint64_t& count = locked_[generation];
  if (count == 0) {
    struct flock lock = lock_of(F_RDLCK, kReaderBytes + static_cast<int64_t>(generation), 1);
    if (::fcntl(file_.fd(), F_OFD_SETLK, &lock) != 0) {
      locked_.erase(generation);
      throw sys::Error{errno, sys::Call::open, file_.path()};
    }
  }
  ++count;
}

void ShelfFile::unlock_generation(uint64_t generation) {
  if (!file_.is_open() || forks_ != forks()) return;
  const std::lock_guard guard(mutex_);
  const auto found = locked_.find(generation);
  if (--found->second != 0) return;
  locked_.erase(found);
  struct flock lock = lock_of(F_UNLCK, kReaderBytes + static_cast<int64_t>(generation), 1);
  ::fcntl(file_.fd(), F_OFD_SETLK, &lock);
}

std::optional<std::vector<Pinned>> ShelfFile::pinned() const {
  std::vector<Pinned> found;
  std::vector<std::pair<int64_t, int64_t>> open{{0, kGenerations}};  // [first, behind the last)
  while (!open.empty()) {
    const auto [first, last] = open.back();
    open.pop_back();
    if (first >= last) continue;
    struct flock lock = lock_of(F_WRLCK, kReaderBytes + first, last - first);
    if (::fcntl(file_.fd(), F_OFD_GETLK, &lock) != 0) throw sys::Error{errno, sys::Call::open, file_.path()};
    if (lock.l_type == F_UNLCK) continue;
    const int64_t begin = std::max(lock.l_start - kReaderBytes, first);
    const int64_t end = lock.l_len == 0 ? last : std::min(lock.l_start + lock.l_len - kReaderBytes, last);
    found.emplace_back(static_cast<uint64_t>(begin), static_cast<uint64_t>(end - 1));
    if (found.size() > kMostPinned) return std::nullopt;
    open.emplace_back(first, begin);
    open.emplace_back(end, last);
  }
  return found;
}

void ShelfFile::abandon() { file_.close(); }

}  // namespace everystep
