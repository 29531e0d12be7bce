// What the ledger knows of steps that a kill cut off.
#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <thread>

#include "outlast/meter/ledger_file.h"
#include "tests/fault/launched.h"

namespace outlast {
namespace {

using testing::Launched;
using testing::TimeFactor;

std::vector<std::string> Training(const Launched& job, int steps, const std::string& deed = "") {
  std::vector<std::string> arguments = {
      "-n",       "4",
      "--",       testing::BuildFolder() / "tests" / "outlast_hang_trainer",
      "--folder", job.folder(),
      "--steps",  std::to_string(steps)};
  if (!deed.empty()) arguments.insert(arguments.end(), {"--do", deed});
  return arguments;
}

std::vector<StepEntry> StepsOf(const Launched& job) {
  const auto read = ReadLedger(job.Path("outlast-runs/latest/ledger.bin"));
  std::vector<StepEntry> steps;
  if (!read.ok()) return steps;
  for (const LedgerEntry& entry : read->entries) {
    if (const auto* step = std::get_if<StepEntry>(&entry)) steps.push_back(*step);
  }
  return steps;
}

bool IsCut(const StepEntry& step) { return (step.flags & kStepAborted) != 0; }

bool Await(const std::function<bool()>& condition) {
  const int64_t deadline =
      MonotonicNanos() + absl::ToInt64Nanoseconds(absl::Seconds(20) * TimeFactor());
  while (!condition()) {
    if (MonotonicNanos() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

// Of the saves in events.jsonl; 0: none.
int64_t NewestSaveOf(const std::string& events) {
  int64_t newest = 0;
  std::istringstream lines(events);
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json event = nlohmann::json::parse(line, nullptr, false);
    if (event.is_object() && event.value("event", "") == "saved")
      newest = std::max(newest, event.value("step", int64_t{0}));
  }
  return newest;
}

TEST(RunLedger, HoldsTheStepThatARankWasKilledIn) {
  Launched job;
  ASSERT_EQ(job.Run(Training(job, 60, "die:1:40:10")), 0) << job.Read("err");
  const std::vector<StepEntry> steps = StepsOf(job);
  EXPECT_EQ(std::count_if(steps.begin(), steps.end(),
                          [](const StepEntry& step) {
                            return step.slot == 1 && step.step == 40 && step.generation == 1 &&
                                   IsCut(step);
                          }),
            1);
  EXPECT_EQ(std::count_if(steps.begin(), steps.end(),
                          [](const StepEntry& step) {
                            return step.slot == 1 && step.step == 40 && !IsCut(step);
                          }),
            1);
}

// The agent looks at the steps once a second: what came since then is written by the guardian.
TEST(RunLedger, IsCompleteUpToTheKillOfTheAgent) {
  Launched job;
  job.Start(Training(job, 100'000));
  const std::string events = "outlast-runs/latest/events.jsonl";
  // Not an exact step: a save that nobody waits for is dropped while another is written.
  ASSERT_TRUE(Await([&] { return NewestSaveOf(job.Read(events)) >= 50; }));
  kill(job.pid(), SIGKILL);
  EXPECT_EQ(job.Wait().code, 128 + SIGKILL);
  std::map<int, std::vector<StepEntry>> by_slot;
  ASSERT_TRUE(Await([&] {
    by_slot.clear();
    for (const StepEntry& step : StepsOf(job)) by_slot[step.slot].push_back(step);
    return by_slot.size() == 4 && std::all_of(by_slot.begin(), by_slot.end(), [](const auto& slot) {
             return IsCut(slot.second.back());
           });
  }));
  for (const auto& [slot, steps] : by_slot) {
    EXPECT_GT(steps.size(), 50u);
    for (size_t i = 0; i < steps.size(); ++i) {  // each step once, and the open one last
      EXPECT_EQ(steps[i].step, static_cast<int64_t>(i)) << "slot " << slot;
      EXPECT_EQ(IsCut(steps[i]), i + 1 == steps.size());
    }
  }
  // The same command goes on from the disk, and the report knows what that cost.
  std::filesystem::path latest = std::filesystem::read_symlink(job.Path("outlast-runs/latest"));
  if (latest.is_relative()) latest = job.Path("outlast-runs") / latest;
  int64_t reached = 0;  // a rank may be a step ahead of another
  for (const auto& [slot, steps] : by_slot) reached = std::max(reached, steps.back().step);
  ASSERT_EQ(job.Run(Training(job, static_cast<int>(reached) + 30)), 0) << job.Read("err");
  job.StartProgram(
      {testing::ToolPath(), "report", "--json", latest, job.Path("outlast-runs/latest")});
  ASSERT_EQ(job.Wait().code, 0);
  const std::string out = job.Read("out");
  const nlohmann::json report = nlohmann::json::parse(out.substr(out.find('{')), nullptr, false);
  ASSERT_TRUE(report.is_object()) << out;
  EXPECT_EQ(report["steps_finished"], reached + 30);
  EXPECT_EQ(report["interruptions"].size(), 1u);
  const int64_t resumed = reached - report["interruptions"][0]["steps_lost"].get<int64_t>();
  EXPECT_EQ(resumed % 10, 0);  // a checkpoint on disk
  EXPECT_EQ(report["steps_run_again"], reached - resumed + 1);
}

}  // namespace
}  // namespace outlast
