// In which order an epoch visits its samples: a seeded permutation that is computed, never stored.
#pragma once

#include <array>
#include <cstdint>

namespace outlast {

// A bijection on [0, size), fixed by (size, seed, epoch) alone: the same on every rank, for every
// world size and on every machine. Two epochs, or two seeds, give unrelated orders. Costs a few
// words of memory and O(1) expected time an access, so resuming at any position is free. A value
// type; safe for concurrent use.
//
// Construction: a balanced Feistel network of eight rounds over [0, 4^h), the smallest such domain
// with 4^h >= size and h >= 3, whose round function is SplitMix64's finaliser keyed by a stream
// drawn from (seed, epoch). An output outside [0, size) is fed in again until it falls inside
// ("cycle walking"), which keeps the map a bijection. Since the domain is less than four times
// `size` (for sizes above 16), an access walks fewer than four times on average. Limits: it mixes
// well enough for training and is no cipher; it reaches 2^64 keys an epoch, so not all size!
// orders; one access has no useful worst-case bound, only an expected one. The order is a promise:
// a checkpoint's cursor is worth nothing when a later version computes another one. Sources: Luby
// and Rackoff 1988, "How to construct pseudorandom permutations from pseudorandom functions"; Black
// and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3 (cycle walking); Steele, Lea
// and Flood 2014, "Fast splittable pseudorandom number generators" (SplitMix64), with Stafford's
// constants "Mix13".
class SampleOrder {
 public:
  // A negative `size` counts as 0.
  SampleOrder(int64_t size, uint64_t seed, int64_t epoch);

  int64_t size() const { return static_cast<int64_t>(size_); }

  // The sample that comes at `position`; -1 for a position outside [0, size).
  int64_t IdAt(int64_t position) const;

 private:
  uint64_t Permute(uint64_t value) const;

  uint64_t size_;
  int half_bits_;  // h: the domain has 2 * h bits
  std::array<uint64_t, 8> round_keys_;
};

}  // namespace outlast
