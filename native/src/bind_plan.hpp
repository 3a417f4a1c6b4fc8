// From Python's columns of pieces to a plan, and from hashes to the text of checksums.
#pragma once

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind.hpp"
#include "transfer.hpp"

namespace everystep {

using Numbers = std::vector<uint64_t>;
using StridedTuple = std::tuple<uintptr_t, int64_t, std::vector<int64_t>, std::vector<int64_t>>;

Plan make_plan(const Numbers& offsets, const Numbers& nbytes, const std::vector<uint8_t>& places,
               const Numbers& addresses, const std::vector<StridedTuple>& strided, nb::list callbacks,
               bool writing);

// One string per piece from the `first` on: its chunks' checksums, 16 digits each.
nb::list checksum_texts(const Plan& plan, size_t first, const uint64_t* hashes, uint64_t chunk);

}  // namespace everystep
