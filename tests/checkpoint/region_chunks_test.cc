#include "checkpoint/region_chunks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Four chunks: region 0 in the first two, 1 behind it, 2 (eager) and 3 in the last.
CopyPlan PlanOfFour() {
  CopyPlan plan;
  const auto piece = [](uint32_t region) { return CopyPiece{.region = region, .bytes = 1}; };
  plan.chunks = {{piece(0)}, {piece(0), piece(1)}, {piece(1)}, {piece(2), piece(3)}};
  return plan;
}
const std::vector<bool> kEager = {false, false, true, false};

TEST(RegionChunks, AreThoseThatHoldAByteOfIt) {
  std::array<std::byte, 40> memory{};
  const std::span<const std::byte> all(memory);
  const RegionChunks chunks(
      PlanOfFour(), kEager,
      {all.subspan(30, 10), all.subspan(20, 10), all.subspan(10, 10), all.subspan(0, 10)});
  EXPECT_THAT(chunks.Of(0), ElementsAre(0, 1));
  EXPECT_THAT(chunks.Of(1), ElementsAre(1, 2));
  EXPECT_THAT(chunks.Of(2), IsEmpty());
  EXPECT_THAT(chunks.Of(3), ElementsAre(3));
}

TEST(RegionChunks, OfMemoryThatRegionsShareAreThoseOfAllOfThem) {
  std::array<std::byte, 40> memory{};
  const std::span<const std::byte> all(memory);
  // 1 lies inside 0, 2 over the end of 0; an eager one may share memory with one that is not.
  const RegionChunks chunks(
      PlanOfFour(), kEager,
      {all.subspan(0, 20), all.subspan(5, 5), all.subspan(19, 2), all.subspan(21, 10)});
  for (const uint32_t region : {0, 1, 2}) EXPECT_THAT(chunks.Of(region), ElementsAre(0, 1, 2));
  EXPECT_THAT(chunks.Of(3), ElementsAre(3));
}

TEST(RegionChunks, KnowTheirMemories) {
  std::array<std::byte, 40> memory{};
  const std::span<const std::byte> all(memory);
  RegionChunks::Memories memories(4, all.first(10));
  const RegionChunks chunks(PlanOfFour(), kEager, memories);
  EXPECT_TRUE(chunks.IsOf(memories));
  memories[2] = all.first(9);
  EXPECT_FALSE(chunks.IsOf(memories));
  memories[2] = all.subspan(1, 10);
  EXPECT_FALSE(chunks.IsOf(memories));
}

}  // namespace
}  // namespace outlast
