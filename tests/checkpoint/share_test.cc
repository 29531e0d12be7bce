// Which rank of a node reads what of a checkpoint, for all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "checkpoint/copy_plan.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Plan PlanOf(uint32_t world) {
  TensorTable table{world, {}};
  table.rows.push_back({"big", DType::kU8, {8000}, {}});  // cut into a piece a rank
  for (int i = 0; i < 40; ++i)
    table.rows.push_back({"small" + std::to_string(i), DType::kU8, {10}, {}});
  return MakePlan(std::move(table)).value();
}

std::vector<Assignment> Of(const Plan& plan, const std::vector<uint32_t>& ranks) {
  std::vector<Assignment> assignments;
  assignments.reserve(ranks.size());
  for (const uint32_t rank : ranks) assignments.push_back(AssignmentOf(plan, rank).value());
  return assignments;
}

// "name[offset]" -> how many read it.
std::map<std::string, int> Readers(const std::vector<Assignment>& shares) {
  std::map<std::string, int> readers;
  for (const Assignment& share : shares) {
    for (const auto* items : {&share.image, &share.replicated}) {
      for (const PlannedItem& item : *items) ++readers[item.box.name + item.box.offset.text()];
    }
  }
  return readers;
}

TEST(SharesOfNode, OfAllRanksAreWhatEachWrites) {
  const Plan plan = PlanOf(4);
  const std::vector<Assignment> shares = SharesOfNode(Of(plan, {0, 1, 2, 3}));
  for (const Assignment& share : shares) EXPECT_THAT(share.replicated, IsEmpty());
  EXPECT_EQ(Readers(shares).size(), plan.pieces.size());
}

TEST(SharesOfNode, OfSomeRanksHaveEachPieceOnceAndAreLevel) {
  const Plan plan = PlanOf(8);
  const std::vector<Assignment> shares = SharesOfNode(Of(plan, {4, 5}));
  const std::map<std::string, int> readers = Readers(shares);
  EXPECT_EQ(readers.size(), plan.pieces.size());
  for (const auto& [piece, count] : readers) EXPECT_EQ(count, 1) << piece;
  // What six others write is shared out, three writers each.
  std::vector<size_t> writers;
  for (const Assignment& share : shares) {
    std::set<uint32_t> of;
    for (const PlannedItem& item : share.replicated) of.insert(item.writer);
    writers.push_back(of.size());
  }
  EXPECT_THAT(writers, ElementsAre(3, 3));
}

TEST(SharesOfNode, OfARankAloneIsAllThatItHolds) {
  const Plan plan = PlanOf(3);
  const std::vector<Assignment> own = Of(plan, {1});
  const std::vector<Assignment> shares = SharesOfNode(own);
  EXPECT_EQ(shares[0].replicated.size(), own[0].replicated.size());
}

}  // namespace
}  // namespace outlast
