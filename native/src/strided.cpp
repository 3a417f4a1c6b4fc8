#include "strided.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace everystep {

Strided::Strided(uintptr_t address, int64_t itemsize, std::vector<int64_t> shape, std::vector<int64_t> strides)
    : base_(reinterpret_cast<char*>(address)),
      run_(static_cast<uint64_t>(itemsize)),
      shape_(std::move(shape)),
      strides_(std::move(strides)) {
  if (itemsize <= 0 || shape_.size() != strides_.size()) throw std::invalid_argument("bad strided description");
  // Fold the dimensions that are contiguous at the inner end into the run.
  while (!shape_.empty() && (shape_.back() == 1 || strides_.back() == static_cast<int64_t>(run_))) {
    run_ *= static_cast<uint64_t>(shape_.back());
    shape_.pop_back();
    strides_.pop_back();
  }
}

// Calls copy(memory, position in the range, count) for every contiguous bit of the range, in order.
template <typename Copy>
void Strided::walk(uint64_t offset, uint64_t nbytes, Copy copy) const {
  if (nbytes == 0) return;
  const size_t dims = shape_.size();
  std::vector<int64_t> index(dims);
  uint64_t number = offset / run_;
  char* at = base_;
  for (size_t d = dims; d-- > 0;) {
    index[d] = static_cast<int64_t>(number % static_cast<uint64_t>(shape_[d]));
    number /= static_cast<uint64_t>(shape_[d]);
    at += index[d] * strides_[d];
  }
  uint64_t skip = offset % run_;
  for (uint64_t position = 0; position < nbytes;) {
    if (dims > 0 && skip == 0) {
      // The innermost dimension, many times per call: the common case is one element per step.
      const auto left = static_cast<uint64_t>(shape_[dims - 1] - index[dims - 1]);
      const uint64_t whole = std::min(left, (nbytes - position) / run_);
      const int64_t stride = strides_[dims - 1];
      for (uint64_t i = 0; i < whole; ++i, at += stride, position += run_) copy(at, position, run_);
      index[dims - 1] += static_cast<int64_t>(whole);
    }
    if (position < nbytes && (dims == 0 || index[dims - 1] < shape_[dims - 1])) {
      const uint64_t count = std::min(run_ - skip, nbytes - position);
      copy(at + skip, position, count);
      position += count;
      skip += count;
      if (skip < run_) return;
      skip = 0;
      if (dims > 0) {
        at += strides_[dims - 1];
        ++index[dims - 1];
      }
    }
    for (size_t d = dims; d-- > 0 && index[d] == shape_[d];) {
      at -= index[d] * strides_[d];
      index[d] = 0;
      if (d > 0) {
        at += strides_[d - 1];
        ++index[d - 1];
      }
    }
  }
}

namespace {
// memcpy of a size the compiler knows is a single move; of one it does not, a call.
template <typename Move>
auto by_size(Move move) {
  return [move](auto* memory, auto* bytes, uint64_t count) {
    switch (count) {
      case 1:
        return move(memory, bytes, 1);
      case 2:
        return move(memory, bytes, 2);
      case 4:
        return move(memory, bytes, 4);
      case 8:
        return move(memory, bytes, 8);
      case 16:
        return move(memory, bytes, 16);
      default:
        return move(memory, bytes, count);
    }
  };
}
}  // namespace

void Strided::gather(uint64_t offset, uint64_t nbytes, char* out) const {
  const auto move = by_size([](const char* memory, char* bytes, uint64_t n) { std::memcpy(bytes, memory, n); });
  walk(offset, nbytes,
       [&](char* memory, uint64_t position, uint64_t count) { move(memory, out + position, count); });
}

void Strided::scatter(uint64_t offset, uint64_t nbytes, const char* in) const {
  const auto move = by_size([](char* memory, const char* bytes, uint64_t n) { std::memcpy(memory, bytes, n); });
  walk(offset, nbytes,
       [&](char* memory, uint64_t position, uint64_t count) { move(memory, in + position, count); });
}

}  // namespace everystep
