#include "store/late_names.h"

#include <gtest/gtest.h>

#include <string>

#include "outlast/base/status.h"

namespace outlast {
namespace {

// Time that passes by sleeping alone.
class OwnClock final : public Clock {
 public:
  absl::Duration Uptime() override { return now_; }
  absl::Time WallTime() override { return absl::UnixEpoch() + now_; }
  void SleepFor(absl::Duration duration) override { now_ += duration; }

 private:
  absl::Duration now_;
};

TEST(LateNames, LooksAgainUntilTheNameAppears) {
  OwnClock clock;
  LateNames late(absl::Seconds(10), clock);
  const auto found = late.Await("/", [&]() -> absl::StatusOr<std::string> {
    if (clock.Uptime() < absl::Seconds(5)) return absl::NotFoundError("not yet");
    return std::string("there");
  });
  EXPECT_EQ(found.value(), "there");
  EXPECT_LT(clock.Uptime(), absl::Seconds(5.3));
}

TEST(LateNames, GivesUpAtTheDeadlineOfAllNamesTogether) {
  OwnClock clock;
  LateNames late(absl::Seconds(10), clock);
  const auto never = [] { return absl::NotFoundError("never"); };
  EXPECT_TRUE(absl::IsNotFound(late.Await("/", never)));
  EXPECT_EQ(clock.Uptime(), absl::Seconds(10));
  EXPECT_TRUE(absl::IsNotFound(late.Await("/", never)));
  EXPECT_EQ(clock.Uptime(), absl::Seconds(10)) << "the second one waits no more";
}

TEST(LateNames, WaitsForNothingElse) {
  OwnClock clock;
  LateNames late(absl::Seconds(10), clock);
  EXPECT_TRUE(late.Await("/", [] { return absl::OkStatus(); }).ok());
  EXPECT_TRUE(absl::IsDataLoss(late.Await("/", [] { return absl::DataLossError("torn"); })));
  EXPECT_EQ(clock.Uptime(), absl::ZeroDuration());
}

TEST(LateNames, AreNoneOnAFileSystemOfThisMachine) {
  EXPECT_EQ(LateNames::WaitOf("/proc"), absl::ZeroDuration());
  EXPECT_EQ(LateNames::WaitOf("/nowhere/at/all"), absl::ZeroDuration());
}

}  // namespace
}  // namespace outlast
