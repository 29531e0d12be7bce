#include "watch/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "outlast/base/status.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

std::string Refusal(const WatchdogOptions& options) {
  const absl::Status status = Validate(options);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(MessageOf(status));
}

TEST(CheckNesting, NamesBothTimers) {
  const JobDeadlines job = {.respawn = absl::Seconds(120),
                            .commit_ack = absl::Seconds(10),
                            .connect = absl::Seconds(40),
                            .soft_abort = absl::Seconds(10)};
  EXPECT_TRUE(CheckNesting({}, job).ok()) << "the defaults nest";
  EXPECT_TRUE(CheckNesting({}, {}).ok()) << "nothing is known";
  const auto refusal = [](const WatchdogOptions& options, const JobDeadlines& deadlines) {
    return std::string(MessageOf(CheckNesting(options, deadlines)));
  };
  EXPECT_THAT(refusal({.first_limits = {.rebuild = absl::Seconds(170)}}, job),
              HasSubstr("first_limits.rebuild is 2m50s, and a new process may take 2m50s (respawn "
                        "2m, acknowledgement 10s, connect 40s)"));
  JobDeadlines gloo = job;
  gloo.collective_timeout = absl::Seconds(490);
  EXPECT_THAT(refusal({}, gloo), HasSubstr("ceiling is 8m, and --collective-timeout 8m10s"));
  gloo.collective_timeout = absl::Seconds(491);
  EXPECT_EQ(refusal({}, gloo), "");
}

TEST(WatchdogOptions, TakesTheDefaults) { EXPECT_TRUE(Validate({}).ok()); }

// Row 23, and TensorRT-LLM PR#10480: zero and negative are refused, none is the default, infinite
// switches off.
TEST(WatchdogOptions, NamesTheBrokenRule) {
  EXPECT_THAT(Refusal({.poll = absl::ZeroDuration()}), HasSubstr("poll is 0"));
  EXPECT_THAT(Refusal({.floor = absl::Seconds(-1)}), HasSubstr("floor is -1s"));
  EXPECT_THAT(Refusal({.floor = absl::InfiniteDuration()}), HasSubstr("floor is infinite"));
  EXPECT_THAT(Refusal({.floor = absl::Minutes(9)}), HasSubstr("floor <= ceiling"));
  EXPECT_THAT(Refusal({.ceiling = absl::Seconds(60)}),
              HasSubstr("first_limits.compile (8m) is above ceiling (1m)"));
  EXPECT_THAT(Refusal({.floor = absl::Minutes(4)}),
              HasSubstr("first_limits.rebuild (3m) is below floor (4m)"));
  EXPECT_THAT(Refusal({.first_limits = {.checkpoint = absl::ZeroDuration()}}),
              HasSubstr("first_limits.checkpoint is 0"));
  EXPECT_THAT(Refusal({.warm_up_steps = -1}), HasSubstr("warm_up_steps is -1"));
}

TEST(WatchdogOptions, LetsInitPassTheCeilingAndLimitsBeSwitchedOff) {
  EXPECT_TRUE(Validate({.first_limits = {.init = absl::Hours(1)}}).ok());
  EXPECT_TRUE(Validate({.ceiling = absl::InfiniteDuration(),
                        .first_limits = {.compile = absl::InfiniteDuration()}})
                  .ok());
}

TEST(WatchdogOptions, SurviveTheWayToTheAgent) {
  const WatchdogOptions options{
      .mode = WatchMode::kObserve,
      .poll = absl::Milliseconds(200),
      .floor = absl::Seconds(2),
      .ceiling = absl::InfiniteDuration(),
      .first_limits = {.init = absl::InfiniteDuration(), .step = absl::Seconds(30)},
      .warm_up_steps = 2};
  const auto decoded = DecodeWatchOptions(EncodeWatchOptions(options));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->mode, WatchMode::kObserve);
  EXPECT_EQ(decoded->poll, absl::Milliseconds(200));
  EXPECT_EQ(decoded->ceiling, absl::InfiniteDuration());
  EXPECT_EQ(decoded->first_limits.init, absl::InfiniteDuration());
  EXPECT_EQ(decoded->first_limits.step, absl::Seconds(30));
  EXPECT_EQ(decoded->first_limits.checkpoint, absl::Seconds(420));
  EXPECT_EQ(decoded->warm_up_steps, 2);
}

TEST(WatchdogOptions, RefuseWhatIsNoneOfOurJson) {
  EXPECT_TRUE(absl::IsInvalidArgument(DecodeWatchOptions("").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DecodeWatchOptions("[1]").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DecodeWatchOptions(R"({"mode": 7})").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DecodeWatchOptions(R"({"poll_ns": "1"})").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DecodeWatchOptions(R"({"poll_ns": 0})").status()));
  EXPECT_TRUE(DecodeWatchOptions("{}").ok());
}

}  // namespace
}  // namespace outlast
