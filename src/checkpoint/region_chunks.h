// Which chunks of a snapshot are copied from a region's memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/copy_plan.h"

namespace outlast {

class RegionChunks {
 public:
  using Memories = std::vector<std::span<const std::byte>>;  // by region

  // Regions of `eager` (by region) are not copied by chunks.
  RegionChunks(const CopyPlan& plan, const std::vector<bool>& eager, Memories memories);

  // In ascending order: those of the region and of all whose memory overlaps with it, directly or
  // by way of others.
  std::span<const uint32_t> Of(uint32_t region) const { return chunks_[group_[region]]; }

  // Once a snapshot.
  bool IsOf(const Memories& memories) const;

 private:
  Memories memories_;
  std::vector<uint32_t> group_;                // by region
  std::vector<std::vector<uint32_t>> chunks_;  // by group
};

}  // namespace outlast
