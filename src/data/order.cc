#include "outlast/data/order.h"

#include "base/split_mix.h"

namespace outlast {
namespace {

// At least 3: halves of one or two bits give a network too few distinct permutations.
int HalfBits(uint64_t size) {
  int half_bits = 3;
  while (half_bits < 32 && size > (uint64_t{1} << (2 * half_bits))) ++half_bits;
  return half_bits;
}

}  // namespace

SampleOrder::SampleOrder(int64_t size, uint64_t seed, int64_t epoch)
    : size_(size > 0 ? static_cast<uint64_t>(size) : 0), half_bits_(HalfBits(size_)) {
  // Mixed twice, so that (seed, epoch + 1) and (seed + 1, epoch) have nothing in common.
  uint64_t state = Mix(Mix(seed + kGoldenGamma) + static_cast<uint64_t>(epoch));
  for (uint64_t& key : round_keys_) {
    state += kGoldenGamma;
    key = Mix(state);
  }
}

uint64_t SampleOrder::Permute(uint64_t value) const {
  uint64_t left = value >> half_bits_;
  uint64_t right = value & ((uint64_t{1} << half_bits_) - 1);
  for (const uint64_t key : round_keys_) {
    const uint64_t mixed = Mix(right ^ key) >> (64 - half_bits_);
    const uint64_t swapped = left ^ mixed;
    left = right;
    right = swapped;
  }
  return left << half_bits_ | right;
}

int64_t SampleOrder::IdAt(int64_t position) const {
  if (position < 0 || position >= size()) return -1;
  auto id = static_cast<uint64_t>(position);
  do {
    id = Permute(id);
  } while (id >= size_);
  return static_cast<int64_t>(id);
}

}  // namespace outlast
