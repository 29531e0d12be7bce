#include "outlast/elastic/terms.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace outlast {
namespace {

using ::testing::HasSubstr;

TEST(Terms, AFlagThatDiffersIsNamedWithWhatWasFoundAndWhatIsWanted) {
  const Terms wanted = {{"-n", "2"}, {"--max-restarts", "3"}, {"--fresh", "not given"}};
  EXPECT_EQ(TermsThatDiffer(wanted, wanted), "");
  EXPECT_EQ(TermsThatDiffer({{"--fresh", "given"}, {"--max-restarts", "3"}, {"-n", "4"}}, wanted),
            "-n 4, 2 wanted; --fresh given, not given wanted");
}

TEST(Terms, AFlagThatOneSideDoesNotKnowIsNotJudged) {
  EXPECT_EQ(TermsThatDiffer({{"-n", "2"}, {"--new", "x"}}, {{"-n", "2"}, {"--old", "y"}}), "");
  EXPECT_EQ(TermsThatDiffer({}, {{"-n", "2"}}), "");
}

TEST(Terms, OfLongValuesThePlaceWhereTheyDifferIsShown) {
  const std::string long_path(200, 'p');
  EXPECT_EQ(TermsThatDiffer({{"the command", long_path + " --steps 20"}},
                            {{"the command", long_path + " --steps 10"}}),
            "the command ...ppppppppppp --steps 20, ...ppppppppppp --steps 10 wanted");
}

TEST(Terms, ValuesThatDifferBehindTheirFirstKibDiffer) {
  const std::string start(1 << 20, 's');
  const Term found = MakeTerm("the command", start + "a"), wanted = MakeTerm("the command", start);
  EXPECT_LT(found.value.size(), 1200u);
  EXPECT_EQ(found.value.substr(0, 1024), start.substr(0, 1024));
  EXPECT_THAT(TermsThatDiffer({found}, {wanted}), HasSubstr("wanted"));
  EXPECT_EQ(MakeTerm("the command", start), wanted);
}

TEST(Terms, ACommandIsQuotedAsForAShellAndAMessageKeepsToOneLine) {
  EXPECT_EQ(QuotedCommand({"./trainer", "--lr=1e-3", "a b", "", "it's"}),
            "./trainer --lr=1e-3 'a b' '' 'it'\\''s'");
  EXPECT_EQ(TermsThatDiffer({{"c", "a\n\x1b[31m"}}, {{"c", "b"}}), "c a\\n\\x1b[31m, b wanted");
}

}  // namespace
}  // namespace outlast
