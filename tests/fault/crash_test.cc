// Commit.RestoresBitExactAfterAKillAtEverySystemCall of design/checkpoint.md, section 9: the whole
// job, agent included, is killed after each call of a run that touches the root; then the same
// command runs to its end.
#include <set>

#include "tests/fault/ckpt_job.h"

namespace outlast::testing {
namespace {

constexpr int64_t kStepA = 10;
constexpr int64_t kStepB = 20;
constexpr int64_t kStepC = 30;

using Digests = std::map<std::pair<int64_t, int>, std::string>;  // by step and rank

// As the trainer's log tells.
Digests ReadDigests(CkptJob& job) {
  Digests digests;
  std::istringstream text(job.launched().Read("log"));
  uint64_t generation;
  int64_t step;
  int rank;
  for (std::string digest; text >> generation >> step >> rank >> digest;)
    digests[{step, rank}] = digest;
  return digests;
}

// Runs that are killed at every call.
struct Story {
  int world = 1;
  int64_t steps = kStepB;
  std::vector<ShimOrder> before;  // runs to kStepB that were killed on the root already
  int from_save = 0;              // calls count from this save's begin on; 0: from the start
  std::set<int64_t> may_restore = {kStepA, kStepB};
};

void Prepare(CkptJob& job, const Story& story) {
  job.world = story.world;
  job.trainer["--steps"] = std::to_string(kStepB);
  for (const ShimOrder& order : story.before) {
    EXPECT_EQ(job.Run(order), 128 + SIGKILL) << job.Said();
    EXPECT_EQ(CountAliveAfter(job.Pids(), absl::Seconds(10)), 0);
  }
  job.trainer["--steps"] = std::to_string(story.steps);
}

// The counted calls of a run that nobody kills, by name.
std::vector<std::string> CountCalls(const Story& story) {
  CkptJob job;
  Prepare(job, story);
  EXPECT_EQ(job.Run(ShimOrder{.from_save = story.from_save}), 0) << job.Said();
  std::vector<std::string> names;
  for (uint32_t k = 1; k <= job.page().calls; ++k)
    names.push_back(job.CallName(static_cast<int>(k)));
  std::printf("%d ranks, %zu calls:", story.world, names.size());
  for (const std::string& name : names) std::printf(" %s", name.c_str());
  std::printf("\n");
  return names;
}

// The digests of a job that nothing disturbs.
Digests RightDigests(const Story& story) {
  CkptJob job;
  Prepare(job, {.world = story.world, .steps = story.steps});
  EXPECT_EQ(job.Run(), 0) << job.Said();
  const Digests digests = ReadDigests(job);
  EXPECT_EQ(digests.size(), static_cast<size_t>(story.steps * story.world));
  return digests;
}

// Killed after call k, then the same command again; the step that it restored.
void KillAndResume(const Story& story, int k, const Digests& right, int64_t* restored) {
  CkptJob job;
  Prepare(job, story);
  ASSERT_EQ(job.Run(ShimOrder{.from_save = story.from_save, .kill_at = k}), 128 + SIGKILL)
      << job.Said();
  ASSERT_EQ(job.page().killed, 1u) << "call " << k << " was not reached";
  SCOPED_TRACE("killed after call " + std::to_string(k) + ", " + job.CallName(k));
  ASSERT_EQ(CountAliveAfter(job.Pids(), absl::Seconds(10)), 0);

  // What is listed as committed is whole. (85: killed before there was a root.)
  const bool may_lack_root = story.may_restore.contains(0);
  const int listed = job.Tool("ls");
  ASSERT_TRUE(listed == 0 || (may_lack_root && listed == 85)) << job.launched().Read("tool.err");
  const std::vector<int64_t> committed =
      listed == 0 ? job.CommittedSteps() : std::vector<int64_t>();
  ASSERT_TRUE(!committed.empty() || may_lack_root) << job.launched().Read("tool.out");
  for (const int64_t step : committed) EXPECT_TRUE(story.may_restore.contains(step)) << step;
  EXPECT_EQ(job.Tool("verify"), listed) << job.launched().Read("tool.out");

  ASSERT_EQ(job.Run(), 0) << job.Said();  // the trainer checks what it restored, and ends with 3
  *restored = job.RestoredStep();
  EXPECT_TRUE(story.may_restore.contains(*restored)) << *restored;
  if (!committed.empty()) {
    EXPECT_GE(*restored, committed.back()) << "not the newest";
  }
  for (const Restored& one : job.Restores()) EXPECT_EQ(one.source, one.step == 0 ? "-" : "disk");
  for (const auto& [at, digest] : ReadDigests(job))
    EXPECT_EQ(digest, right.at(at)) << "step " << at.first << " rank " << at.second;

  const std::vector<int64_t> left = job.CommittedSteps();
  EXPECT_EQ(left.back(), story.steps);
  // Retention follows a save.
  EXPECT_TRUE(left.size() == 1 || *restored == story.steps) << ::testing::PrintToString(left);
  EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
}

// What was restored after each kill. With `up_to`, the calls behind the first one of that name are
// left out.
std::vector<int64_t> KillAtEveryCall(const Story& story, const std::string& up_to = "") {
  const std::vector<std::string> names = CountCalls(story);
  const auto last = std::find(names.begin(), names.end(), up_to);
  const auto calls = static_cast<int>(last - names.begin()) + (last == names.end() ? 0 : 1);
  EXPECT_GT(calls, 10);
  const Digests right = RightDigests(story);
  constexpr int kStride = kSanitized ? 5 : 1;
  std::vector<int64_t> restored;
  for (int k = 1; k <= calls && !::testing::Test::HasFatalFailure(); k += kStride)
    KillAndResume(story, k, right, &restored.emplace_back());
  return restored;
}

// A second save, after a first one was committed: its predecessor is restored at first, and itself
// from one call on.
void KillInSecondSave(int world) {
  const std::vector<int64_t> restored = KillAtEveryCall({.world = world, .from_save = 2});
  EXPECT_TRUE(std::is_sorted(restored.begin(), restored.end()))
      << ::testing::PrintToString(restored);
  EXPECT_EQ(restored.front(), kStepA);
  EXPECT_EQ(restored.back(), kStepB);
}

// Case O14
TEST(Commit, RestoresBitExactAfterAKillAtEverySystemCall) { KillInSecondSave(1); }
TEST(Commit, RestoresBitExactAfterAKillAtEverySystemCallOfTwoRanks) { KillInSecondSave(2); }

// The root's making, the claim and the first save.
TEST(Commit, StartsAgainAfterAKillAtEverySystemCallOfTheFirstStart) {
  const std::vector<int64_t> restored =
      KillAtEveryCall({.steps = kStepA, .may_restore = {0, kStepA}});
  EXPECT_EQ(restored.front(), 0);
  EXPECT_EQ(restored.back(), kStepA);
}

// The resume of a job that was killed between its last receipt and its manifest, up to its own
// first save: the new claim and the roll-forward.
TEST(Commit, RestoresBitExactAfterAKillAtEverySystemCallOfAResume) {
  const std::vector<std::string> save = CountCalls({.from_save = 2});
  const auto receipt_done = std::find(save.begin(), save.end(), "unlink") - save.begin() + 1;
  const std::vector<int64_t> restored =
      KillAtEveryCall({.steps = kStepC,
                       .before = {{.from_save = 2, .kill_at = static_cast<int>(receipt_done)}},
                       .may_restore = {kStepA, kStepB}},
                      "mkdir");
  EXPECT_EQ(restored.back(), kStepB);
}

}  // namespace
}  // namespace outlast::testing
