// Copies between a strided array and the matching range of its C-order bytes.
#pragma once

#include <cstdint>
#include <vector>

namespace everystep {

class Strided {
 public:
  // Strides are in bytes, may be zero (expanded) or negative. Throws std::invalid_argument on a bad description.
  Strided(uintptr_t address, int64_t itemsize, std::vector<int64_t> shape, std::vector<int64_t> strides);

  void gather(uint64_t offset, uint64_t nbytes, char* out) const;
  void scatter(uint64_t offset, uint64_t nbytes, const char* in) const;

 private:
  template <typename Copy>
  void walk(uint64_t offset, uint64_t nbytes, Copy copy) const;

  char* base_;
  uint64_t run_;  // bytes that are contiguous at every outer index
  std::vector<int64_t> shape_, strides_;
};

}  // namespace everystep
