// The device's own limit: what everything is compared with.
#pragma once

#include <cstdint>
#include <string>

#include "memory.hpp"
#include "tuning.hpp"

namespace everystep {

double raw_write(const std::string& path, uint64_t nbytes, const Tuning& tuning, Staging::Pages pages);
double raw_read(const std::string& path, uint64_t nbytes, const Tuning& tuning, Staging::Pages pages);

}  // namespace everystep
