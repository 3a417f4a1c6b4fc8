// Memory to stage in, and to load into.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

namespace everystep {

// Of this system: 4 KiB and 2 MiB on x86-64; on arm64 also 16 KiB and 32 MiB, or 64 KiB and 512 MiB.
size_t page_nbytes();
size_t huge_page_nbytes();

// Aligned memory, left out of forked children so that a fork during direct I/O copies nothing of it.
class Staging {
 public:
  // Huge pages make transfers cheaper but are zeroed whole at the first touch: not for memory of which little is
  // used.
  enum class Pages { normal, huge };
  explicit Staging(size_t nbytes, Pages pages = Pages::normal);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  [[nodiscard]] char* data() const { return data_; }
  [[nodiscard]] size_t nbytes() const { return nbytes_; }
  // False in a forked child.
  [[nodiscard]] bool ours() const;
  // So many bytes, from the first on, are known to have their pages.
  std::atomic<size_t> touched{0};

 private:
  void* mapped_;
  size_t mapped_nbytes_;
  char* data_;
  size_t nbytes_;
  const uint64_t owner_;
};

// Staging for the windows of a job, given out round and round. The process keeps one in huge pages, because
// getting new ones takes as long as a small save.
class Windows {
 public:
  Windows(size_t count, size_t nbytes, Staging::Pages pages = Staging::Pages::huge);
  ~Windows();
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;
  // Gets the pages of all of it, on a thread of its own. Until that is done windows are smaller, and reuse what is
  // there: where the host of a virtual machine takes back free memory, a huge page costs milliseconds, and the
  // first job of a process would wait for each of them.
  void touch_ahead();
  // How large the next window should be.
  [[nodiscard]] size_t window() const;
  // Memory for it; nullptr as long as others have it.
  [[nodiscard]] char* next(size_t nbytes);
  // Frees the window that was given out first.
  void give_back() { given_.pop_front(); }

 private:
  [[nodiscard]] size_t touched_nbytes() const;

  const size_t count_, window_;
  const Staging::Pages pages_;
  std::unique_ptr<Staging> staging_;
  struct Given {
    size_t low, high;
  };
  std::deque<Given> given_;
  size_t place_ = 0;
  std::atomic<bool> stop_{false};
  std::thread toucher_;
};

// Finds out in what pages memory lies. What lies in small ones is scattered all over: a device moves it at half
// its speed, and the kernel needs about as long to hand it over as a copy takes. (Where huge pages are switched
// off, the copy would lie in small ones too, and is not worth making.)
class PageSizes {
 public:
  // `unknown`: it has no pages yet, is too short for huge ones, or the kernel does not tell (before Linux 6.7).
  enum class Kind { unknown, small, huge };
  PageSizes();
  ~PageSizes();
  PageSizes(const PageSizes&) = delete;
  PageSizes& operator=(const PageSizes&) = delete;
  // What most of it lies in.
  [[nodiscard]] Kind of(uintptr_t address, size_t nbytes) const;
  // Whether this machine gives huge pages to those who ask.
  [[nodiscard]] static bool can_be_huge();

 private:
  int pagemap_;
};

// Fresh anonymous memory, page-aligned, in huge pages where these come cheaply.
class FreshMemory {
 public:
  explicit FreshMemory(size_t nbytes);
  ~FreshMemory();
  FreshMemory(const FreshMemory&) = delete;
  FreshMemory& operator=(const FreshMemory&) = delete;
  [[nodiscard]] char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_;
  size_t nbytes_;
};

// Touches memory that is about to be filled, a little ahead of the job that fills it. The first touch of a page
// costs more than reading it from a fast device, and a direct read would make its submitting thread pay for it
// alone.
class Populator {
 public:
  struct Range {
    uint64_t position;  // where in the reader's order it comes
    char* data;
    size_t nbytes;
  };
  // Ranges in order of position. Skips what the reader reaches within `margin` bytes.
  Populator(std::vector<Range> ranges, uint64_t margin);
  ~Populator();
  Populator(const Populator&) = delete;
  Populator& operator=(const Populator&) = delete;
  void reader_is_at(uint64_t position);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace everystep
