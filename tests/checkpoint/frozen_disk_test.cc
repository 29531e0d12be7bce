// K11 of design/checkpoint.md: a save that a disk holds up for ever has a deadline, and says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/checkpoint/disk_fixture.h"
#include "tests/checkpoint/job_fixture.h"
#include "tests/fault/loop_disk.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

class FrozenSave : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!disk_.Make(24)) GTEST_SKIP() << "needs the right to mount a loop device";
    spec_.ranks = 2;
    spec_.checkpoints.uri = disk_.path() + "/ckpt";
    spec_.checkpoints.every = Every::Steps(5);
    spec_.service.save_floor = absl::Milliseconds(300);
    seen_.on_failed = [this] { given_up_ = true; };
  }
  // The disk stands still from `step` on, until a save was given up.
  void FreezeAt(int64_t step) {
    spec_.at_step = [this, step](LocalWorld&, outlast::Run& run, int64_t at) {
      if (run.rank() != 0) return;
      EXPECT_TRUE(at != step || disk_.Freeze());
      if (at != step + 10) return;
      const int64_t deadline = MonotonicNanos() + 20'000'000'000;
      while (!given_up_ && MonotonicNanos() < deadline) absl::SleepFor(absl::Milliseconds(1));
      disk_.Thaw();
    };
  }

  TempFolder folder_;
  testing::LoopDisk disk_{folder_ / "disk.img", folder_ / "disk"};
  JobSpec spec_;
  std::atomic<bool> given_up_{false};
  Seen seen_;
};

TEST_F(FrozenSave, IsGivenUpByItsDeadlineAndTheNextOneWorks) {
  FreezeAt(11);
  RunJob(spec_, seen_);
  EXPECT_EQ(seen_.result.exit_code, 0) << seen_.result.reason;
  ASSERT_FALSE(seen_.failures.empty());
  EXPECT_THAT(seen_.failures[0], HasSubstr("save of step "));
  EXPECT_THAT(seen_.failures[0], HasSubstr("not durable after its deadline of 3"));
  EXPECT_EQ(seen_.finished, 2);
  EXPECT_EQ(CommittedSteps(spec_.checkpoints.uri).front(), 30);
  EXPECT_EQ(seen_.wrong_states, 0);
}

}  // namespace
}  // namespace outlast
