// Commit.RestoresBitExactAfterAKillAtEverySystemCall of design/checkpoint.md, section 9.
#include "tests/fault/ckpt_job.h"

namespace outlast::testing {
namespace {

constexpr int kSecondSave = 2;
constexpr int64_t kStepA = 10;
constexpr int64_t kStepB = 20;

// step and rank -> digest, as the trainer's log tells.
std::map<std::pair<int64_t, int>, std::string> Digests(const CkptJob& job, Launched& launched) {
  std::map<std::pair<int64_t, int>, std::string> digests;
  std::istringstream text(launched.Read("log"));
  uint64_t generation;
  int64_t step;
  int rank;
  for (std::string digest; text >> generation >> step >> rank >> digest;)
    digests[{step, rank}] = digest;
  EXPECT_LE(digests.size(), static_cast<size_t>(kStepB * job.world));
  return digests;
}

// What the counted calls of an undisturbed save B are, and the digests of its run.
struct Undisturbed {
  int calls = 0;
  std::map<std::pair<int64_t, int>, std::string> digests;
};

Undisturbed CountCalls(int world) {
  CkptJob job;
  job.world = world;
  Undisturbed found;
  EXPECT_EQ(job.Run(ShimOrder{.from_save = kSecondSave}), 0) << job.Said();
  EXPECT_EQ(job.page().saves, 2u);
  EXPECT_EQ(job.CommittedSteps(), std::vector<int64_t>{kStepB});
  found.calls = static_cast<int>(job.page().calls);
  found.digests = Digests(job, job.launched());
  EXPECT_EQ(found.digests.size(), static_cast<size_t>(kStepB * world));
  std::string names;
  for (int k = 1; k <= found.calls; ++k) names += " " + job.CallName(k);
  std::printf("%d ranks, %d calls:%s\n", world, found.calls, names.c_str());
  return found;
}

// Save A committed, the whole job killed after call k of save B, then the same command again; the
// step that it restored.
void KillAndResume(int world, int k, const Undisturbed& undisturbed, int64_t* restored_step) {
  CkptJob job;
  job.world = world;
  ASSERT_EQ(job.Run(ShimOrder{.from_save = kSecondSave, .kill_at = k}), 128 + SIGKILL)
      << job.Said();
  ASSERT_EQ(job.page().killed, 1u) << "call " << k << " was not reached";
  SCOPED_TRACE("killed after call " + std::to_string(k) + ", " + job.CallName(k));
  ASSERT_EQ(CountAliveAfter(job.Pids(), absl::Seconds(10)), 0);

  // What is listed as committed is whole, and there is something.
  const std::vector<int64_t> committed = job.CommittedSteps();
  ASSERT_FALSE(committed.empty()) << job.launched().Read("tool.out");
  for (const int64_t step : committed) EXPECT_TRUE(step == kStepA || step == kStepB) << step;
  EXPECT_EQ(job.Tool("verify"), 0)
      << job.launched().Read("tool.out") << job.launched().Read("tool.err");

  ASSERT_EQ(job.Run(), 0) << job.Said();  // the trainer checks what it restored, and ends with 3
  const int64_t restored = job.RestoredStep();
  *restored_step = restored;
  EXPECT_TRUE(restored == kStepA || restored == kStepB) << restored;
  EXPECT_GE(restored, committed.back()) << "an older one than the newest committed";
  for (const Restored& one : job.Restores()) EXPECT_EQ(one.source, "disk");
  for (const auto& [at, digest] : Digests(job, job.launched()))
    EXPECT_EQ(digest, undisturbed.digests.at(at)) << "step " << at.first << " rank " << at.second;

  EXPECT_EQ(job.CommittedSteps().back(), kStepB);
  EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
}

void KillAtEveryCall(int world) {
  const Undisturbed undisturbed = CountCalls(world);
  ASSERT_GT(undisturbed.calls, 20);
  constexpr int kStride = kSanitized ? 5 : 1;
  std::vector<int64_t> restored;  // a kill
  for (int k = 1; k <= undisturbed.calls && !::testing::Test::HasFatalFailure(); k += kStride)
    KillAndResume(world, k, undisturbed, &restored.emplace_back());
  // A at first, B from one call on.
  EXPECT_TRUE(std::is_sorted(restored.begin(), restored.end()))
      << ::testing::PrintToString(restored);
  EXPECT_EQ(restored.front(), kStepA);
  EXPECT_EQ(restored.back(), kStepB);
}

// Case O14
TEST(Commit, RestoresBitExactAfterAKillAtEverySystemCall) { KillAtEveryCall(1); }
TEST(Commit, RestoresBitExactAfterAKillAtEverySystemCallOfTwoRanks) { KillAtEveryCall(2); }

}  // namespace
}  // namespace outlast::testing
