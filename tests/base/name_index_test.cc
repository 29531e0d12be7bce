#include "base/name_index.h"

#include <gtest/gtest.h>

#include <string>

namespace outlast {
namespace {

TEST(NameIndex, NumbersNamesInTheOrderInWhichTheyCome) {
  NameIndex index;
  EXPECT_EQ(index.Add("b").number, 0u);
  EXPECT_EQ(index.Add("a").number, 1u);
  EXPECT_EQ(index.Add("").number, 2u);
  EXPECT_EQ(index.Find("a"), 1u);
  EXPECT_EQ(index.Find("c"), std::nullopt);
  EXPECT_EQ(index.size(), 3u);
}

TEST(NameIndex, KnowsANameThatCameBefore) {
  NameIndex index(1);
  EXPECT_TRUE(index.Add("a").is_new);
  const auto again = index.Add(std::string("a"));
  EXPECT_FALSE(again.is_new);
  EXPECT_EQ(again.number, 0u);
  EXPECT_EQ(index.size(), 1u);
}

TEST(NameIndex, OfNothingFindsNothing) { EXPECT_EQ(NameIndex().Find(""), std::nullopt); }

TEST(NameIndex, HoldsMoreNamesThanItExpected) {
  std::vector<std::string> names;
  for (int i = 0; i < 10'000; ++i) names.push_back("layers." + std::to_string(i));
  for (const size_t expected : {size_t{0}, size_t{100}, names.size()}) {
    NameIndex index(expected);
    for (const std::string& name : names) ASSERT_TRUE(index.Add(name).is_new);
    for (uint32_t i = 0; i < names.size(); ++i) ASSERT_EQ(index.Find(names[i]), i);
    EXPECT_EQ(index.Find("layers.10000"), std::nullopt);
    EXPECT_EQ(index.size(), names.size());
  }
}

}  // namespace
}  // namespace outlast
