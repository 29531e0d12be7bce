// Case O18: through a slow disk, what is saved is the state of the save call; and nobody waits for
// a slow disk who need not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "checkpoint/reader.h"
#include "outlast/base/clock.h"
#include "tests/checkpoint/disk_fixture.h"
#include "tests/checkpoint/job_fixture.h"

namespace outlast {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

#ifdef OUTLAST_SANITIZED
constexpr size_t kFloats = 500'000;
#else
constexpr size_t kFloats = 2'000'000;
#endif
constexpr uint64_t kBytes = kFloats * sizeof(float);
constexpr uint64_t kSlow = 1'000'000;  // bytes a second
constexpr uint64_t kLessSlow = 4'000'000;
// So slow that a test which waited for it would be killed.
constexpr uint64_t kStanding = 1'000;

// A world of one on a slow disk, whose weights are all one number.
class SlowStore : public ::testing::Test {
 protected:
  using Body = std::function<void(Checkpointer&, int64_t restored_step)>;
  void Train(uint64_t bytes_per_second, const Body& body) {
    const auto run = outlast::Run::Join().value();
    const auto checkpoints = Checkpointer::Open(*run, {.uri = folder_ / "root",
                                                       .every = Every::Steps(1),
                                                       .disk_bytes_per_second = bytes_per_second})
                                 .value();
    const absl::Status status = run->ForEachGeneration([&](Generation&) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(const int64_t step, checkpoints->Restore(State()));
      body(*checkpoints, step);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }

  StateView State() { return StateOf(weights_); }
  void Fill(float value) { std::fill(weights_.begin(), weights_.end(), value); }
  bool Holds(float value) const { return AllAre(weights_, value); }

  static void AwaitDurable(const Checkpointer& checkpoints, int64_t step) {
    while (checkpoints.stats().durable_step != step && checkpoints.stats().failed_saves == 0)
      absl::SleepFor(absl::Milliseconds(2));
    EXPECT_EQ(checkpoints.stats().durable_step, step);
  }

  Listing List() const {
    return Root::Open(folder_ / "root", {.access = Access::kRead}).value()->List().value();
  }
  // The checkpoint of `step` is whole, and all its weights are `value`.
  void ExpectSaved(int64_t step, float value) const {
    const Listing listing = List();
    const auto found = std::ranges::find(listing.checkpoints, step, &CheckpointInfo::step);
    ASSERT_NE(found, listing.checkpoints.end()) << "step " << step;
    const std::string path = folder_ / ("root/" + found->name);
    EXPECT_TRUE(VerifyCheckpoint(path).empty());
    std::vector<float> loaded(kFloats);
    ASSERT_TRUE(CheckpointReader::Open(path).value()->ReadState(StateOf(loaded)).ok());
    EXPECT_TRUE(AllAre(loaded, value)) << "step " << step;
  }

  TempFolder folder_;

 private:
  static StateView StateOf(std::vector<float>& weights) {
    const Shape shape{static_cast<int64_t>(weights.size())};
    StateView state;
    state.regions.push_back(
        {"weights", DType::kF32, shape, {}, shape, std::as_writable_bytes(std::span(weights))});
    return state;
  }
  static bool AllAre(const std::vector<float>& weights, float value) {
    return std::ranges::all_of(weights, [&](float weight) { return weight == value; });
  }

  std::vector<float> weights_ = std::vector<float>(kFloats);
};

TEST_F(SlowStore, SavesTheBytesOfTheSaveCallWhenTheMemoryChangesAtOnce) {
  Train(kSlow, [&](Checkpointer& checkpoints, int64_t) {
    Fill(1);
    const int64_t started = MonotonicNanos();
    ASSERT_TRUE(checkpoints.SaveIfDue(1, State()).ok());
    Fill(-1);  // without a BeforeUpdate: the call itself has copied all
    AwaitDurable(checkpoints, 1);
    EXPECT_GE(MonotonicNanos() - started, int64_t{1'000} * (kBytes - kSlow / 10));
  });
  ExpectSaved(1, 1);
  Train(kSlow, [&](Checkpointer&, int64_t step) {
    EXPECT_EQ(step, 1);
    EXPECT_TRUE(Holds(1));
  });
}

TEST_F(SlowStore, SavesTheBytesOfTheSaveCallWhenTheyAreCopiedUnderTheNextStep) {
  Train(kLessSlow, [&](Checkpointer& checkpoints, int64_t) {
    ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
    Fill(1);
    ASSERT_TRUE(checkpoints.SaveIfDue(1, State()).ok());
    ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
    Fill(-1);
    AwaitDurable(checkpoints, 1);
  });
  ExpectSaved(1, 1);
}

TEST_F(SlowStore, LoadsWhileASaveIsBeingWritten) {
  Train(kLessSlow, [&](Checkpointer& checkpoints, int64_t) {
    Fill(1);
    ASSERT_TRUE(checkpoints.Finish(1, State()).ok());
    Fill(2);
    ASSERT_TRUE(checkpoints.SaveIfDue(2, State()).ok());
    ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
    Fill(3);

    ExpectSaved(1, 1);  // as another program would see it
    EXPECT_EQ(checkpoints.Restore(State()).value(), 2);
    EXPECT_EQ(checkpoints.stats().restored_from, "memory");
    EXPECT_TRUE(Holds(2));
    Fill(4);

    EXPECT_EQ(checkpoints.stats().durable_step, 1) << "the save of step 2 is still being written";
    AwaitDurable(checkpoints, 2);
  });
  ExpectSaved(2, 2);
}

// One save at a time. What becomes due meanwhile is left out, but for the last.
TEST_F(SlowStore, LeavesOutWhatBecomesDueWhileOneIsWritten) {
  Seen seen;
  RunJob({.steps = 4,
          .floats = 500'000,
          .checkpoints = {.uri = folder_ / "root",
                          .every = Every::Steps(1),
                          .disk_bytes_per_second = kSlow,
                          .keep_last = 9,
                          .buffers = 3}},
         seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_THAT(seen.durable, ElementsAre(1, 4));
  EXPECT_TRUE(seen.skipped > 0 || !seen.notes.empty()) << "steps 2 and 3 vanished in silence";
  EXPECT_EQ(seen.failures.size(), 0u);
}

// A slow disk costs memory's snapshots nothing.
TEST_F(SlowStore, KeepsMemoryAtTheNewestStep) {
  Seen seen;
  std::atomic<bool> killed{false};
  RunJob({.steps = 60,
          .floats = 500'000,
          .checkpoints = {.uri = folder_ / "root",
                          .every = Every::Steps(5),
                          .snapshot_every = Every::Steps(1),
                          .disk_bytes_per_second = kSlow,
                          .keep_last = 9,
                          .buffers = 3},
          .at_step =
              [&](LocalWorld& world, outlast::Run& run, int64_t step) {
                absl::SleepFor(absl::Milliseconds(5));
                if (run.rank() == 1 && step == 47 && !killed.exchange(true)) world.KillRank(1);
              }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  ASSERT_EQ(seen.restored_steps.size(), 2u);
  EXPECT_GE(seen.restored_steps[1], 45);
}

TEST_F(SlowStore, KeepsTheBytesOfASaveWhenARankDiesMeanwhile) {
  Seen seen;
  std::atomic<bool> killed{false};
  RunJob({.steps = 8,
          .floats = 500'000,
          .checkpoints = {.uri = folder_ / "root",
                          .every = Every::Steps(1),
                          .disk_bytes_per_second = kSlow,
                          .keep_last = 9},
          .at_step =
              [&](LocalWorld& world, outlast::Run& run, int64_t step) {
                if (run.rank() == 1 && step == 4 && !killed.exchange(true)) world.KillRank(1);
              }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_EQ(seen.wrong_states, 0);
  ASSERT_EQ(seen.restored_from.size(), 2u);
  EXPECT_NE(seen.restored_from[1], "disk");
  ASSERT_EQ(seen.durable.front(), 1);
  const Listing listing = List();
  for (const CheckpointInfo& info : listing.checkpoints) {
    Toy loaded(500'000);
    const auto reader = CheckpointReader::Open(folder_ / ("root/" + info.name)).value();
    ASSERT_TRUE(reader->ReadState(loaded.State()).ok());
    EXPECT_TRUE(loaded.IsStateOf(info.step)) << info.name;
  }
}

TEST_F(SlowStore, HoldsBackNoSaverThatGoes) {
  Train(kStanding, [&](Checkpointer& checkpoints, int64_t) {
    Fill(1);
    ASSERT_TRUE(checkpoints.SaveIfDue(1, State()).ok());
    Fill(-1);
  });
  const Listing listing = List();
  ASSERT_EQ(listing.checkpoints.size(), 1u);
  ExpectSaved(1, 1);
}

// Both buffers are held by slow saves when the last state wants one.
TEST_F(SlowStore, HoldsBackNoFinish) {
  Seen seen;
  RunJob({.steps = 5,
          .checkpoints = {.uri = folder_ / "root",
                          .every = Every::Steps(1),
                          .disk_bytes_per_second = kStanding,
                          .buffers = 2}},
         seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_EQ(seen.durable.back(), 5);
}

TEST_F(SlowStore, HoldsBackNoStop) {
  Seen seen;
  std::atomic<bool> asked{false};
  RunJob({.steps = 1'000'000,
          .checkpoints = {.uri = folder_ / "root",
                          .every = Every::Steps(1),
                          .disk_bytes_per_second = kStanding,
                          .buffers = 2},
          .at_step =
              [&](LocalWorld& world, outlast::Run& run, int64_t step) {
                if (run.rank() == 0 && step == 5 && !asked.exchange(true)) world.AskStop();
              }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 80) << seen.result.reason;
  EXPECT_GE(seen.durable.back(), 6);
}

// A stop whose ranks can agree on nothing any more finds the newest common step on its way to the
// disk.
TEST_F(SlowStore, LetsAStopWithoutTrainersWaitForTheSaveThatIsBeingWritten) {
  Seen seen;
  std::atomic<bool> asked{false};
  const auto has_begun = [&] {
    return std::ranges::any_of(std::filesystem::directory_iterator(folder_ / "root"),
                               [](const std::filesystem::directory_entry& entry) {
                                 return entry.path().filename().string().starts_with("step-");
                               });
  };
  RunJob({.steps = 1'000'000,
          .floats = 500'000,
          .checkpoints = {.uri = folder_ / "root",
                          .every = Every::Steps(5),
                          .snapshot_every = Every::Steps(5),
                          .disk_bytes_per_second = kSlow},
          .at_step =
              [&](LocalWorld& world, outlast::Run& run, int64_t step) {
                if (run.rank() != 0 || step != 7 || asked.exchange(true)) return;
                while (!has_begun()) absl::SleepFor(absl::Milliseconds(2));
                world.AskStop();
                world.KillRank(1);
              }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 80) << seen.result.reason;
  EXPECT_THAT(seen.durable, ElementsAre(5));
}

TEST_F(SlowStore, IsHeldToItsRateAgainAfterAFinish) {
  Train(kLessSlow, [&](Checkpointer& checkpoints, int64_t) {
    Fill(1);
    ASSERT_TRUE(checkpoints.Finish(1, State()).ok());
    const int64_t started = MonotonicNanos();
    ASSERT_TRUE(checkpoints.SaveIfDue(2, State()).ok());
    AwaitDurable(checkpoints, 2);
    EXPECT_GE(MonotonicNanos() - started, int64_t{250} * (kBytes - kLessSlow / 10));
  });
}

}  // namespace
}  // namespace outlast
