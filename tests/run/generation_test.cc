// Ranks as threads over a real keeper: what a Run promises its trainer.
#include "outlast/run/generation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <set>
#include <thread>

#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"
#include "outlast/run/run.h"
#include "outlast/testing/local_world.h"
#include "outlast/testing/time_factor.h"

namespace outlast {
namespace {

using testing::LocalWorld;
using testing::LocalWorldOptions;
using testing::LocalWorldResult;
using testing::TimeFactor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(20);

TEST(ForEachGeneration, GivesEachRankItsPlace) {
  Mutex mutex;
  std::set<int> ranks;
  LocalWorld world(4);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) {
      EXPECT_EQ(generation.number(), 1u);
      EXPECT_EQ(generation.world(), 4);
      EXPECT_EQ(generation.rank(), run.rank());
      EXPECT_EQ(run.generation(), 1u);
      EXPECT_TRUE(generation.Check().ok());
      MutexLock lock(mutex);
      ranks.insert(generation.rank());
      return absl::OkStatus();
    });
  });

  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_THAT(ranks, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(result.spawns, 4);
}

TEST(ForEachGeneration, SurvivorsKeepTheirThreadAndTheDeadSlotIsRefilled) {
  LocalWorld world(3);
  std::atomic<int> entered_second{0};
  Mutex mutex;
  std::set<std::thread::id> threads_of_survivors;
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    const std::thread::id thread = std::this_thread::get_id();
    int memory = 0;  // of the process
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      EXPECT_EQ(std::this_thread::get_id(), thread);
      ++memory;
      if (generation.number() == 1) {
        OUTLAST_RETURN_IF_ERROR(generation.Put(std::to_string(generation.rank()), "here"));
        for (const char* peer : {"0", "1", "2"}) OUTLAST_RETURN_IF_ERROR(generation.Get(peer, kPatience).status());
        if (generation.rank() == 1) world.KillRank(1);
        const auto never = generation.Get("never", kPatience);
        EXPECT_THAT(never.status().code(), ::testing::AnyOf(absl::StatusCode::kAborted, absl::StatusCode::kCancelled));
        EXPECT_FALSE(generation.Check().ok());
        return never.status();
      }
      EXPECT_EQ(memory, generation.rank() == 1 ? 1 : 2);
      ++entered_second;
      MutexLock lock(mutex);
      if (generation.rank() != 1) threads_of_survivors.insert(thread);
      return absl::OkStatus();
    });
  });

  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(result.generation, 2u);
  EXPECT_EQ(entered_second, 3);
  EXPECT_EQ(threads_of_survivors.size(), 2u);
  EXPECT_EQ(result.spawns, 4);
  ASSERT_EQ(result.faults.size(), 1u);
  EXPECT_EQ(result.faults[0].rank, 1);
  EXPECT_EQ(result.faults[0].end.signal, SIGKILL);
}

}  // namespace
}  // namespace outlast
