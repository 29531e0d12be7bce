// What this process has in use of a segment.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "outlast/blackbox/segment.h"

namespace outlast {

struct Segment::Claims {
  std::atomic<uint32_t> rings{0};  // a bit a ring; below, a bit a row
  std::array<std::atomic<uint64_t>, kCommRows / 64> comms{};
  std::array<std::atomic<uint64_t>, kPairRows / 64> pairs{};
};

}  // namespace outlast
