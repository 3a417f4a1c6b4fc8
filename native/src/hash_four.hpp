// XXH3-64 of four long blocks in step. Included by hash_lanes.cpp once per instruction set, in a namespace of its
// own, where `Vector` is defined and HOLDFAST_TARGET lets the compiler use the instructions. Therefore no guard.

struct alignas(64) Lane {
  uint64_t sums[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                      kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
};

constexpr size_t kVectors = sizeof(Lane) / sizeof(Vector);

HOLDFAST_TARGET inline void accumulate(Lane& lane, const char* stripe, const uint8_t* secret) {
  auto* sums = reinterpret_cast<Vector*>(lane.sums);
  for (size_t i = 0; i < kVectors; ++i) {
    const Vector data = load(stripe + i * sizeof(Vector));
    const Vector key = exclusive_or(data, load(secret + i * sizeof(Vector)));
    const Vector product = multiply_low_halves(key, shift_right<32>(key));
    sums[i] = add(product, add(sums[i], swap_neighbours(data)));
  }
}

// After each block, so that no input can cancel another.
HOLDFAST_TARGET inline void scramble(Lane& lane) {
  auto* sums = reinterpret_cast<Vector*>(lane.sums);
  const uint8_t* secret = kSecret + kSecretSize - kStripe;
  const Vector prime = everywhere(kPrime32_1);
  for (size_t i = 0; i < kVectors; ++i) {
    const Vector mixed = exclusive_or(sums[i], shift_right<47>(sums[i]));
    const Vector key = exclusive_or(mixed, load(secret + i * sizeof(Vector)));
    const Vector high = multiply_low_halves(shift_right<32>(key), prime);
    sums[i] = add(multiply_low_halves(key, prime), shift_left<32>(high));
  }
}

// The value, from a lane that has taken in the first `done` blocks of 1 KiB.
HOLDFAST_TARGET inline uint64_t finish(Lane& lane, const char* data, size_t nbytes, size_t done) {
  // The last block is never whole here: its last stripe is taken with a secret of its own.
  const size_t blocks = (nbytes - 1) / kBlock;
  for (; done < blocks; ++done) {
    for (size_t s = 0; s < kStripesPerBlock; ++s) {
      accumulate(lane, data + done * kBlock + s * kStripe, kSecret + s * kSecretStep);
    }
    scramble(lane);
  }
  const size_t stripes = (nbytes - 1 - blocks * kBlock) / kStripe;
  for (size_t s = 0; s < stripes; ++s) {
    accumulate(lane, data + blocks * kBlock + s * kStripe, kSecret + s * kSecretStep);
  }
  accumulate(lane, data + nbytes - kStripe, kSecret + kSecretSize - kStripe - kLastStripeShift);
  return merge(lane.sums, nbytes);
}

HOLDFAST_TARGET void hash_four(Hashing* const* group) {
  Lane lanes[kLanes];
  const char* at[kLanes];
  size_t common = SIZE_MAX;
  for (size_t i = 0; i < kLanes; ++i) {
    at[i] = group[i]->data;
    common = least(common, (group[i]->nbytes - 1) / kBlock);
  }
  for (size_t block = 0; block < common; ++block) {
    for (size_t s = 0; s < kStripesPerBlock; ++s) {
      const uint8_t* secret = kSecret + s * kSecretStep;
      for (size_t i = 0; i < kLanes; ++i) accumulate(lanes[i], at[i] + s * kStripe, secret);
    }
    for (size_t i = 0; i < kLanes; ++i) {
      scramble(lanes[i]);
      at[i] += kBlock;
    }
  }
  for (size_t i = 0; i < kLanes; ++i) {
    group[i]->value = finish(lanes[i], group[i]->data, group[i]->nbytes, common);
  }
}
