// Moves the elements of a strided region into packed memory, and back.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "checkpoint/plan.h"
#include "outlast/checkpoint/dtype.h"

namespace outlast {

// One box of a strided region. Both directions may start anywhere, so that chunks can be moved
// apart and by many threads; a call costs one division a dimension, and then a step a run.
class Packer {
 public:
  // `box` lies in `held`, the region's own; `strides` in elements; whole-byte types only.
  Packer(DType dtype, const Box& held, const Shape& strides, const Box& box);

  // Fills `to` with the packed box's bytes from `at` on. `region` is the region's first byte.
  void Gather(const std::byte* region, uint64_t at, std::span<std::byte> to) const;
  // Puts `from`, the packed box's bytes from `at` on, where they belong.
  void Scatter(std::span<const std::byte> from, uint64_t at, std::byte* region) const;

 private:
  template <uint64_t kRun, typename Move>
  void Walk(uint64_t at, uint64_t bytes, Move move) const;
  template <typename Move>
  void WalkAny(uint64_t at, uint64_t bytes, Move move) const;

  int dimensions_ = 0;
  std::array<uint64_t, kMaxDimensions> count_{}, stride_{};  // of runs; bytes
  uint64_t first_ = 0;                                       // bytes from the region's start
  uint64_t run_ = 0;                                         // bytes that are contiguous
};

}  // namespace outlast
