// Stopping at one step, with and without an agent.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <random>
#include <set>

#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"
#include "outlast/run/run.h"
#include "outlast/testing/local_world.h"
#include "outlast/testing/time_factor.h"
#include "run/run_state.h"

namespace outlast {
namespace {

using testing::LocalWorld;
using testing::LocalWorldOptions;
using testing::LocalWorldResult;

// Trains until a stop was agreed, and gives the step that was saved.
absl::Status TrainUntilStopped(outlast::Run& run, Generation& generation,
                               const std::function<void(int64_t)>& work,
                               std::atomic<int64_t>& saved) {
  for (int64_t step = 1;; ++step) {
    OUTLAST_RETURN_IF_ERROR(generation.Check());
    work(step);
    OUTLAST_ASSIGN_OR_RETURN(const auto verdict, run.CompleteStep(step));
    if (verdict == outlast::Run::StepVerdict::kGoOn) continue;
    EXPECT_TRUE(run.StopRequested());
    saved = step;
    run.MarkStopped(step);
    EXPECT_EQ(generation.Check().code(), absl::StatusCode::kAborted);
  }
}

// A worker that has not joined yet when the stop comes is no part of it: its signal ends it.
void AwaitAll(Generation& generation) {
  EXPECT_TRUE(generation.Put(std::to_string(generation.rank()), "").ok());
  for (int peer = 0; peer < generation.world(); ++peer) {
    EXPECT_TRUE(generation.Get(std::to_string(peer), absl::Seconds(20)).ok());
  }
}

TEST(Stop, AllRanksSaveTheSameStepWhateverTheirPace) {
  const int schedules = testing::TimeFactor() > 1 ? 10 : 60;
  for (int seed = 0; seed < schedules; ++seed) {
    constexpr int kRanks = 3;
    std::array<std::atomic<int64_t>, kRanks> saved{};
    LocalWorld world(kRanks);
    const LocalWorldResult result = world.Run([&](outlast::Run& run) {
      std::mt19937 random(static_cast<unsigned>(seed * kRanks + run.rank()));
      const unsigned longest_us =
          1 + random() % 300;  // each rank has a pace of its own, so late answers are common
      const int64_t ask_at = random() % 20;
      const absl::Status left = run.ForEachGeneration([&](Generation& generation) {
        const auto work = [&](int64_t step) {
          if (step == 1) AwaitAll(generation);
          if (run.rank() == 0 && step == ask_at + 1) world.AskStop(SIGTERM);
          Clock::Real().SleepFor(absl::Microseconds(random() % longest_us));
        };
        return TrainUntilStopped(run, generation, work, saved[static_cast<size_t>(run.rank())]);
      });
      EXPECT_TRUE(run.stopped());
      return left;
    });
    EXPECT_EQ(result.exit_code, 81)
        << result.reason << " seed " << seed;  // saved nowhere: no checkpointer here
    EXPECT_GT(saved[0], 0) << "seed " << seed;
    EXPECT_EQ(saved[1], saved[0]) << "seed " << seed;
    EXPECT_EQ(saved[2], saved[0]) << "seed " << seed;
    EXPECT_TRUE(result.faults.empty());
  }
}

TEST(Stop, AskedBeforeTheFirstStepItWaitsForWhereTheRanksGoOn) {
  constexpr int64_t kRestored = 1000;
  std::array<std::atomic<int64_t>, 2> saved{};
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      AwaitAll(generation);
      if (run.rank() == 0) world.AskStop();
      while (!run.StopRequested()) Clock::Real().SleepFor(absl::Microseconds(100));
      for (int64_t step = kRestored + 1;; ++step) {
        Clock::Real().SleepFor(absl::Microseconds(100));
        OUTLAST_ASSIGN_OR_RETURN(const auto verdict, run.CompleteStep(step));
        if (verdict == outlast::Run::StepVerdict::kGoOn) continue;
        saved[static_cast<size_t>(run.rank())] = step;
        run.MarkStopped(step);
        return generation.Check();
      }
    });
  });
  EXPECT_EQ(result.exit_code, 81) << result.reason;
  EXPECT_GT(saved[0], kRestored);
  EXPECT_EQ(saved[1], saved[0]);
}

TEST(Stop, ByInterruptEndsWith130) {
  LocalWorld world(2);
  std::atomic<int64_t> saved{0};
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) {
      const auto work = [&](int64_t step) {
        if (step == 1) AwaitAll(generation);
        if (run.rank() == 0 && step == 3) world.AskStop(SIGINT);
        Clock::Real().SleepFor(absl::Microseconds(50));
      };
      return TrainUntilStopped(run, generation, work, saved);
    });
  });
  EXPECT_EQ(result.exit_code, 130) << result.reason;
}

TEST(Stop, ADeathWhileWaitingForTheWordEndsTheWait) {
  LocalWorldOptions options;
  options.job.grace = absl::Milliseconds(500);
  LocalWorld world(2, options);
  std::atomic<bool> waits{false};
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.rank() == 1) {
        while (!waits) Clock::Real().SleepFor(absl::Microseconds(100));
        return absl::InternalError("a crash");  // it never answers in time: step 0 is all it did
      }
      for (int64_t step = 1;; ++step) {
        if (step == 2) world.AskStop();
        while (step >= 2 && !run.StopRequested()) Clock::Real().SleepFor(absl::Microseconds(100));
        if (step >= 2) waits = true;
        OUTLAST_RETURN_IF_ERROR(run.CompleteStep(step).status());
      }
    });
  });
  EXPECT_EQ(result.exit_code, 81) << result.reason;
}

// --- A world of one without an agent ---

TEST(WorldOfOne, NeedsNothing) {
  const auto run = std::move(Run::Join()).value();
  EXPECT_EQ(run->rank(), 0);
  EXPECT_EQ(run->world(), 1);
  EXPECT_FALSE(run->has_agent());
  EXPECT_FALSE(run->run_id().is_zero());
  int bodies = 0;
  const absl::Status left = run->ForEachGeneration([&](Generation& generation) -> absl::Status {
    ++bodies;
    EXPECT_TRUE(generation.Put("k", "v").ok());
    EXPECT_EQ(generation.Get("k", absl::ZeroDuration()).value(), "v");
    EXPECT_TRUE(generation.SharedMemory("m", 4096).ok());
    return absl::OkStatus();
  });
  EXPECT_TRUE(left.ok()) << left;
  EXPECT_EQ(bodies, 1);
}

TEST(WorldOfOne, ReturnsTheBodysError) {
  const auto run = std::move(Run::Join()).value();
  const absl::Status left =
      run->ForEachGeneration([](Generation&) { return absl::DataLossError("bad batch"); });
  EXPECT_EQ(left.code(), absl::StatusCode::kDataLoss);
}

TEST(WorldOfOne, JoinsInLessThanAMillisecond) {
  const absl::Duration limit = absl::Milliseconds(1) * testing::TimeFactor();
  absl::Duration best = absl::InfiniteDuration();
  for (int i = 0; i < 200 && best >= limit; ++i) {  // a loaded machine may disturb many
    const int64_t start_ns = MonotonicNanos();
    const auto run = std::move(Run::Join()).value();
    best = std::min(best, absl::Nanoseconds(MonotonicNanos() - start_ns));
  }
  RecordProperty("best_us", static_cast<int>(absl::ToInt64Microseconds(best)));
  EXPECT_LT(best, limit);
}

// Case O09: it may be asked for in any loop.
TEST(WorldOfOne, LooksForARequestToStopInLessThanAMicrosecond) {
  constexpr int kPolls = 10'000;
  const auto run = std::move(Run::Join()).value();
  absl::Duration best = absl::InfiniteDuration();
  bool asked = false;
  for (int i = 0; i < 20; ++i) {  // a loaded machine disturbs some
    const int64_t start_ns = MonotonicNanos();
    for (int poll = 0; poll < kPolls; ++poll) asked = run->StopRequested() || asked;
    best = std::min(best, absl::Nanoseconds(MonotonicNanos() - start_ns));
  }
  EXPECT_FALSE(asked);
  RecordProperty("best_ns", static_cast<int>(absl::ToInt64Nanoseconds(best) / kPolls));
  EXPECT_LT(best / kPolls, absl::Microseconds(1) * testing::TimeFactor());
}

class WorldOfOneSignal : public ::testing::TestWithParam<int> {};

TEST_P(WorldOfOneSignal, SavesAtAStepBoundaryAndStops) {
  const auto run = std::move(Run::Join()).value();
  std::atomic<int64_t> saved{0};
  int bodies = 0;
  const absl::Status left = run->ForEachGeneration([&](Generation& generation) {
    ++bodies;
    const auto work = [&](int64_t step) {
      if (step == 5) raise(GetParam());
      Clock::Real().SleepFor(absl::Microseconds(100));
    };
    return TrainUntilStopped(*run, generation, work, saved);
  });
  EXPECT_TRUE(left.ok()) << left;
  EXPECT_TRUE(run->stopped());
  EXPECT_EQ(bodies, 1);
  EXPECT_GE(saved, 5);
}

INSTANTIATE_TEST_SUITE_P(Signals, WorldOfOneSignal,
                         ::testing::Values(SIGTERM, SIGUSR1, SIGUSR2, SIGINT));

TEST(WorldOfOne, ASecondTermHarmsNothing) {
  const auto run = std::move(Run::Join()).value();
  std::atomic<int64_t> saved{0};
  const absl::Status left = run->ForEachGeneration([&](Generation& generation) {
    const auto work = [&](int64_t step) {
      if (step == 5 || step == 6) raise(SIGTERM);
      Clock::Real().SleepFor(absl::Microseconds(100));
    };
    return TrainUntilStopped(*run, generation, work, saved);
  });
  raise(SIGTERM);
  EXPECT_TRUE(left.ok()) << left;
  EXPECT_GE(saved, 5);
}

TEST(WorldOfOne, LeavesAProgramsOwnHandlersAlone) {
  static std::atomic<int> own{0};
  struct sigaction action {};
  action.sa_handler = [](int) { ++own; };
  struct sigaction before {};
  sigaction(SIGUSR1, &action, &before);
  {
    ::testing::internal::CaptureStderr();
    const auto run = std::move(Run::Join()).value();
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), ::testing::HasSubstr("SIGUSR1"));
    raise(SIGUSR1);
    EXPECT_EQ(own, 1);
    EXPECT_FALSE(run->StopRequested());
  }
  sigaction(SIGUSR1, &before, nullptr);
}

TEST(WorldOfOne, GivesSignalsTheirDefaultsBackWhenItGoes) {
  { const auto run = std::move(Run::Join()).value(); }
  struct sigaction present {};
  sigaction(SIGTERM, nullptr, &present);
  EXPECT_EQ(present.sa_handler, SIG_DFL);
}

TEST(AnotherLauncher, GivesRankAndWorldAndOneGeneration) {
  WorkerEnvironment environment;
  environment.rank = 2;
  environment.world = 4;
  ::testing::internal::CaptureStderr();
  const auto run = std::move(Run::Join({.environment = environment})).value();
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, ::testing::HasSubstr("outlast run"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1);
  EXPECT_EQ(run->rank(), 2);
  EXPECT_EQ(run->world(), 4);
  int bodies = 0;
  const absl::Status left = run->ForEachGeneration([&](Generation& generation) -> absl::Status {
    ++bodies;
    EXPECT_EQ(generation.Put("k", "v").code(), absl::StatusCode::kUnimplemented);
    EXPECT_EQ(generation.Get("k", absl::Seconds(1)).status().code(),
              absl::StatusCode::kUnimplemented);
    EXPECT_EQ(generation.SharedMemory("m", 4096).status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_TRUE(run->SlotMemory("m", 4096).ok());  // the process's own
    return absl::AbortedError("a peer is gone");
  });
  EXPECT_EQ(left.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(bodies, 1);
}

}  // namespace
}  // namespace outlast
