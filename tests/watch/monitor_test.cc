// The whole way, with ranks as threads over the real keeper: black box, poll, verdict, evidence,
// new generation.
#include "watch/monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>

#include "outlast/base/clock.h"
#include "outlast/base/status.h"
#include "outlast/testing/local_world.h"
#include "outlast/watch/watchdog.h"
#include "tests/support/temp_folder.h"
#include "tests/watch/no_stacks.h"

namespace outlast {
namespace {

using ::testing::SizeIs;

WatchdogOptions Quick(WatchMode mode) {
  return {.mode = mode,
          .poll = absl::Milliseconds(50),
          .floor = absl::Milliseconds(200),
          .looks_apart = absl::Milliseconds(100)};
}

// Rank 1 blocks in its loader in generation 1, past the limit that it declared; rank 0 waits.
absl::Status BlockOnce(Run& run, WatchMode mode) {
  OUTLAST_ASSIGN_OR_RETURN(auto watchdog, Watchdog::Start(run, Quick(mode)));
  return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
    if (generation.number() > 1) return absl::OkStatus();
    const SectionScope load = run.Section(
        "load", {.phase = Phase::kData,
                 .limit = run.rank() == 1 ? absl::Milliseconds(300) : absl::InfiniteDuration()});
    while (!generation.is_aborted()) Clock::Real().SleepFor(absl::Milliseconds(5));
    return generation.Check();
  });
}

TEST(Monitor, EndsTheGenerationOfARankThatBlocksWithTheEvidenceOnDisk) {
  const TempFolder run_dir;
  NoStacks host;
  std::vector<Verdict> findings;
  std::string folder;
  std::unique_ptr<Monitor> monitor;
  testing::LocalWorldOptions options;
  options.run_dir = run_dir.path();
  options.prepare = [&](Keeper& keeper) {
    monitor = std::make_unique<Monitor>(
        keeper, host,
        MonitorListener{.on_finding = [&](const Verdict& verdict, const std::string& at) {
          findings.push_back(verdict);
          folder = at;
        }});
    keeper.Attach(monitor.get());
  };
  testing::LocalWorld world(2, options);

  const testing::LocalWorldResult result =
      world.Run([](outlast::Run& run) { return BlockOnce(run, WatchMode::kAct); });

  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(result.generation, 2u);
  EXPECT_EQ(result.spawns, 2);  // survivors are not restarted
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_EQ(VerdictClassName(findings[0].verdict_class), "data_loader_stall");
  ASSERT_THAT(findings[0].culprits, SizeIs(1));
  EXPECT_EQ(findings[0].culprits[0].rank, 1);
  EXPECT_EQ(findings[0].culprits[0].section, "load");
  ASSERT_THAT(result.faults, SizeIs(1));
  EXPECT_EQ(result.faults[0].rank, 1);
  EXPECT_EQ(result.faults[0].found_by, "watchdog: data_loader_stall");
  ASSERT_THAT(host.asked, SizeIs(1));
  EXPECT_EQ(host.asked[0], std::vector<int>{1});
  EXPECT_TRUE(std::filesystem::exists(folder + "/verdict.json"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/rank0.box"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/rank1.box"));
}

}  // namespace
}  // namespace outlast
