#include "launch/oom_kills.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

class OomKillsTest : public ::testing::Test {
 protected:
  void Write(const std::string& text) const { std::ofstream(path_) << text; }

  const TempFolder folder_;
  const std::string path_ = folder_ / "memory.events";
};

TEST_F(OomKillsTest, EachNewCountExplainsOneDeath) {
  Write("low 0\noom 7\noom_kill 3\n");
  OomKills kills(path_);
  EXPECT_FALSE(kills.Take()) << "those were before";
  Write("low 0\noom 9\noom_kill 5\n");
  EXPECT_TRUE(kills.Take());
  EXPECT_TRUE(kills.Take());
  EXPECT_FALSE(kills.Take());
}

TEST_F(OomKillsTest, WhatNobodyAskedAboutInTimeWasSomebodyElse) {
  Write("oom_kill 0\n");
  OomKills kills(path_);
  kills.ForgetOld();
  Write("oom_kill 1\n");
  kills.ForgetOld();
  kills.ForgetOld();
  EXPECT_FALSE(kills.Take());
  Write("oom_kill 2\n");
  kills.ForgetOld();
  EXPECT_TRUE(kills.Take()) << "its death is only now heard of";
}

TEST_F(OomKillsTest, WithoutACountNothingIsKnown) {
  OomKills kills(path_);
  EXPECT_FALSE(kills.Take());
}

}  // namespace
}  // namespace outlast
