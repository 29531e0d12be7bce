#include "checkpoint/region_chunks.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace outlast {

RegionChunks::RegionChunks(const CopyPlan& plan, const std::vector<bool>& eager, Memories memories)
    : memories_(std::move(memories)), group_(memories_.size()) {
  std::vector<uint32_t> by_address(memories_.size());
  std::iota(by_address.begin(), by_address.end(), 0);
  std::ranges::sort(by_address, std::less<>(),
                    [&](uint32_t region) { return memories_[region].data(); });
  const std::byte* end = nullptr;  // of the group
  for (const uint32_t region : by_address) {
    const std::span<const std::byte> memory = memories_[region];
    if (chunks_.empty() || !std::less<>()(memory.data(), end)) chunks_.emplace_back();
    group_[region] = static_cast<uint32_t>(chunks_.size() - 1);
    end = std::max(end, memory.data() + memory.size(), std::less<>());
  }
  for (uint32_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    for (const CopyPiece& piece : plan.chunks[chunk]) {
      if (eager[piece.region]) continue;
      std::vector<uint32_t>& of_group = chunks_[group_[piece.region]];
      if (of_group.empty() || of_group.back() != chunk) of_group.push_back(chunk);
    }
  }
}

bool RegionChunks::IsOf(const Memories& memories) const {
  return std::ranges::equal(memories_, memories, [](const auto& a, const auto& b) {
    return a.data() == b.data() && a.size() == b.size();
  });
}

}  // namespace outlast
