// Pieces as Python describes them, and hashes as the text of checksums.
#pragma once

#include <vector>

#include "bind.hpp"
#include "plan.hpp"

namespace everystep {

// Pieces of one file, added in the order of their offsets. Each job makes a plan of its own from them.
class Pieces {
 public:
  void add(Piece piece);
  void add_strided(Piece piece, Strided strided);
  void add_callback(Piece piece, nb::object function);
  // The checksums of all pieces but padding, in order, for a read.
  void expect(nb::list checksums) { checksums_ = std::move(checksums); }

  [[nodiscard]] size_t size() const { return pieces_.size(); }
  [[nodiscard]] uint64_t nbytes() const;
  // With padding for all that lies between the pieces, from `start` to `stop`; and for each piece of the result,
  // its number here. Padding has numbers beyond these.
  [[nodiscard]] std::pair<Pieces, std::vector<size_t>> padded(uint64_t start, uint64_t stop) const;
  // Callbacks fill windows when writing, and take them when reading.
  [[nodiscard]] Plan plan(bool writing) const;
  // Per piece but padding, per chunk, in order.
  [[nodiscard]] std::vector<uint64_t> expected(uint64_t chunk) const;

  // For the garbage collector.
  std::vector<nb::object>& functions() { return functions_; }

 private:
  std::vector<Piece> pieces_;
  std::vector<Strided> strided_;
  std::vector<nb::object> functions_;
  nb::list checksums_;
};

// One string per piece from the `first` on: its chunks' checksums, 16 digits each.
nb::list checksum_texts(const Plan& plan, size_t first, const uint64_t* hashes, uint64_t chunk);

}  // namespace everystep
