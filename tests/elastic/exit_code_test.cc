#include "outlast/elastic/exit_code.h"

#include <gtest/gtest.h>

#include <csignal>

namespace outlast {
namespace {

TEST(ExitCode, EachOutcomeHasItsCode) {
  EXPECT_EQ(ExitCodeOf(JobOutcome::kFinished), 0);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kPreemptedSaved), 80);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kPreemptedUnsaved), 81);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kNeedsHuman), 82);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kRestartsUsedUp), 83);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kNoQuorum), 84);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kRefused), 85);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kLeft), 86);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kExcluded), 87);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kNotInRoot), 88);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kInterrupted), 130);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kHungUp), 129);
}

TEST(ExitCode, PreemptExitReplacesOnlyTheCodeOfPreemptedAndSaved) {
  EXPECT_EQ(ExitCodeOf(JobOutcome::kPreemptedSaved, 0), 0);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kPreemptedUnsaved, 0), 81);
  EXPECT_EQ(ExitCodeOf(JobOutcome::kWorkerFailed, 0, 7), 7);
}

TEST(ExitCode, AWorkersOwnCodeAndSignalPassThrough) {
  for (const int code : {1, 2, 7, 79, 89, 126, 127, 128, 255}) {
    EXPECT_EQ(WorkerExitCode(FaultClass::kCrash, {.code = code}), code);
  }
  EXPECT_EQ(WorkerExitCode(FaultClass::kCrash, {.signal = SIGSEGV}), 139);
  EXPECT_EQ(WorkerExitCode(FaultClass::kCrash, {.signal = SIGKILL}), 137);
  EXPECT_EQ(WorkerExitCode(FaultClass::kCrash, {.signal = SIGTERM}), 143);
}

TEST(ExitCode, OursNeverComeFromAWorkerAndAFailedJobIsNeverZero) {
  for (int code = 80; code <= 88; ++code)
    EXPECT_EQ(WorkerExitCode(FaultClass::kCrash, {.code = code}), 1);
  EXPECT_EQ(WorkerExitCode(FaultClass::kEarlyExit, {.code = 0}), 1);
  EXPECT_EQ(WorkerExitCode(FaultClass::kHang, {}), 137);
}

}  // namespace
}  // namespace outlast
