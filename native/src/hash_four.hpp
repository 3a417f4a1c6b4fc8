// XXH3-64 of four long blocks in step, or of one that is copied on the way. Included by hash_lanes.cpp once per
// instruction set, in a namespace of its own, where `Vector` is defined and EVERYSTEP_TARGET lets the compiler use
// the instructions. Therefore no guard.

constexpr size_t kVectors = kStripe / sizeof(Vector);

struct Lane {
  Vector sums[kVectors];
  EVERYSTEP_TARGET Lane() { std::memcpy(sums, kStart, sizeof sums); }
};

EVERYSTEP_TARGET inline void accumulate(Lane& lane, const char* stripe, const uint8_t* secret,
                                        char* copy = nullptr) {
  Vector* sums = lane.sums;
  for (size_t i = 0; i < kVectors; ++i) {
    Vector data = load(stripe + i * sizeof(Vector));
    if (copy != nullptr) {
      load_once(data);
      store_past_caches(copy + i * sizeof(Vector), data);
    }
    const Vector key = exclusive_or(data, load(secret + i * sizeof(Vector)));
    const Vector product = multiply_low_halves(key, shift_right<32>(key));
    sums[i] = add(product, add(sums[i], swap_neighbours(data)));
  }
}

// After each block, so that no input can cancel another.
EVERYSTEP_TARGET inline void scramble(Lane& lane) {
  Vector* sums = lane.sums;
  const uint8_t* secret = kSecret + kSecretSize - kStripe;
  const Vector prime = everywhere(kPrime32_1);
  for (size_t i = 0; i < kVectors; ++i) {
    const Vector mixed = exclusive_or(sums[i], shift_right<47>(sums[i]));
    const Vector key = exclusive_or(mixed, load(secret + i * sizeof(Vector)));
    const Vector high = multiply_low_halves(shift_right<32>(key), prime);
    sums[i] = add(multiply_low_halves(key, prime), shift_left<32>(high));
  }
}

inline char* after(char* copy, size_t nbytes) { return copy == nullptr ? nullptr : copy + nbytes; }

// The value, from a lane that has taken in the first `done` blocks of 1 KiB.
EVERYSTEP_TARGET inline uint64_t finish(Lane& lane, const char* data, size_t nbytes, size_t done, char* copy) {
  // The last block is never whole here: its last stripe is taken with a secret of its own.
  const size_t blocks = (nbytes - 1) / kBlock;
  for (; done < blocks; ++done) {
    for (size_t s = 0; s < kStripesPerBlock; ++s) {
      const size_t at = done * kBlock + s * kStripe;
      accumulate(lane, data + at, kSecret + s * kSecretStep, after(copy, at));
    }
    scramble(lane);
  }
  const size_t stripes = (nbytes - 1 - blocks * kBlock) / kStripe;
  for (size_t s = 0; s < stripes; ++s) {
    const size_t at = blocks * kBlock + s * kStripe;
    accumulate(lane, data + at, kSecret + s * kSecretStep, after(copy, at));
  }
  const size_t rest = blocks * kBlock + stripes * kStripe;
  // The last stripe overlaps the one before it: it is taken from what was stored, not loaded again.
  if (copy != nullptr) std::memcpy(copy + rest, data + rest, nbytes - rest);
  const char* end = (copy != nullptr ? copy : data) + nbytes;
  accumulate(lane, end - kStripe, kSecret + kSecretSize - kStripe - kLastStripeShift);
  uint64_t sums[std::size(kStart)];
  std::memcpy(sums, lane.sums, sizeof sums);
  return merge(sums, nbytes);
}

EVERYSTEP_TARGET void hash_one(Hashing& block) {
  Lane lane;
  // Stores past the caches want alignment; else the copy is made first, and hashed.
  if (reinterpret_cast<uintptr_t>(block.copy) % sizeof(Vector) == 0) {
    block.value = finish(lane, block.data, block.nbytes, 0, block.copy);
  } else {
    std::memcpy(block.copy, block.data, block.nbytes);
    block.value = finish(lane, block.copy, block.nbytes, 0, nullptr);
  }
}

EVERYSTEP_TARGET void hash_four(Hashing* const* group) {
  Lane lanes[kLanes];
  const char* at[kLanes];
  size_t common = SIZE_MAX;
  for (size_t i = 0; i < kLanes; ++i) {
    at[i] = group[i]->data;
    common = least(common, (group[i]->nbytes - 1) / kBlock);
  }
  for (size_t block = 0; block < common; ++block) {
    for (size_t i = 0; i < kLanes; ++i) {
      for (size_t s = 0; s < kStripesPerBlock; ++s) {
        accumulate(lanes[i], at[i] + s * kStripe, kSecret + s * kSecretStep);
      }
      scramble(lanes[i]);
      at[i] += kBlock;
    }
  }
  for (size_t i = 0; i < kLanes; ++i) {
    group[i]->value = finish(lanes[i], group[i]->data, group[i]->nbytes, common, nullptr);
  }
}
