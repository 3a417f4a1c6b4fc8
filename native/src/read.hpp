// Reading pieces of one file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "control.hpp"
#include "plan.hpp"
#include "tuning.hpp"

namespace everystep {

struct Damage {
  size_t piece;
  uint64_t chunk;
};
struct Read {
  std::vector<Damage> damage;  // chunks whose bytes do not match, at most kMaxDamage
  Stats stats;
};
inline constexpr size_t kMaxDamage = 4096;
// Reads the pieces of `plan`. `expected`: checksums as `write_file` returned them, empty for no verification.
Read read_file(const std::string& path, const Plan& plan, const std::vector<uint64_t>& expected,
               const Tuning& tuning, Control& control);

}  // namespace everystep
