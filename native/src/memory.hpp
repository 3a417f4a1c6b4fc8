// Memory to load into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace holdfast {

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

// Touches memory that is about to be filled, a little ahead of whoever fills it. The first touch of a page costs
// more than reading it from a fast device, and a direct read would make its submitting thread pay for it alone.
class Populator {
 public:
  struct Range {
    uint64_t position;  // where in the reader's order it comes
    char* data;
    size_t nbytes;
  };
  // Ranges in order of position. `margin`: what the reader is this close to, it will touch itself.
  Populator(std::vector<Range> ranges, uint64_t margin);
  ~Populator();
  Populator(const Populator&) = delete;
  Populator& operator=(const Populator&) = delete;
  void reader_is_at(uint64_t position);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace holdfast
