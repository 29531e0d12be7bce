#include "meter/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "outlast/base/status.h"
#include "tests/meter/ledger_builder.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

class Report : public ::testing::Test {
 protected:
  // A RUN_DIR with these records; its path. The builders' run ids are alike, so each folder gets
  // its own.
  std::string RunDir(const std::string& name, RunEntries entries) const {
    const std::string dir = root_ + "/" + name;
    std::filesystem::create_directory(dir);
    std::get<ClockDomainEntry>(entries[0]).run_id = Id128::FromName(name);
    EXPECT_TRUE(LedgerWriter::Open(dir + "/ledger.bin").value().Append(entries).ok());
    return dir;
  }
  int Run(std::vector<std::string> args) {
    out_.str("");
    err_.str("");
    return RunReportTool(args, out_, err_);
  }

  const TempFolder temp_;
  const std::string root_ = temp_.path();
  std::ostringstream out_, err_;
};

// Two ranks, 0.1 s steps of 1000 tokens a rank. Rank 1 is killed in step 20; one finished step runs
// again.
LedgerBuilder TwoRanksOneKill(double peak) {
  LedgerBuilder ledger;
  for (const int32_t slot : {0, 1}) {
    ledger.Up(0, 1, slot)
        .Add(MeterEntry{.slot = slot,
                        .flops_per_unit = 1'000'000,
                        .peak_flops_per_second = peak,
                        .flops_text = "1000000 FLOPs a token; causal attention",
                        .peak_text = peak > 0 ? "declared" : "unknown peak (no device was named)"});
    for (int64_t step = 0; step < 20; ++step) {
      StepEntry entry =
          LedgerBuilder::Step(1 + 0.1 * static_cast<double>(step), 1, step, 0.1, 0, slot);
      entry.model_flops = 1e9;
      ledger.Add(entry);
    }
    for (int64_t step = 0; step < 10; ++step) {
      StepEntry entry =
          LedgerBuilder::Step(3.2 + 0.1 * static_cast<double>(step), 2, 19 + step, 0.1, 0, slot);
      entry.model_flops = 1e9;
      ledger.Add(entry);
    }
  }
  ledger.Detected(3.05, 3.04, 1, 1, 20, "crash", "pidfd: signal 9 (SIGKILL)")
      .Killed(3.04, 1, 1)
      .Up(3.1, 2, 1);
  ledger.Add(RollbackEntry{.time_ns = Nanos(3.15),
                           .generation = 2,
                           .resume_step = 19,
                           .reached_step = 20,
                           .source = StateSource::kMemory});
  return ledger.End(4.2);
}

TEST_F(Report, ShowsEachInterruptionAndTheWayBack) {
  const std::string dir = RunDir("a", TwoRanksOneKill(0).entries());
  ASSERT_EQ(Run({dir}), 0) << err_.str();
  const std::string text = out_.str();
  EXPECT_NE(text.find("  #  what   rank  step  how found                  to detect  to the next "
                      "step  steps lost  "
                      "state from\n"
                      "  1  crash  1     20    pidfd: signal 9 (SIGKILL)  10 ms      150 ms        "
                      "    1           "
                      "memory\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("29 steps; after interruptions 1 finished ones and 0 unfinished ones were "
                      "run again\nstep time p50 100 ms, p99 100 ms\n"
                      "20000 tokens/s, 58000 tokens\n"),
            std::string::npos)
      << text;
  EXPECT_NE(
      text.find("MFU n/a, 20 GFLOP/s of model FLOPs\n  1000000 FLOPs a token; causal attention\n"
                "  unknown peak (no device was named)\n"),
      std::string::npos)
      << text;
  EXPECT_NE(text.find("ended with exit code 0 (finished)"), std::string::npos) << text;
}

TEST_F(Report, PrintsPartsThatSumToWallToTheNanosecond) {
  const std::string dir = RunDir("a", TwoRanksOneKill(0).entries());
  ASSERT_EQ(Run({dir, "--json"}), 0);
  const auto json = nlohmann::json::parse(out_.str(), nullptr, false);
  ASSERT_TRUE(json.is_object());
  int64_t sum = 0;
  for (const auto& [state, nanos] : json["states_ns"].items()) sum += nanos.get<int64_t>();
  EXPECT_EQ(json["wall_ns"], Nanos(4.2));
  EXPECT_EQ(sum, Nanos(4.2));
  EXPECT_EQ(json["states_ns"]["productive"], Nanos(2.9));
  EXPECT_EQ(json["states_ns"]["lost_work"], Nanos(0.1 + 0.04));  // step 19, and 0.04 s of step 20
  EXPECT_EQ(json["states_ns"]["hang_wait"], Nanos(0.01));
  EXPECT_EQ(json["states_ns"]["recovery"], Nanos(0.05));
  EXPECT_EQ(json["interruptions"][0]["rank"], 1);
  EXPECT_EQ(json["interruptions"][0]["state_from"], "memory");
  EXPECT_TRUE(json["mfu"].is_null());
  EXPECT_TRUE(json["interruptions"][0]["unattended"]);
}

TEST_F(Report, DividesByThePeaksOfAllRanks) {
  // 2 ranks x 1e9 FLOPs in 0.1 s = 20 GFLOP/s of 2 x 20 GFLOP/s.
  const std::string dir = RunDir("a", TwoRanksOneKill(20e9).entries());
  EXPECT_NEAR(*BuildReport(std::vector<std::string>{dir})->mfu, 0.5, 1e-9);
}

TEST_F(Report, FlagsAnMfuAbove100PercentAndDoesNotClipIt) {
  const std::string dir = RunDir("a", TwoRanksOneKill(1e10 / 1.3).entries());
  ASSERT_EQ(Run({dir}), 0);
  EXPECT_NE(out_.str().find("MFU 130.00 %, 20 GFLOP/s of model FLOPs\n  above 100 %: an input is "
                            "wrong (the peak, the "
                            "FLOP convention, or gradient accumulation)\n"),
            std::string::npos)
      << out_.str();
  ASSERT_EQ(Run({dir, "--json"}), 0);
  EXPECT_TRUE(nlohmann::json::parse(out_.str(), nullptr, false)["mfu_is_impossible"]);
}

TEST_F(Report, KeepsTheRateAndTheLifetimeCounterAcrossAResume) {
  // 1000 tokens a 0.1 s step: 50 steps, then 20 more an hour later, with 3 s of evaluation in
  // between them.
  LedgerBuilder first;
  first.Up(0, 1).Steps(1, 1, 0, 50, 0.1).End(6, 80);
  LedgerBuilder second(3600, 1e9 + 3600);
  second.Up(3600, 1).Steps(3601, 1, 50, 10, 0.1);
  second.Add(SectionEntry{
      .start_ns = Nanos(3602), .end_ns = Nanos(3605), .generation = 1, .phase = Phase::kEval});
  second.Steps(3605, 1, 60, 10, 0.1).End(3606);
  const std::vector<std::string> dirs = {RunDir("first", first.entries()),
                                         RunDir("second", second.entries())};
  const RunReport alone = BuildReport({&dirs[0], 1}).value();
  const RunReport both = BuildReport(dirs).value();
  EXPECT_EQ(alone.tokens, 50'000u);
  EXPECT_NEAR(*alone.tokens_per_second, 10'000, 1);
  EXPECT_EQ(both.tokens, 70'000u);
  EXPECT_NEAR(*both.tokens_per_second, 10'000, 1);
  EXPECT_EQ(both.timeline.in(JobState::kEval), Nanos(3));
}

TEST_F(Report, CountsALinkToAFolderOnce) {
  const std::string dir = RunDir("a", TwoRanksOneKill(0).entries());
  std::filesystem::create_directory_symlink(dir, root_ + "/latest");
  const std::vector<std::string> dirs = {dir, root_ + "/latest"};
  EXPECT_EQ(BuildReport(dirs)->timeline.runs, 1u);
}

// One invocation of a node of the run, an hour after the former one.
LedgerBuilder OfNode(const std::string& run, const std::string& node, int hour = 0) {
  LedgerBuilder ledger(3600 * hour, 1e9 + 3600 * hour);
  ledger.Add(
      JoinedEntry{.time_ns = Nanos(3600 * hour), .run_id = Id128::FromName(run), .node = node});
  return ledger.Up(3600 * hour, 1).Steps(3600 * hour + 1, 1, 50 * hour, 50, 0.1);
}

TEST_F(Report, RefusesTwoNodesOfOneRun) {
  const std::string a = RunDir("a", OfNode("run", "n1").entries());
  const std::string b = RunDir("b", OfNode("run", "n2").entries());
  const std::string c = RunDir("c", OfNode("later", "n1", 1).entries());
  EXPECT_EQ(Run({a, c, b}), 85);
  EXPECT_EQ(err_.str(), "outlast report: " + a + " (node n1) and " + b +
                            " (node n2) are of one run, side by side and not after each other: "
                            "give one folder of each run\n");
  EXPECT_EQ(out_.str(), "");
  EXPECT_EQ(Run({a}), 0);
  EXPECT_EQ(Run({b}), 0);
}

TEST_F(Report, TakesInvocationsOfOneNodeAndThoseOfDifferentRuns) {
  const std::string a = RunDir("a", OfNode("run", "n1").entries());
  // The same run, whose coordinator has lived on.
  const std::string again = RunDir("again", OfNode("run", "n1", 1).entries());
  const std::string later = RunDir("later", OfNode("later", "n2", 2).entries());
  const std::vector<std::string> dirs = {a, again, later};
  const RunReport report = BuildReport(dirs).value();
  EXPECT_EQ(report.timeline.runs, 3u);
  EXPECT_EQ(report.steps_finished, 150);
  EXPECT_EQ(report.steps_lost, 0);
}

TEST_F(Report, ReadsACutLedgerAndSaysSo) {
  const std::string dir = RunDir("a", TwoRanksOneKill(0).entries());
  const std::string path = dir + "/ledger.bin";
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 5);
  ASSERT_EQ(Run({dir}), 0);
  EXPECT_NE(out_.str().find("bytes are no whole record and were left out"), std::string::npos)
      << out_.str();
  EXPECT_NE(out_.str().find("no end record: it still runs, or its agent was killed"),
            std::string::npos);
  std::filesystem::resize_file(path, 10);
  EXPECT_EQ(Run({dir}), 85) << "no whole record is left: nothing is known of this run";
  std::filesystem::resize_file(path, 0);
  EXPECT_EQ(Run({dir}), 0) << err_.str();
}

TEST_F(Report, NeverSteersTheTerminalOrBreaksJson) {
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(0, 1, 0, 3, 1).Detected(3, 3, 1, 0, 3, "crash\x1b[2J", "bad \xff byte\n");
  const std::string dir = RunDir("a", ledger.entries());
  ASSERT_EQ(Run({dir}), 0);
  EXPECT_EQ(out_.str().find('\x1b'), std::string::npos);
  ASSERT_EQ(Run({dir, "--json"}), 0);
  EXPECT_TRUE(nlohmann::json::parse(out_.str(), nullptr, false).is_object());
}

TEST_F(Report, RefusesBadInputWithOneLineAnd85) {
  const std::string empty = root_ + "/empty";
  std::filesystem::create_directory(empty);
  const std::string file = root_ + "/file";
  std::ofstream(file) << "x";
  const std::string foreign = root_ + "/foreign";
  std::filesystem::create_directory(foreign);
  std::ofstream(foreign + "/ledger.bin") << "this is a text and no ledger at all, whoever wrote it";
  RunEntries other_job = TwoRanksOneKill(0).entries();
  std::get<ClockDomainEntry>(other_job[0]).job_id = Id128::FromName("other");
  const std::string a = RunDir("a", TwoRanksOneKill(0).entries());
  const std::string b = RunDir("b", other_job);

  const struct {
    std::vector<std::string> args;
    std::string wanted;
  } kCases[] = {
      {{}, "no RUN_DIR was given, wanted at least one"},
      {{root_ + "/nowhere"}, "RUN_DIR " + root_ + "/nowhere: No such file or directory"},
      {{file}, "RUN_DIR " + file + " is not a folder"},
      {{empty}, "RUN_DIR " + empty + " has no ledger.bin: no run wrote here"},
      {{foreign}, foreign + "/ledger.bin is no ledger: its first record is no clock_domain record"},
      {{a, b}, "one report is about one job"},
      {{a, "--jsno"}, "unknown flag --jsno, wanted RUN_DIR... [--json]"}};
  for (const auto& each : kCases) {
    EXPECT_EQ(Run(each.args), 85) << each.wanted;
    const std::string said = err_.str();
    EXPECT_NE(said.find(each.wanted), std::string::npos) << said;
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1);
    EXPECT_EQ(out_.str(), "");
  }
  EXPECT_EQ(Run({"--help"}), 0);
}

}  // namespace
}  // namespace outlast
