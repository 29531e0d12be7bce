// How survivors of a lost rank come back to the step that all have.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <set>
#include <string>

#include "tests/checkpoint/disk_fixture.h"
#include "tests/checkpoint/job_fixture.h"

namespace outlast {
namespace {

// What a job of three ranks saw that lost rank 1 once, in step 20, when all had sealed the state
// before it. (A rank of LocalWorld that is killed may still end its step.)
struct Loss {
  std::atomic<bool> killed{false};
  std::atomic<int> attempts_of_1{0};
  std::atomic<int> wrong{0};
  std::atomic<int> ahead{0};
  std::atomic<int> lost_nothing{0};
  std::atomic<int> served{0};  // by a replica
  std::function<void()> before_kill = [] {};
};

// Flips a byte in every buffer of the ranks, as a bad memory module would.
void DamageBuffersOf(const std::set<uint32_t>& ranks) {
  std::set<ino_t> seen;  // keeper and worker have descriptors of the same memory
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (!target.starts_with("/memfd:outlast-buffer")) continue;
    auto fd = Duplicate(std::stoi(entry.path().filename()));
    struct stat stat {};
    if (!fd.ok() || fstat(fd->get(), &stat) != 0 || !seen.insert(stat.st_ino).second) continue;
    const Buffer buffer = Buffer::Open(*std::move(fd)).value();
    const auto* header = reinterpret_cast<const BufferHeader*>(buffer.image().data() -
                                                               buffer.layout().image_offset());
    if (ranks.contains(header->rank)) buffer.image().back() ^= std::byte{1};
  }
}

LocalWorldResult RunWithLoss(
    const std::function<absl::Status(LocalWorld&, Run&, Checkpointer&, Toy&)>& each,
    CheckpointerOptions options) {
  std::unique_ptr<SaveService> service;
  LocalWorldOptions world_options;
  world_options.prepare = [&](Keeper& keeper) {
    service = std::make_unique<SaveService>(keeper, SaveServiceOptions{});
    keeper.Attach(service.get());
  };
  world_options.finish = [&](Keeper& keeper) {
    keeper.Detach(service.get());
    service.reset();
  };
  LocalWorld world(3, world_options);
  return world.Run([&](Run& run) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(const auto checkpoints, Checkpointer::Open(run, options));
    Toy toy;
    return each(world, run, *checkpoints, toy);
  });
}

absl::Status TrainOn(Generation& generation, LocalWorld& world, Run& run, Checkpointer& checkpoints,
                     Toy& toy, Loss& loss) {
  OUTLAST_ASSIGN_OR_RETURN(auto group, Group::Make(generation, run, "grads", 4096));
  OUTLAST_ASSIGN_OR_RETURN(int64_t step, checkpoints.Restore(toy.State()));
  if (!toy.IsStateOf(step)) ++loss.wrong;
  if (step >= 20) ++loss.lost_nothing;
  if (checkpoints.stats().restored_from == "replica") ++loss.served;
  for (; step < 30; ++step) {
    OUTLAST_RETURN_IF_ERROR(generation.Check());
    OUTLAST_RETURN_IF_ERROR(checkpoints.BeforeUpdate());  // all is sealed
    OUTLAST_RETURN_IF_ERROR(group.Barrier());
    if (step == 20 && run.rank() == 1 && !loss.killed.exchange(true)) {
      loss.before_kill();
      world.KillRank(1);
      return absl::CancelledError("killed");  // else it may end its step first, and all seal 21
    }
    OUTLAST_RETURN_IF_ERROR(group.Barrier());
    toy.Update(step);
    OUTLAST_RETURN_IF_ERROR(checkpoints.SaveIfDue(step + 1, toy.State()));
  }
  return checkpoints.Finish(30, toy.State());
}

// The snapshot is of the memory that the body had; the next body's is another, at the same address
// as like as not.
TEST(Survivor, IsRestoredAlsoWhereTheBodyMakesItsMemoryAnew) {
  TempFolder folder;
  Loss loss;
  const LocalWorldResult result = RunWithLoss(
      [&](LocalWorld& world, outlast::Run& run, Checkpointer& checkpoints, Toy&) {
        return run.ForEachGeneration([&](Generation& generation) {
          Toy made_anew;
          return TrainOn(generation, world, run, checkpoints, made_anew, loss);
        });
      },
      {.uri = folder / "root", .every = Every::Steps(1000), .snapshot_every = Every::Steps(1)});
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(loss.wrong, 0);
  EXPECT_EQ(loss.lost_nothing, 3);
}

TEST(Survivor, BringsItsStateBackWhileTheNewProcessStarts) {
  TempFolder folder;
  Loss loss;
  const LocalWorldResult result = RunWithLoss(
      [&](LocalWorld& world, outlast::Run& run, Checkpointer& checkpoints, Toy& toy) {
        if (run.rank() == 1 && loss.attempts_of_1++ > 0) usleep(500'000);  // imports, say
        bool changed = false;
        return run.ForEachGeneration([&](Generation& generation) {
          // What the last body left is gone before this one asks.
          if (changed && (toy.IsStateOf(20) || toy.IsStateOf(21))) ++loss.ahead;
          const absl::Status status = TrainOn(generation, world, run, checkpoints, toy, loss);
          if (absl::IsAborted(status)) {
            toy.Update(3);  // of no step's state
            changed = true;
          }
          return status;
        });
      },
      {.uri = folder / "root",
       .every = Every::Steps(1000),
       .snapshot_every = Every::Steps(1),
       .restore_ahead = true});
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(loss.wrong, 0);
  EXPECT_EQ(loss.lost_nothing, 3);
  EXPECT_EQ(loss.ahead, 2);
}

LocalWorldResult RunWithDamage(const std::set<uint32_t>& ranks, const std::string& root,
                               Loss& loss) {
  loss.before_kill = [&] { DamageBuffersOf(ranks); };
  return RunWithLoss(
      [&](LocalWorld& world, outlast::Run& run, Checkpointer& checkpoints, Toy& toy) {
        return run.ForEachGeneration([&](Generation& generation) {
          return TrainOn(generation, world, run, checkpoints, toy, loss);
        });
      },
      {.uri = root, .every = Every::Steps(1000), .snapshot_every = Every::Steps(1)});
}

TEST(Replica, ServesALostSlotWhoseOwnBuffersAreDamaged) {
  TempFolder folder;
  Loss loss;
  const LocalWorldResult result = RunWithDamage({1}, folder / "root", loss);
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(loss.wrong, 0);
  EXPECT_EQ(loss.lost_nothing, 3) << "nothing is on disk: the step is in the peers' memory";
  EXPECT_EQ(loss.served, 1);
}

// The first two replicas that are tried are damaged themselves.
TEST(Replica, IsLookedForUntilNoneIsLeft) {
  TempFolder folder;
  Loss loss;
  const LocalWorldResult result = RunWithDamage({0, 1}, folder / "root", loss);
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(loss.wrong, 0);
  EXPECT_EQ(loss.lost_nothing, 3);

  Loss all;
  EXPECT_EQ(RunWithDamage({0, 1, 2}, folder / "other", all).exit_code, 82)
      << "nor is anything on disk: never a silent step 0";
  EXPECT_EQ(all.wrong, 0);
}

}  // namespace
}  // namespace outlast
