// What a directory's filesystem can do, found out by trying.
#pragma once

#include <cstdint>
#include <string>

namespace everystep {

struct Probe {
  bool direct = false;            // a real direct write succeeded
  uint64_t memory_alignment = 0;  // as the kernel reports them, 0 when it does not
  uint64_t offset_alignment = 0;
  std::string reason;  // why not direct
};

Probe probe_directory(const std::string& path);

}  // namespace everystep
