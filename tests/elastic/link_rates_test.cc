#include "outlast/elastic/link_rates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace outlast {
namespace {

using Fitness = LinkRates::Fitness;
using Pair = std::pair<std::string, std::string>;

const std::vector<std::string> kThree = {"a", "b", "c"};

TEST(LinkRates, PairsNeighboursThatWereNeverMeasuredAndThenTheOddOne) {
  LinkRates rates(100);
  const std::vector<std::string> five = {"a", "b", "c", "d", "e"};
  EXPECT_EQ(rates.NextPair(five, five), Pair("a", "b"));
  // Those two are busy.
  EXPECT_EQ(rates.NextPair({"c", "d", "e"}, {"c", "d", "e"}), Pair("c", "d"));
  EXPECT_EQ(rates.NextPair({"e"}, {"e"}), std::nullopt) << "nobody is free";
  rates.Note("a", "b", 900);
  EXPECT_EQ(rates.NextPair({"e"}, {"a", "b", "e"}), Pair("e", "a"));
  rates.Note("e", "a", 900);
  EXPECT_EQ(rates.NextPair({"a", "b", "e"}, {"a", "b", "e"}), std::nullopt);
}

TEST(LinkRates, ASecondPartnerTellsWhichEndIsSlow) {
  LinkRates rates(100);
  rates.Note("a", "b", 3);
  for (const char* node : {"a", "b"}) EXPECT_EQ(rates.FitnessOf(node), Fitness::kUnknown) << node;
  EXPECT_FALSE(rates.IsSettled("a", kThree));
  EXPECT_EQ(rates.NextPair({"a", "b", "c"}, kThree), Pair("c", "a")) << "it was never measured";
  rates.Note("c", "a", 4);
  EXPECT_EQ(rates.FitnessOf("a"), Fitness::kUnknown) << "perhaps all three are";
  EXPECT_EQ(rates.NextPair({"a", "b", "c"}, kThree), Pair("b", "c"));
  rates.Note("b", "c", 900);
  EXPECT_EQ(rates.FitnessOf("a"), Fitness::kUnfit);
  EXPECT_EQ(rates.FitnessOf("b"), Fitness::kFit);
  EXPECT_EQ(rates.FitnessOf("c"), Fitness::kFit);
  EXPECT_EQ(rates.NextPair({"a", "b", "c"}, kThree), std::nullopt);
  EXPECT_EQ(rates.Describe("a"), "3 MB/s with b, 4 MB/s with c");
  rates.Note("a", "b", 2271.4);
  rates.Note("a", "c", 0.0512);
  EXPECT_EQ(rates.Describe("a"), "2271 MB/s with b, 0.0512 MB/s with c") << "no exponents";
}

TEST(LinkRates, OfTwoNobodyIsBlamedAndNobodyIsWaitedFor) {
  LinkRates rates(100);
  rates.Note("a", "b", 3);
  EXPECT_EQ(rates.FitnessOf("a"), Fitness::kUnknown);
  EXPECT_TRUE(rates.IsSettled("a", {"a", "b"}));
  EXPECT_TRUE(rates.IsSettled("a", {"a"})) << "there is nobody to measure with";
}

TEST(LinkRates, WhereAllAreSlowTheFloorIsWrongAndNobodyIsUnfit) {
  LinkRates rates(100);
  for (const auto& [one, other] : {Pair("a", "b"), Pair("a", "c"), Pair("b", "c")})
    rates.Note(one, other, 20);
  for (const std::string& node : kThree) {
    EXPECT_EQ(rates.FitnessOf(node), Fitness::kUnknown) << node;
    EXPECT_TRUE(rates.IsSettled(node, kThree)) << node;
  }
}

TEST(LinkRates, WithoutAFloorWhoeverWasMeasuredIsFit) {
  LinkRates rates(0);
  EXPECT_FALSE(rates.IsSettled("a", kThree));
  rates.Note("a", "b", 0);
  EXPECT_EQ(rates.FitnessOf("a"), Fitness::kFit);
}

TEST(LinkRates, WithAShareTheMedianOfTheOthersSaysWhatIsSlow) {
  LinkRates rates(0, 0.5);
  rates.Note("a", "b", 1000);
  rates.Note("c", "d", 90);
  EXPECT_EQ(rates.FitnessOf("c"), Fitness::kFit) << "there are too few others to say more";
  rates.Note("e", "f", 1200);
  rates.Note("g", "h", 800);
  EXPECT_EQ(rates.Wanted("c", "d"), 500) << "half of 1000";
  for (const char* node : {"c", "d"}) EXPECT_EQ(rates.FitnessOf(node), Fitness::kUnknown) << node;
  EXPECT_EQ(rates.FitnessOf("g"), Fitness::kFit);

  rates.Note("c", "a", 95);
  rates.Note("d", "b", 900);
  EXPECT_EQ(rates.FitnessOf("c"), Fitness::kUnfit);
  EXPECT_EQ(rates.FitnessOf("d"), Fitness::kFit);
  EXPECT_EQ(rates.LeastWanted("c"), 450) << "of 95, 800, 900, 1000, 1200";
}

TEST(LinkRates, ThatAreOddAreNamedBesideTheMedianOfTheOthers) {
  LinkRates rates(0);
  rates.Note("a", "b", 1000);
  rates.Note("c", "d", 90);
  rates.Note("e", "f", 1200);
  EXPECT_THAT(rates.OddLinks(), ::testing::IsEmpty()) << "there are too few";
  rates.Note("g", "h", 800);
  EXPECT_THAT(rates.OddLinks(),
              ::testing::ElementsAre("c and d: 90 MB/s, the median of the 3 others is 1000"));
}

TEST(LinkRates, AreForgottenWithTheirNode) {
  LinkRates rates(100);
  rates.Note("a", "b", 900);
  rates.Note("a", "c", 700);
  rates.Note("b", "c", 800);
  EXPECT_EQ(rates.Summary(), "3 links, 700 to 900 MB/s, median 800");
  rates.Forget("a");
  EXPECT_EQ(rates.FitnessOf("a"), Fitness::kUnknown);
  EXPECT_EQ(rates.Summary(), "1 link, 800 to 800 MB/s, median 800");
}

}  // namespace
}  // namespace outlast
