// How many snapshots a node's memory holds of each of its ranks. Pure.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace outlast {

// What a node's ranks need, all together, in bytes.
struct BufferRoom {
  uint64_t buffers = 0;  // one snapshot buffer of each
  uint64_t state = 0;    // what the trainers hold themselves
  uint64_t memory = 0;   // of the machine, or what its control group allows; 0: not known
};

// `wanted` 2 or 3; 0: three where they fit in half of the memory, else two. kResourceExhausted,
// with all sizes: the memory is too small for that many and the state. Buffers are touched as they
// are made, so whoever made them all the same would be killed without a word.
absl::StatusOr<int> BufferCountFor(int wanted, const BufferRoom& room);

}  // namespace outlast
