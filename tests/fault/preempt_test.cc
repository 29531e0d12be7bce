// Case O10: what a batch system's script makes of the exit codes.
#include <gmock/gmock.h>

#include <map>
#include <set>

#include "tests/fault/ckpt_job.h"

namespace outlast::testing {
namespace {

using ::testing::HasSubstr;

class Requeue : public ::testing::Test {
 protected:
  static constexpr int kSteps = 150;

  Requeue() {
    job_.world = 2;
    job_.trainer["--steps"] = std::to_string(kSteps);
    job_.trainer["--step-ms"] = "3";
    job_.trainer["--ckpt-every"] = "1000";  // a stop's save is the only one until the end
  }
  // As a script does, until the code is not that of "run it again"; then that code. The next of
  // `signals` comes to each attempt once it has made some steps.
  int RunAgainWhile(int code, std::vector<int> signals) {
    for (size_t attempt = 0;; ++attempt) {
      job_.Start();
      while (attempt < signals.size() && LinesOf("log") < 40 && is_alive(job_.launched().pid()))
        absl::SleepFor(absl::Milliseconds(1));
      if (attempt < signals.size()) kill(job_.launched().pid(), signals[attempt]);
      const int ended = job_.Wait();
      CountSteps();
      if (ended != code || attempt > signals.size()) return ended;
      EXPECT_EQ(job_.RestoredStep(), saved_) << "attempt " << attempt;
      saved_ = job_.CommittedSteps().back();
    }
  }
  size_t LinesOf(const std::string& file) {
    const std::string text = job_.launched().Read(file);
    return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  }
  void CountSteps() {
    std::istringstream log(job_.launched().Read("log"));
    uint64_t generation = 0;
    int64_t step = 0;
    int rank = 0;
    for (std::string digest; log >> generation >> step >> rank >> digest;) ++times_[{step, rank}];
    ++attempts_;
  }
  // Each step once by each rank, however often it was begun again.
  void ExpectCompleteOnce() {
    EXPECT_EQ(times_.size(), static_cast<size_t>(kSteps * job_.world));
    for (const auto& [step, times] : times_)
      EXPECT_EQ(times, 1) << "step " << step.first << " of rank " << step.second;
  }

  CkptJob job_;
  int64_t saved_ = 0;
  int attempts_ = 0;
  std::map<std::pair<int64_t, int>, int> times_;
};

TEST_F(Requeue, ThreePreemptionsByThreeSignalsMakeOneCompletion) {
  EXPECT_EQ(RunAgainWhile(80, {SIGTERM, SIGUSR1, SIGUSR2}), 0) << job_.Said();
  EXPECT_EQ(attempts_, 4);
  ExpectCompleteOnce();
}

TEST_F(Requeue, ACodeOfTheUsersOwnDoesTheSame) {
  job_.run_options = {"--preempt-exit", "99"};
  EXPECT_EQ(RunAgainWhile(99, {SIGUSR2, SIGTERM, SIGUSR1}), 0) << job_.Said();
  EXPECT_EQ(attempts_, 4);
  ExpectCompleteOnce();
}

// For schedulers that want it so: who asks the record still tells the two apart.
TEST_F(Requeue, ZeroForAPreemptionIsToldApartByTheReport) {
  job_.run_options = {"--preempt-exit", "0"};
  job_.Start();
  while (LinesOf("log") < 40 && is_alive(job_.launched().pid()))
    absl::SleepFor(absl::Milliseconds(1));
  kill(job_.launched().pid(), SIGTERM);
  EXPECT_EQ(job_.Wait(), 0) << job_.Said();
  const nlohmann::json stopped = job_.launched().Report();
  EXPECT_EQ(stopped["stop"]["saved_step"], job_.CommittedSteps().back()) << stopped;
  EXPECT_THAT(job_.Said(), HasSubstr("exit code 0: stopped (signal 15): step "));
  EXPECT_EQ(job_.Run(), 0) << job_.Said();
  EXPECT_TRUE(job_.launched().Report()["stop"].is_null());
}

}  // namespace
}  // namespace outlast::testing
