#include "checkpoint/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "outlast/base/id.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TensorRow Replicated(std::string name, const Shape& shape, DType dtype = DType::kF32) {
  return {std::move(name), dtype, shape, {}};
}

std::vector<std::string> WritersOf(const Plan& plan) {
  std::vector<std::string> writers;
  for (const PlannedPiece& piece : plan.pieces) {
    writers.push_back(plan.table.rows[piece.row].name + ":" + std::to_string(piece.writer) +
                      piece.box.offset.text() + piece.box.extent.text());
  }
  return writers;
}

TEST(Plan, GivesReplicatedTensorsToTheLeastLoadedAndTiesToTheLowerRank) {
  // 16 equal small tensors and a world of 2: none is above an eighth of the mean load of 8.
  TensorTable table{2, {}};
  for (int i = 0; i < 16; ++i) table.rows.push_back(Replicated("t" + std::to_string(i + 10), {1}));
  const Plan plan = MakePlan(table).value();
  EXPECT_THAT(plan.load, ElementsAre(32, 32));
  EXPECT_EQ(plan.pieces[0].writer, 0u);
  EXPECT_EQ(plan.pieces[1].writer, 1u);
  EXPECT_EQ(plan.pieces[2].writer, 0u);
}

TEST(Plan, CutsALargeTensorAtWholeSlicesOfItsFirstLongEnoughDimension) {
  // One tensor is the whole load: a piece a rank. 10 rows over 4 ranks; [2, 9] has no 4 rows, so
  // its 9 columns are cut.
  EXPECT_THAT(
      WritersOf(MakePlan({4, {Replicated("w", {10, 3})}}).value()),
      ElementsAre("w:0[0, 0][3, 3]", "w:1[3, 0][2, 3]", "w:2[5, 0][3, 3]", "w:3[8, 0][2, 3]"));
  const Plan columns = MakePlan({4, {Replicated("w", {2, 9})}}).value();
  ASSERT_EQ(columns.pieces.size(), 4u);
  for (const PlannedPiece& piece : columns.pieces) EXPECT_EQ(piece.box.extent[0], 2);
  EXPECT_THAT(columns.load, ElementsAre(16, 24, 16, 16));
}

TEST(Plan, LevelsReplicatedBytesAgainstShardedOnes) {
  // Rank 0 keeps 800 bytes of its own, ranks 1 and 2 hold nothing of it: 1000 replicated bytes go
  // to level at 600 each.
  TensorTable table{3, {Replicated("w", {1000}, DType::kU8)}};
  table.rows.push_back({"s", DType::kU8, {800}, {{0, {{0}, {800}}}}});
  const Plan plan = MakePlan(table).value();
  EXPECT_THAT(plan.load, ElementsAre(800, 500, 500));
}

TEST(Plan, WritesEveryByteOnceAndLevelsTheLoad) {
  const uint64_t seed = RandomU64();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 50; ++round) {
    const auto world = static_cast<uint32_t>(1 + random() % 9);
    TensorTable table{world, {}};
    uint64_t total = 0;
    for (int i = 0; i < 40; ++i) {
      const Shape shape{static_cast<int64_t>(random() % 200),
                        static_cast<int64_t>(1 + random() % 50)};
      table.rows.push_back(Replicated("t" + std::to_string(i), shape));
      total += BytesOf(DType::kF32, shape).value();
    }
    const Plan plan = MakePlan(table).value();
    uint64_t planned = 0;
    for (const PlannedPiece& piece : plan.pieces) planned += piece.bytes;
    EXPECT_EQ(planned, total);
    const auto [least, most] = std::ranges::minmax(plan.load);
    EXPECT_LE(most - least, total / world / 8 + 200 * 4)
        << "world " << world;  // an eighth of the mean, and a slice
    for (uint32_t rank = 0; rank < world; ++rank) {
      const Assignment assignment = AssignmentOf(plan, rank).value();
      EXPECT_EQ(assignment.data_bytes, plan.load[rank]);
      EXPECT_EQ(assignment.data_bytes + assignment.replicated_bytes, total);
      std::map<std::string, int> keys;
      for (const PlannedItem& item : assignment.image)
        EXPECT_EQ(++keys[item.box.name], 1) << "two boxes of one tensor in one file";
    }
  }
}

TEST(Plan, IsTheSameFromAnyOrderOfTheTable) {
  TensorTable table{3, {}};
  for (int i = 0; i < 30; ++i)
    table.rows.push_back(Replicated("t" + std::to_string(i), {i % 7 + 1, 5}));
  const Plan plan = MakePlan(table).value();
  std::ranges::reverse(table.rows);
  const Plan again = MakePlan(table).value();
  EXPECT_EQ(plan.digest, again.digest);
  EXPECT_EQ(AssignmentOf(plan, 1)->layout_hash, AssignmentOf(again, 1)->layout_hash);
  EXPECT_NE(AssignmentOf(plan, 1)->layout_hash, AssignmentOf(plan, 2)->layout_hash);

  table.rows[3].dtype = DType::kI32;
  const Plan other = MakePlan(table).value();
  EXPECT_NE(plan.digest, other.digest);
  EXPECT_THAT(FirstDifference(plan, other), HasSubstr("tensor '" + table.rows[3].name + "' F32"));
}

TEST(Plan, KeepsEmptyAndUnevenShards) {
  // 6 rows over 4 ranks by 2: the last rank's shard is empty, and stays an entry without bytes.
  TensorTable table{4, {}};
  table.rows.push_back({"w",
                        DType::kF32,
                        {6, 2},
                        {{0, {{0, 0}, {2, 2}}},
                         {1, {{2, 0}, {2, 2}}},
                         {2, {{4, 0}, {2, 2}}},
                         {3, {{6, 0}, {0, 2}}}}});
  table.rows.push_back(Replicated("empty", {3, 0, 2}));
  table.rows.push_back(Replicated("scalar", {}));
  const Plan plan = MakePlan(table).value();
  const Assignment last = AssignmentOf(plan, 3).value();
  ASSERT_FALSE(last.image.empty());
  EXPECT_TRUE(std::ranges::any_of(last.image, [](const auto& item) {
    return item.box.extent == Shape({0, 2});
  }));
  int empties = 0;
  for (const PlannedPiece& piece : plan.pieces)
    empties += plan.table.rows[piece.row].name == "empty" ? 1 : 0;
  EXPECT_EQ(empties, 1);
}

TEST(Plan, RefusesTwoOwnersOfOneBoxAndHoles) {
  const auto why = [](std::vector<HeldBox> boxes) {
    return std::string(
        MessageOf(MakePlan({2, {{"w", DType::kF32, {4}, std::move(boxes)}}}).status()));
  };
  EXPECT_EQ(why({{0, {{0}, {2}}}, {1, {{2}, {2}}}}), "");
  EXPECT_EQ(why({{0, {{0}, {4}}}, {1, {{0}, {4}}}}), "");  // the same box: replicas
  EXPECT_THAT(why({{0, {{0}, {3}}}, {1, {{2}, {2}}}}),
              HasSubstr("rank 0 (offset [0] extent [3]) and rank 1"));
  EXPECT_THAT(why({{0, {{0}, {1}}}, {1, {{2}, {2}}}}), HasSubstr("cover 12 of 16 bytes"));
  EXPECT_THAT(why({{0, {{0}, {5}}}}), HasSubstr("leaves the tensor"));
  EXPECT_THAT(why({{2, {{0}, {4}}}}), HasSubstr("the world is 2"));
  EXPECT_FALSE(MakePlan({0, {}}).ok());
  EXPECT_FALSE(MakePlan({1, {Replicated("w", {1}), Replicated("w", {1})}}).ok());
}

TEST(Plan, NamesBothRanksOfOneNameWithTwoShapes) {
  RankTable a{{{"w", DType::kF32, {4}, {{0, {{0}, {4}}}}}}, {}};
  RankTable b{{{"w", DType::kF32, {5}, {{1, {{0}, {5}}}}}}, {}};
  const std::vector<RankTable> ranks = {a, b};
  EXPECT_THAT(std::string(MessageOf(MergeTables(ranks).status())),
              HasSubstr("rank 0 has F32 [4], rank 1 has F32 [5]"));
}

TEST(Plan, StoresViewsOfOneStorageOnce) {
  std::vector<std::byte> memory(16);
  const StateView state{
      {{"wte", DType::kF32, {4}, {}, {4}, memory}, {"head", DType::kF32, {4}, {}, {4}, memory}},
      {}};
  const RankTable table = TableOfRank(state, 0).value();
  EXPECT_EQ(table.rows.size(), 1u);
  EXPECT_THAT(table.aliases, ElementsAre(std::pair<std::string, std::string>("wte", "head")));
}

// A mesh of 3 data-parallel replicas by 2 tensor-parallel slices: rank = 2 * replica + slice. Each
// slice has its own replica set, and is written once, by all three of them together.
TEST(Plan, WritesASliceOfAMeshOnceOverItsReplicas) {
  std::vector<RankTable> ranks;
  for (uint32_t rank = 0; rank < 6; ++rank) {
    const int64_t begin = rank % 2 == 0 ? 0 : 5;
    ranks.push_back({{{"w", DType::kU8, {8, 10}, {{rank, {{0, begin}, {8, 5}}}}},
                      {"norm", DType::kU8, {6}, {{rank, {{0}, {6}}}}},
                      {"stage", DType::kU8, {4}, {{rank, {{0}, {4}}}}}},
                     {}});
    if (rank >= 3) ranks.back().rows.pop_back();  // held by half of the world
  }
  const TensorTable table = MergeTables(ranks).value();
  const Plan plan = MakePlan(table).value();
  std::map<std::string, uint64_t> bytes;
  for (const PlannedPiece& piece : plan.pieces) {
    const TensorRow& row = plan.table.rows[piece.row];
    bytes[row.name] += piece.bytes;
    if (row.name == "w") {
      EXPECT_EQ(piece.writer % 2, piece.held.offset[1] == 0 ? 0u : 1u);
      EXPECT_EQ(piece.held.extent, Shape({8, 5}));
    }
    if (row.name == "stage") {
      EXPECT_LT(piece.writer, 3u);
    }
  }
  EXPECT_EQ(bytes, (std::map<std::string, uint64_t>{{"w", 80}, {"norm", 6}, {"stage", 4}}));
  for (const uint64_t load : plan.load) EXPECT_NEAR(static_cast<double>(load), 15, 5);
  // What each rank holds is in its buffer: what it writes, and what its replicas write.
  for (uint32_t rank = 0; rank < 6; ++rank) {
    const Assignment assignment = AssignmentOf(plan, rank).value();
    EXPECT_EQ(assignment.data_bytes + assignment.replicated_bytes, 40u + 6 + (rank < 3 ? 4 : 0));
  }
}

TEST(Plan, KeepsAnAxisOfTheMeshAsOneEntry) {
  std::vector<RankTable> ranks;
  for (uint32_t rank = 0; rank < 12; ++rank) {
    const int64_t slice = rank % 4;
    ranks.push_back({{{"w", DType::kF32, {8}, {{rank, {{slice * 2}, {2}}}}}}, {}});
  }
  const TensorTable table = MergeTables(ranks).value();
  ASSERT_EQ(table.rows.size(), 1u);
  ASSERT_EQ(table.rows[0].boxes.size(), 4u);
  for (uint32_t slice = 0; slice < 4; ++slice) {
    const HeldBox& held = table.rows[0].boxes[slice];
    EXPECT_EQ(std::tuple(held.rank, held.count, held.step), std::tuple(slice, 3u, 4u));
    EXPECT_TRUE(held.is_held_by(slice + 8));
    EXPECT_FALSE(held.is_held_by(slice + 12));
    EXPECT_FALSE(held.is_held_by(slice + 1));
  }
  // Ranks that are not evenly spaced take more entries, and the same plan comes of it.
  TensorTable apart = table;
  apart.rows[0].boxes.clear();
  for (uint32_t rank = 0; rank < 12; ++rank)
    apart.rows[0].boxes.push_back(ranks[rank].rows[0].boxes[0]);
  const Plan folded = MakePlan(table).value(), single = MakePlan(apart).value();
  EXPECT_EQ(WritersOf(folded), WritersOf(single));
  for (const uint32_t rank : {0u, 7u, 11u}) {
    EXPECT_EQ(AssignmentOf(folded, rank)->layout_hash, AssignmentOf(single, rank)->layout_hash);
  }
}

// Ranks may differ in what they tie: then each name has its own bytes.
TEST(Plan, AnAliasThatARankHoldsApartIsATensorAgain) {
  const auto row = [](std::string name, uint32_t rank) {
    return TensorRow{std::move(name), DType::kF32, {4}, {{rank, {{0}, {4}}}}};
  };
  std::vector<RankTable> ranks = {{{row("a", 0)}, {{"b", "a"}, {"c", "a"}}},
                                  {{row("a", 1), row("b", 1)}, {{"c", "a"}}}};
  SettleAliases(ranks);
  for (const RankTable& rank : ranks) {
    EXPECT_EQ(rank.rows.size(), 2u);
    EXPECT_THAT(rank.aliases, ElementsAre(std::pair<std::string, std::string>("c", "a")));
  }
  EXPECT_EQ(MergeTables(ranks)->rows.size(), 2u);
}

// The plan's own share of a large job: target 2 s on two cores (figure checkpoint.plan).
TEST(Plan, AgreesOnAThousandRanksByTwentyThousandTensors) {
  TensorTable table{1000, {}};
  for (int i = 0; i < 20'000; ++i)
    table.rows.push_back(Replicated("layers." + std::to_string(i) + ".weight", {i % 100 + 1, 64}));
  const Plan plan = MakePlan(table).value();
  const auto [least, most] = std::ranges::minmax(plan.load);
  EXPECT_LE(most - least, 100u * 64 * 4);
}

// Every pair of layouts of a small tensor, checked element by element.
TEST(CopyBox, MovesExactlyTheCommonPart) {
  const uint64_t seed = RandomU64();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 500; ++round) {
    const Shape global{4, 5, 3};
    const auto any_box = [&] {
      Box box{Shape::Zeros(3), Shape::Zeros(3)};
      for (int i = 0; i < 3; ++i) {
        box.offset.set(i, static_cast<int64_t>(random() % static_cast<uint64_t>(global[i])));
        box.extent.set(i, static_cast<int64_t>(
                              random() % static_cast<uint64_t>(global[i] - box.offset[i] + 1)));
      }
      return box;
    };
    const Box from = any_box(), to = any_box();
    const auto each = [](const Box& box, auto&& visit) {
      size_t at = 0;
      for (int64_t i = 0; i < box.extent[0]; ++i) {
        for (int64_t j = 0; j < box.extent[1]; ++j) {
          for (int64_t k = 0; k < box.extent[2]; ++k)
            visit(box.offset[0] + i, box.offset[1] + j, box.offset[2] + k, at++);
        }
      }
    };
    const auto inside = [](const Box& box, int64_t i, int64_t j, int64_t k) {
      const int64_t place[] = {i, j, k};
      for (int d = 0; d < 3; ++d) {
        if (place[d] < box.offset[d] || place[d] >= box.offset[d] + box.extent[d]) return false;
      }
      return true;
    };
    std::vector<std::byte> source(static_cast<size_t>(*from.extent.elements())),
        target(static_cast<size_t>(*to.extent.elements()));
    each(from, [&](int64_t i, int64_t j, int64_t k, size_t at) {
      source[at] = static_cast<std::byte>(i * 15 + j * 3 + k + 1);
    });
    ASSERT_TRUE(CopyBox(DType::kU8, from, source, to, target).ok());
    each(to, [&](int64_t i, int64_t j, int64_t k, size_t at) {
      ASSERT_EQ(target[at], inside(from, i, j, k) ? static_cast<std::byte>(i * 15 + j * 3 + k + 1)
                                                  : std::byte{0});
    });
  }
}

TEST(CopyBox, RefusesToCutInsideAByte) {
  std::vector<std::byte> source(2), target(1);
  EXPECT_FALSE(CopyBox(DType::kF4, {{0}, {4}}, source, {{1}, {2}}, target).ok());
  EXPECT_TRUE(CopyBox(DType::kF4, {{0}, {4}}, source, {{2}, {2}}, target).ok());
}

}  // namespace
}  // namespace outlast
