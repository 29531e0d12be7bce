// What a trainer may rely on, step by step: one rank that saves by itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "outlast/base/clock.h"
#include "tests/checkpoint/disk_fixture.h"
#include "tests/checkpoint/job_fixture.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Tensors of many sizes, small ones that are copied at once among them, all of whose elements are
// one number: the step that they are of.
class Stamped {
 public:
  explicit Stamped(size_t tensors, size_t largest = 200'000) {
    for (size_t i = 0; i < tensors; ++i) {
      names_.push_back("layer." + std::to_string(i));
      values_.emplace_back(1 + i * 7919 % largest);
    }
  }
  StateView View() {
    StateView view;
    for (size_t i = 0; i < names_.size(); ++i) {
      const Shape shape{static_cast<int64_t>(values_[i].size())};
      view.regions.push_back({names_[i],
                              DType::kI64,
                              shape,
                              {},
                              shape,
                              std::as_writable_bytes(std::span(values_[i]))});
    }
    return view;
  }
  void Fill(int64_t stamp) {
    for (auto& values : values_) std::ranges::fill(values, stamp);
  }
  void FillOne(size_t tensor, int64_t stamp) { std::ranges::fill(values_[tensor], stamp); }
  const std::string& name(size_t tensor) const { return names_[tensor]; }
  size_t size() const { return names_.size(); }
  // How many tensors hold another number somewhere.
  int64_t Wrong(int64_t stamp) const {
    return std::ranges::count_if(values_, [&](const auto& values) {
      return std::ranges::any_of(values, [&](int64_t value) { return value != stamp; });
    });
  }

 private:
  std::deque<std::string> names_;
  std::deque<std::vector<int64_t>> values_;
};

using Body = std::function<void(Checkpointer&)>;
void TrainAlone(CheckpointerOptions options, const StateView& state, const Body& body) {
  const auto run = outlast::Run::Join().value();
  const auto checkpoints = Checkpointer::Open(*run, std::move(options)).value();
  const absl::Status status = run->ForEachGeneration([&](Generation&) -> absl::Status {
    OUTLAST_RETURN_IF_ERROR(checkpoints->Restore(state).status());
    body(*checkpoints);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

void AwaitDurable(const Checkpointer& checkpoints, int64_t step) {
  while (checkpoints.stats().durable_step < step && checkpoints.stats().failed_saves == 0)
    absl::SleepFor(absl::Microseconds(200));
  ASSERT_EQ(checkpoints.stats().durable_step, step);
}

// Each tensor is stamped with its step, and written over with something else the moment that
// BeforeUpdate returns: no snapshot in memory and no checkpoint on disk holds two stamps.
using Update = std::function<void(Checkpointer&, Stamped&, int64_t stamp)>;
void ExpectThatNoStepsMix(const Update& update) {
#ifdef OUTLAST_SANITIZED
  constexpr int64_t kSteps = 60;
#else
  constexpr int64_t kSteps = 150;
#endif
  TempFolder folder;
  Stamped state(60);
  int restores = 0;
  TrainAlone({.uri = folder / "root",
              .every = Every::Steps(9),
              .snapshot_every = Every::Steps(1),
              .keep_last = 1000},
             state.View(), [&](Checkpointer& checkpoints) {
               for (int64_t step = 1; step <= kSteps; ++step) {
                 update(checkpoints, state, step);
                 ASSERT_TRUE(checkpoints.SaveIfDue(step, state.View()).ok());
                 if (step % 10 != 0) continue;
                 ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
                 state.Fill(-step);
                 const int64_t restored = checkpoints.Restore(state.View()).value();
                 EXPECT_EQ(checkpoints.stats().restored_from, "memory");
                 ASSERT_GT(restored, 0);
                 ASSERT_EQ(state.Wrong(restored), 0) << "of step " << restored;
                 if (restored < step) state.Fill(restored);
                 ++restores;
               }
               EXPECT_EQ(checkpoints.stats().changed, 0);
               ASSERT_TRUE(checkpoints.Finish(kSteps, state.View()).ok());
             });
  EXPECT_EQ(restores, kSteps / 10);
  const auto root = Root::Open(folder / "root", {.access = Access::kRead}).value();
  const Listing listing = root->List().value();
  ASSERT_GE(listing.checkpoints.size(), 2u);
  for (const CheckpointInfo& info : listing.checkpoints) {
    Stamped loaded(60);
    const StateView view = loaded.View();
    ASSERT_TRUE(CheckpointReader::Open(root->PathOf(info.name)).value()->ReadState(view).ok());
    EXPECT_EQ(loaded.Wrong(info.step), 0) << info.name;
  }
}

TEST(Checkpointer, NeverMixesSteps) {
  ExpectThatNoStepsMix([](Checkpointer& checkpoints, Stamped& state, int64_t stamp) {
    ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
    state.Fill(-stamp);
    state.Fill(stamp);
  });
}

// The same of an optimizer that goes from tensor to tensor, in any order.
TEST(Checkpointer, NeverMixesStepsWhereEachRegionIsAnnouncedAlone) {
  std::mt19937 random(7);
  ExpectThatNoStepsMix([&](Checkpointer& checkpoints, Stamped& state, int64_t stamp) {
    std::vector<size_t> order(state.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t tensor : order) {
      ASSERT_TRUE(checkpoints.BeforeUpdate(state.name(tensor)).ok());
      state.FillOne(tensor, -stamp);
      state.FillOne(tensor, stamp);
    }
  });
}

// Regions that are not announced are taken for unchanged, as frozen weights are.
TEST(Checkpointer, SavesWhatIsNeverAnnouncedAlongWithWhatIs) {
  TempFolder folder;
  Stamped state(3);
  const auto fill = [&](int64_t stamp) {
    state.FillOne(0, stamp);
    state.FillOne(2, stamp);
  };
  TrainAlone(
      {.uri = folder / "root", .every = Every::Steps(1000), .snapshot_every = Every::Steps(1)},
      state.View(), [&](Checkpointer& checkpoints) {
        state.FillOne(1, 7);
        for (int64_t step = 1; step <= 50; ++step) {
          for (const size_t tensor : {0, 2}) {
            ASSERT_TRUE(checkpoints.BeforeUpdate(state.name(tensor)).ok());
            state.FillOne(tensor, step);
          }
          ASSERT_TRUE(checkpoints.SaveIfDue(step, state.View()).ok());
        }
        ASSERT_TRUE(checkpoints.Release(state.name(0)).ok());
        ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
        EXPECT_EQ(checkpoints.stats().sealed, 50);
        EXPECT_EQ(checkpoints.stats().changed, 0);
        state.Fill(-1);
        ASSERT_EQ(checkpoints.Restore(state.View()).value(), 50);
        fill(7);
        EXPECT_EQ(state.Wrong(7), 0);

        const absl::Status unknown = checkpoints.BeforeUpdate("layer.3");
        EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(unknown.message(),
                    AllOf(HasSubstr("'layer.3'"), HasSubstr("3 regions"), HasSubstr("'layer.0'")));
      });
}

#ifndef __SANITIZE_THREAD__  // a race on purpose
// A trainer that calls BeforeUpdate now and then, and not before other updates, is found out at the
// latest when a sample meets a chunk that changed; then it is slower, and no longer wrong.
TEST(Checkpointer, CopiesAtOnceOnceARegionWasSeenToChangeWithoutBeforeUpdate) {
  TempFolder folder;
  std::vector<float> weights(8'000'000);
  const Shape shape{static_cast<int64_t>(weights.size())};
  const StateView view{
      {{"w", DType::kF32, shape, {}, shape, std::as_writable_bytes(std::span(weights))}}, {}};
  TrainAlone(
      {.uri = folder / "root", .every = Every::Steps(1'000'000), .snapshot_every = Every::Steps(1)},
      view, [&](Checkpointer& checkpoints) {
        int64_t step = 0;
        // The copier takes milliseconds; the values turn over much faster.
        while (checkpoints.stats().changed == 0 && step < 5000) {
          ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
          ASSERT_TRUE(checkpoints.SaveIfDue(++step, view).ok());
          for (float& weight : weights) {
            std::atomic_ref<float>(weight).store(static_cast<float>(step),
                                                 std::memory_order_relaxed);
          }
        }
        ASSERT_EQ(checkpoints.stats().changed, 1);
        for (int i = 0; i < 20; ++i) {
          ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
          std::ranges::fill(weights, static_cast<float>(++step));
          ASSERT_TRUE(checkpoints.SaveIfDue(step, view).ok());
          std::ranges::fill(weights, -1.0F);
        }
        ASSERT_EQ(checkpoints.Restore(view).value(), step);
        EXPECT_TRUE(std::ranges::all_of(
            weights, [&](float weight) { return weight == static_cast<float>(step); }));
        EXPECT_EQ(checkpoints.stats().changed, 1);
      });
}
#endif

// orbax#626: a region that its owner freed while it was copied.
TEST(Checkpointer, CopiesWhatIsReleasedFirst) {
  constexpr size_t kBytes = size_t{16} << 20;
  TempFolder folder;
  const auto make = [] {
    return static_cast<std::byte*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  };
  const auto view_of = [](std::byte* memory) {
    const Shape shape{static_cast<int64_t>(kBytes)};
    return StateView{{{"w", DType::kU8, shape, {}, shape, {memory, kBytes}}}, {}};
  };
  std::byte* memory = make();
  TrainAlone({.uri = folder / "root", .every = Every::Steps(1'000'000)}, view_of(memory),
             [&](Checkpointer& checkpoints) {
               for (int64_t step = 1; step <= 20; ++step) {
                 ASSERT_TRUE(checkpoints.BeforeUpdate().ok());  // so that the copy is lazy
                 memset(memory, static_cast<int>(step), kBytes);
                 ASSERT_TRUE(checkpoints.SaveIfDue(step, view_of(memory)).ok());
                 ASSERT_TRUE(checkpoints.Release().ok());
                 munmap(memory, kBytes);  // whoever still reads it is killed
                 memory = make();
                 EXPECT_EQ(checkpoints.stats().sealed, step);
                 ASSERT_EQ(checkpoints.Restore(view_of(memory)).value(), step);
                 EXPECT_EQ(memory[kBytes - 1], static_cast<std::byte>(step));
               }
             });
  munmap(memory, kBytes);
}

// The disk holds one of two buffers for good, and memory's newest step the other.
TEST(Checkpointer, CountsEachSnapshotThatFindsNoBuffer) {
  TempFolder folder;
  Stamped state(3);
  TrainAlone({.uri = folder / "root",
              .every = Every::Steps(1),
              .snapshot_every = Every::Steps(1),
              .disk_bytes_per_second = 1'000,
              .buffers = 2},
             state.View(), [&](Checkpointer& checkpoints) {
               for (int64_t step = 1; step <= 10; ++step) {
                 ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
                 state.Fill(step);
                 ASSERT_TRUE(checkpoints.SaveIfDue(step, state.View()).ok());
               }
               ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
               EXPECT_EQ(checkpoints.stats().sealed, 2);
               EXPECT_EQ(checkpoints.stats().skipped, 8);
               ASSERT_EQ(checkpoints.Restore(state.View()).value(), 2);
               EXPECT_EQ(state.Wrong(2), 0);
             });
}

// What lies where the snapshot buffers are mapped.
std::set<std::string> BufferMappings() {
  std::set<std::string> mappings;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("outlast-buffer") != std::string::npos) mappings.insert(line);
  }
  return mappings;
}

double ResidentMiB() {
  std::ifstream file("/proc/self/statm");
  double pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

// orbax#1640, #2090: memory that grew with each save.
TEST(Checkpointer, MemoryIsFlatOverAHundredSaves) {
  TempFolder folder;
  Stamped state(1000, 2000);
  double resident = 0;
  TrainAlone({.uri = folder / "root", .every = Every::Steps(1), .keep_last = 2}, state.View(),
             [&](Checkpointer& checkpoints) {
               for (int64_t step = 1; step <= 120; ++step) {
                 ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
                 state.Fill(step);
                 ASSERT_TRUE(checkpoints.SaveIfDue(step, state.View()).ok());
                 ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
                 AwaitDurable(checkpoints, step);
                 if (step == 20) resident = ResidentMiB();
               }
             });
  EXPECT_GT(resident, 0);
#ifndef OUTLAST_SANITIZED  // these keep what was freed
  EXPECT_LT(ResidentMiB(), resident + 2) << "of 16 MB a snapshot";
#endif
}

// pytorch#183413: buffers that were made anew.
TEST(Checkpointer, KeepsItsBuffersOverAllSaves) {
  TempFolder folder;
  Stamped state(20);
  std::set<std::string> first;
  TrainAlone({.uri = folder / "root", .every = Every::Steps(3), .snapshot_every = Every::Steps(1)},
             state.View(), [&](Checkpointer& checkpoints) {
               for (int64_t step = 1; step <= 30; ++step) {
                 ASSERT_TRUE(checkpoints.BeforeUpdate().ok());
                 state.Fill(step);
                 ASSERT_TRUE(checkpoints.SaveIfDue(step, state.View()).ok());
                 if (step == 3) first = BufferMappings();
               }
               EXPECT_GE(first.size(), 4u);
               EXPECT_EQ(BufferMappings(), first);
             });
}

// By itself an interval of 30 minutes, or half an hour's worth of what an interruption may cost.
TEST(Checkpointer, AutoSavesOftenEnoughForTheTolerableLoss) {
  TempFolder folder;
  const auto saves_with = [&](const std::string& root, absl::Duration loss) {
    Seen seen;
    RunJob({.ranks = 2,
            .steps = 300,
            .checkpoints = {.uri = folder / root, .tolerable_loss = loss},
            .at_step = [](LocalWorld&, outlast::Run&, int64_t) { usleep(1000); }},
           seen);
    EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
    return seen.durable.size();
  };
  EXPECT_EQ(saves_with("unbounded", absl::InfiniteDuration()), 1u) << "the last step alone";
  // Half an interval of 20 ms on each of two ranks.
  EXPECT_GE(saves_with("bounded", absl::Milliseconds(20)), 4u);
}

// Looks at the thread that it is called on, the one that writes saves.
class PriorityHook final : public CommitHook {
 public:
  std::string_view name() const override { return "priority"; }
  absl::Duration deadline() const override { return absl::Seconds(10); }
  HookVerdict Check(const HookView&, const std::function<bool()>&) override {
    policy = sched_getscheduler(0);
    nice = getpriority(PRIO_PROCESS, 0);
    return {};
  }
  std::atomic<int> policy{-1}, nice{-100};
};

TEST(Checkpointer, WritesSavesInTheBackground) {
  TempFolder folder;
  Stamped state(2);
  const auto hook = std::make_shared<PriorityHook>();
  CheckpointerOptions options{.uri = folder / "root", .every = Every::Steps(1)};
  options.hooks.own = {hook};
  TrainAlone(options, state.View(), [&](Checkpointer& checkpoints) {
    ASSERT_TRUE(checkpoints.Finish(1, state.View()).ok());
  });
  EXPECT_EQ(hook->policy, SCHED_BATCH);
  EXPECT_EQ(hook->nice, std::max(5, getpriority(PRIO_PROCESS, 0)));
}

}  // namespace
}  // namespace outlast
