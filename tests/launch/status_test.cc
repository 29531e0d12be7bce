#include "outlast/base/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "launch/event_log.h"
#include "launch/job_status.h"
#include "launch/metrics_text.h"
#include "launch/status_service.h"
#include "launch/status_text.h"
#include "tests/support/metrics_lint.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using nlohmann::ordered_json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MetricsLint;
using ::testing::Not;
using ::testing::StartsWith;

RankStatus RunningRank(int rank, int64_t step) {
  return {.rank = rank,
          .slot = rank,
          .pid = 4000 + rank,
          .state = "running",
          .step = step,
          .phase = "backward",
          .section = "backward",
          .age_seconds = 0.25,
          .limit_seconds = 10.0,
          .limit_source = "learned"};
}

JobStatus RunningJob() {
  JobStatus status;
  status.job = "gpt";
  status.run_id = "00112233445566778899aabbccddeeff";
  status.run_dir = "/runs/gpt-1";
  status.host = "node7";
  status.command = {"trainer", "--steps", "9"};
  status.phase = "running";
  status.agent_pid = 77;
  status.agent_state = "answers";
  status.started_at = "2026-11-30T10:00:00.000Z";
  status.seconds = 125;
  status.generation = 2;
  status.world = 2;
  status.workers_started = 3;
  status.ranks = {RunningRank(0, 118), RunningRank(1, 117)};
  status.ranks[1].end = "signal 9";
  status.faults = 1;
  status.faults_by_class = {{"crash", 1}};
  status.last_fault =
      FaultStatus{"crash", 1, "", 1, "rank 1: killed by signal 9", "2026-11-30T10:02:00.000Z"};
  status.budget_used = 1;
  status.budget = 3;
  status.saves = 4;
  status.saved_bytes = 4'000'000;
  status.checkpoint =
      CheckpointStatus{100, "step-100-abcd", 1'000'000, 0.5, "2026-11-30T10:01:59.000Z"};
  return status;
}

absl::Time FiveSecondsAfterTheFault() {
  return absl::FromCivil(absl::CivilSecond(2026, 11, 30, 10, 2, 5), absl::UTCTimeZone());
}

// --- Text ---

TEST(StatusText, SaysWhatAPersonAsksFirst) {
  const std::string text = StatusText(RunningJob(), {}, FiveSecondsAfterTheFault());

  EXPECT_EQ(text,
            "job gpt: running, generation 2 of 2 ranks, for 2 min 5 s\n"
            "RUN_DIR    /runs/gpt-1\n"
            "run id     00112233445566778899aabbccddeeff\n"
            "agent      process 77 on node7: answers\n"
            "faults     1; 1 of 3 restarts used; last: rank 1: killed by signal 9 (crash) in "
            "generation 1, 5.0 s ago\n"
            "saved      step 100, 1.0 MB in 500 ms, 6.0 s ago: step-100-abcd\n"
            "rank  pid   state    step  in        for     limit           last end\n"
            "0     4000  running  118   backward  250 ms  10.0 s learned\n"
            "1     4001  running  117   backward  250 ms  10.0 s learned  signal 9\n");
}

TEST(StatusText, OfAnEndedRunNamesItsExitCode) {
  JobStatus status = RunningJob();
  status.phase = "ended";
  status.agent_state = "ended";
  status.exit_code = 83;
  status.reason = "restarts used up";

  const std::string text = StatusText(status, {}, FiveSecondsAfterTheFault());

  EXPECT_THAT(text, StartsWith("job gpt: ended with exit code 83, generation 2 of 2 ranks, after "
                               "2 min 5 s\nreason     restarts used up\n"));
}

TEST(StatusText, HasEscapesOnlyWhereColoursAreWanted) {
  JobStatus status = RunningJob();
  status.ranks[0].state = "stopped";

  const absl::Time now = FiveSecondsAfterTheFault();
  EXPECT_THAT(StatusText(status, {}, now), Not(HasSubstr("\x1b")));
  EXPECT_THAT(StatusText(status, {.colour = Colour::kYes}, now), HasSubstr("\x1b[31m0     4000"));
}

TEST(StatusText, LetsNothingOfATrainerSteerTheTerminal) {
  JobStatus status = RunningJob();
  status.ranks[0].section = "a\x1b[2Jb";
  status.last_fault->detail = "x\ny";

  const std::string text = StatusText(status, {}, FiveSecondsAfterTheFault());

  EXPECT_THAT(text, HasSubstr("a?[2Jb"));
  EXPECT_THAT(text, HasSubstr("last: x?y"));
}

TEST(StatusText, CutsLinesAtTheTerminalsWidthBetweenCharacters) {
  JobStatus status = RunningJob();
  status.run_dir = "/läufe/" + std::string(60, 'x');

  const std::string text = StatusText(status, {.width = 20}, FiveSecondsAfterTheFault());

  EXPECT_THAT(text, HasSubstr("\nRUN_DIR    /läufe/xx\n"));
}

TEST(StatusText, ShowsTheRanksThatStandStillLongestWhereThereIsNoRoomForAll) {
  JobStatus status = RunningJob();
  for (int rank = 2; rank < 8; ++rank) status.ranks.push_back(RunningRank(rank, 118));
  status.ranks[5].age_seconds = 9;

  const std::string text = StatusText(status, {.max_ranks = 1}, FiveSecondsAfterTheFault());

  EXPECT_THAT(text, HasSubstr("\n5     4005  running"));
  EXPECT_THAT(text, Not(HasSubstr("\n0     4000")));
  EXPECT_THAT(text, HasSubstr("... and 7 more, which moved more lately\n"));
}

TEST(StatusText, DrawsBarsWhereThereIsRoom) {
  JobStatus status = RunningJob();
  status.ranks[0].step = 100;
  status.ranks[1].step = 50;
  status.ranks[1].age_seconds = 5;  // of 10

  const std::string text = StatusText(status, {.width = 160}, FiveSecondsAfterTheFault());

  EXPECT_THAT(text, HasSubstr("  100   ####################  backward"));
  EXPECT_THAT(text,
              HasSubstr("  50    ##########..........  backward  5.0 s   ##########.........."));
}

TEST(DurationText, NamesTheUnitThatFits) {
  EXPECT_EQ(DurationText(0.0005), "0.5 ms");
  EXPECT_EQ(DurationText(12.34), "12.3 s");
  EXPECT_EQ(DurationText(245), "4 min 5 s");
  EXPECT_EQ(DurationText(3 * 3600 + 12 * 60), "3 h 12 min");
  EXPECT_EQ(DurationText(5 * 86400 + 3600), "5 d 1 h");
  EXPECT_EQ(DurationText(-1), "0 s");
}

// --- JSON ---

TEST(StatusJson, IsReadBackAsItWas) {
  JobStatus status = RunningJob();
  status.goodput = GoodputStatus{0.9, 120, {{"productive", 108}, {"recovery", 12}}};
  status.mfu = 0.41;
  status.stop_signals = {15};
  status.stop = StopStatus{3.5, 120, 0.25};

  const auto read = ParseStatusJson(StatusJson(status));

  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->ranks, status.ranks);
  EXPECT_EQ(read->last_fault, status.last_fault);
  EXPECT_EQ(read->checkpoint, status.checkpoint);
  EXPECT_EQ(read->goodput, status.goodput);
  EXPECT_EQ(read->stop, status.stop);
  EXPECT_EQ(read->mfu, 0.41);
  EXPECT_EQ(read->generation, 2u);
  EXPECT_EQ(StatusJson(*read), StatusJson(status));
}

TEST(StatusJson, OfAnotherShapeIsReadAsFarAsItGoes) {
  const auto odd = ParseStatusJson(
      R"({"version":1,"job":7,"world":"four","ranks":[1,{"rank":3,"step":"x"}],"exit_code":null})");

  ASSERT_TRUE(odd.ok()) << odd.status();
  EXPECT_EQ(odd->job, "");
  EXPECT_EQ(odd->world, 0);
  ASSERT_EQ(odd->ranks.size(), 1u);
  EXPECT_EQ(odd->ranks[0].rank, 3);
  EXPECT_EQ(odd->ranks[0].step, std::nullopt);
  EXPECT_FALSE(odd->is_over());
  EXPECT_FALSE(ParseStatusJson("[]").ok());
  EXPECT_FALSE(ParseStatusJson("{\"version\":2}").ok());
  EXPECT_FALSE(ParseStatusJson("{\"version\":").ok());
}

// --- Event log ---

class EventLog : public ::testing::Test {
 protected:
  absl::StatusOr<EventLogRead> Read(const std::string& text) {
    std::ofstream(folder_ + "/events.jsonl", std::ios::binary) << text;
    return ReadEventLog(folder_);
  }
  static std::string Start() {
    return R"({"t":0.0,"at":"2026-11-30T10:00:00.000Z","event":"start","version":1,"run_id":"ab",)"
           R"("job":"gpt","world":2,"max_restarts":3,"command":["x"],"pid":7,"start_ticks":99,)"
           R"("host":"h","boot_id":"bb"})"
           "\n";
  }

  const TempFolder temp_;
  const std::string folder_ = temp_.path();
};

TEST_F(EventLog, TellsOfTheRunThatWroteIt) {
  const auto read = Read(
      Start() +
      R"({"t":0.1,"event":"worker_started","rank":0,"incarnation":1,"generation":1,"attempt":0,"pid":10})"
      "\n"
      R"({"t":0.1,"event":"worker_started","rank":1,"incarnation":2,"generation":1,"attempt":0,"pid":11})"
      "\n"
      R"({"t":0.5,"event":"commit","generation":1,"members":[0,1]})"
      "\n"
      R"({"t":2.0,"at":"2026-11-30T10:00:02.000Z","event":"saved","step":5,"checkpoint":"s","bytes":10,"seconds":0.1})"
      "\n"
      R"({"t":3.0,"event":"worker_ended","rank":1,"incarnation":2,"signal":9,"by_us":false})"
      "\n"
      R"({"t":3.0,"event":"fault","class":"crash","rank":1,"generation":1,"detail":"d","victim":false,"budget":"1 of 3"})"
      "\n");

  ASSERT_TRUE(read.ok()) << read.status();
  const JobStatus& status = read->status;
  EXPECT_EQ(status.job, "gpt");
  EXPECT_EQ(status.agent_pid, 7);
  EXPECT_EQ(status.agent_start_ticks, 99u);
  EXPECT_EQ(status.phase, "re-forming");
  EXPECT_EQ(status.seconds, 3.0);
  ASSERT_EQ(status.ranks.size(), 2u);
  EXPECT_EQ(status.ranks[0].pid, 10);
  EXPECT_EQ(status.ranks[1].state, "ended");
  EXPECT_EQ(status.ranks[1].end, "signal 9");
  EXPECT_EQ(status.faults, 1);
  EXPECT_EQ(status.budget_used, 1);
  EXPECT_EQ(status.checkpoint->step, 5);
  EXPECT_FALSE(status.is_over());
}

TEST_F(EventLog, TellsWhenARequestToStopWasServed) {
  JobStatus status;
  const auto fold = [&](const char* line) { Fold(ordered_json::parse(line), status); };
  const auto metrics = [&] {
    return MetricsLint(MetricsText(status, {}, MetricsFormat::kPrometheus), false);
  };
  fold(R"({"t":1.0,"event":"saved","step":5})");
  EXPECT_FALSE(status.stop);
  fold(R"({"t":2.0,"event":"stop_asked","signal":15})");
  fold(R"({"t":2.5,"event":"stop_asked","signal":15})");
  EXPECT_EQ(status.stop, (StopStatus{2.0, {}, {}})) << "the first one counts";
  EXPECT_EQ(metrics().value("outlast_stop_requested{job=\"run\"}"), 1);
  fold(R"({"t":3.25,"event":"saved","step":9})");
  EXPECT_EQ(status.stop, (StopStatus{2.0, 9, 1.25}));
  EXPECT_EQ(metrics().value("outlast_stop_service_seconds{job=\"run\"}"), 1.25);
}

// The coordinator counts: a node that does not lead would say that nothing is used up.
TEST_F(EventLog, OfANodeThatDoesNotLeadSaysNothingOfTheBudget) {
  JobStatus status;
  Fold(ordered_json::parse(R"({"event":"start","node":"n2","slots":2,"max_restarts":3})"), status);
  Fold(ordered_json::parse(
           R"({"event":"fault","class":"crash","rank":3,"node":"n2","generation":1,"detail":"d"})"),
       status);
  EXPECT_EQ(status.faults, 1);
  EXPECT_FALSE(status.budget_is_known);
  EXPECT_THAT(StatusText(status, {}, absl::Now()), Not(HasSubstr("restarts used")));
  EXPECT_TRUE(ordered_json::parse(StatusJson(status))["budget"].is_null());
  EXPECT_THAT(MetricsText(status, {}, MetricsFormat::kPrometheus),
              Not(HasSubstr("outlast_restarts_used")));

  Fold(ordered_json::parse(R"({"event":"job_fault","rank":3,"node":"n2","budget":"1 of 3"})"),
       status);
  EXPECT_TRUE(status.budget_is_known);
  EXPECT_THAT(StatusText(status, {}, absl::Now()), HasSubstr("1 of 3 restarts used"));
}

TEST_F(EventLog, IsReadUpToALineThatAKillCut) {
  const auto read =
      Read(Start() + "{\"t\":1.0,\"event\":\"commit\",\"generation\":1,\"members\":[0,1]}\n" +
           R"({"t":9.0,"event":"finish","exit_code":0,"rea)");

  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->events, 2u);
  EXPECT_EQ(read->status.phase, "running");
}

TEST_F(EventLog, SkipsWhatIsNoEventAndWhatItDoesNotKnow) {
  const auto read = Read(Start() + "\x01garbage{\n[1,2]\n" +
                         R"({"t":1.0,"event":"of_tomorrow","rank":-5})"
                         "\n" +
                         R"({"t":1.0,"event":"worker_started","rank":4000000000,"pid":"x"})"
                         "\n" +
                         R"({"t":2.0,"event":"finish","exit_code":3,"reason":"r"})"
                         "\n");

  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->skipped, 2u);
  EXPECT_EQ(read->status.exit_code, 3);
  EXPECT_THAT(read->status.ranks, IsEmpty());
}

TEST_F(EventLog, OfANewerVersionIsRefused) {
  const auto read = Read("{\"event\":\"start\",\"version\":2}\n");

  ASSERT_FALSE(read.ok());
  EXPECT_THAT(MessageOf(read.status()), HasSubstr("version 2, this reader knows 1"));
}

TEST_F(EventLog, WithoutAWholeEventIsNoLog) {
  EXPECT_TRUE(absl::IsDataLoss(Read("").status()));
  EXPECT_TRUE(absl::IsDataLoss(Read("{\"event\":\"sta").status()));
  std::filesystem::remove(folder_ + "/events.jsonl");
  EXPECT_TRUE(absl::IsNotFound(ReadEventLog(folder_).status()));
}

TEST_F(EventLog, KeepsAVictimApartFromFaultsThatCount) {
  const auto read =
      Read(Start() +
           R"({"t":1,"event":"fault","class":"crash","rank":1,"victim":true,"budget":"0 of 3"})"
           "\n");

  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->status.faults, 0);
  EXPECT_FALSE(read->status.last_fault.has_value());
}

TEST_F(EventLog, SharesItsFolderWithASocketForItsUserAloneHoweverLongThePathIs) {
  const std::string deep = folder_ + "/" + std::string(120, 'd');
  std::filesystem::create_directory(deep);

  const auto listener = ListenIn(deep, kStatusSocket);

  ASSERT_TRUE(listener.ok()) << listener.status();
  struct stat info {};
  ASSERT_EQ(stat((deep + "/status.sock").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_FALSE(ListenIn(folder_ + "/none", kStatusSocket).ok());
}

// --- Steps and metrics ---

StepRecord StepOf(int64_t start_ms, int64_t end_ms) {
  StepRecord step{};
  step.start_ns = static_cast<uint64_t>(start_ms) * 1'000'000;
  step.end_ns = static_cast<uint64_t>(end_ms) * 1'000'000;
  return step;
}

TEST(StepTotals, PartsSumToTheTimeOfTheSteps) {
  StepRecord step = StepOf(1000, 1100);
  step.data_ns = 10'000'000;
  step.forward_ns = 20'000'000;
  step.backward_ns = 40'000'000;
  step.optimizer_ns = 5'000'000;
  step.checkpoint_stall_ns = 15'000'000;
  step.collective_wait_ns = 7'000'000;
  step.tokens_real = 8;
  step.samples = 2;

  StepTotals totals;
  totals.Add(step);

  EXPECT_THAT(totals.part_ns,
              ElementsAre(10'000'000, 20'000'000, 40'000'000, 5'000'000, 15'000'000, 10'000'000));
  EXPECT_EQ(totals.time_ns, 100'000'000);
  EXPECT_EQ(totals.tokens, 8u);
  EXPECT_EQ(totals.last_end_ns, 1'100'000'000);
}

TEST(StepTotals, LeavesAbortedStepsOutAndOddOnesHarmNothing) {
  StepTotals totals;
  StepRecord aborted = StepOf(0, 50);
  aborted.flags = kStepAborted;
  totals.Add(aborted);
  totals.Add(StepOf(90, 10));
  EXPECT_EQ(totals.steps, 0u);

  StepRecord odd = StepOf(0, 10);
  odd.data_ns = ~uint64_t{0};
  odd.backward_ns = ~uint64_t{0};
  totals.Add(odd);

  EXPECT_EQ(totals.steps, 1u);
  EXPECT_EQ(totals.time_ns, 10'000'000);
  EXPECT_EQ(totals.part_ns[0], 10'000'000);
  EXPECT_EQ(totals.part_ns[2], 0);
}

TEST(StepTotals, MeasuresTheLastStepsWithoutTheirSaves) {
  StepTotals totals;
  for (size_t i = 0; i < StepTotals::kWindow; ++i) totals.Add(StepOf(0, 1000));
  for (size_t i = 0; i < StepTotals::kWindow; ++i) {
    StepRecord step = StepOf(0, 20);
    step.checkpoint_stall_ns = 10'000'000;
    step.model_flops = 5e9;
    totals.Add(step);
  }

  EXPECT_DOUBLE_EQ(totals.window_seconds(), 0.64);  // 64 steps of 10 ms
  EXPECT_DOUBLE_EQ(totals.window_flops(), 3.2e11);
}

RunTotals TotalsOfThreeSteps() {
  RunTotals totals;
  for (const int64_t ms : {4, 40, 400'000}) totals.job.Add(StepOf(0, ms));
  totals.tokens = 12;
  totals.mfu = 0.5;
  return totals;
}

TEST(MetricsText, IsCleanInBothFormats) {
  JobStatus status = RunningJob();
  status.job = "a \"quoted\\ job\nof two lines";
  for (const auto format : {MetricsFormat::kPrometheus, MetricsFormat::kOpenMetrics}) {
    const std::string page = MetricsText(status, TotalsOfThreeSteps(), format);
    EXPECT_THAT(MetricsLint(page, format == MetricsFormat::kOpenMetrics).wrong(), IsEmpty())
        << page;
  }
}

TEST(MetricsText, SaysWhatTheStatusSays) {
  const std::string page =
      MetricsText(RunningJob(), TotalsOfThreeSteps(), MetricsFormat::kPrometheus);
  const MetricsLint read(page, false);

  EXPECT_EQ(read.value("outlast_generation{job=\"gpt\"}"), 2);
  EXPECT_EQ(read.value("outlast_ranks{job=\"gpt\",state=\"running\"}"), 2);
  EXPECT_EQ(read.value("outlast_ranks{job=\"gpt\",state=\"stopped\"}"), 0);
  EXPECT_EQ(read.value("outlast_step{job=\"gpt\"}"), 118);
  EXPECT_EQ(read.value("outlast_faults_total{job=\"gpt\",class=\"crash\"}"), 1);
  EXPECT_EQ(read.value("outlast_steps_total{job=\"gpt\"}"), 3);
  EXPECT_EQ(read.value("outlast_step_duration_seconds_bucket{job=\"gpt\",le=\"0.005\"}"), 1);
  EXPECT_EQ(read.value("outlast_step_duration_seconds_bucket{job=\"gpt\",le=\"100.0\"}"), 2);
  EXPECT_EQ(read.value("outlast_step_duration_seconds_bucket{job=\"gpt\",le=\"+Inf\"}"), 3);
  EXPECT_EQ(read.value("outlast_mfu_ratio{job=\"gpt\"}"), 0.5);
  EXPECT_EQ(read.value("outlast_saved_bytes_total{job=\"gpt\"}"), 4'000'000);
  // 2026-11-30 10:01:59 UTC.
  EXPECT_EQ(read.value("outlast_checkpoint_timestamp_seconds{job=\"gpt\"}"), 1796032919);
}

TEST(MetricsText, HasTheSameSeriesWhateverDies) {
  const JobStatus before = RunningJob();
  JobStatus after = before;
  after.ranks[0].state = "ended";
  after.ranks[0].step.reset();
  after.ranks[1].state = "starting";
  after.faults_by_class["hang"] = 7;
  const RunTotals totals = TotalsOfThreeSteps();

  const auto names = [&](const JobStatus& status) {
    std::vector<std::string> series;
    const MetricsLint read(MetricsText(status, totals, MetricsFormat::kPrometheus), false);
    for (const auto& [name, value] : read.samples()) series.push_back(name);
    return series;
  };
  EXPECT_EQ(names(before), names(after));
}

TEST(MetricsText, IsOpenMetricsOnlyForThoseWhoAsk) {
  EXPECT_EQ(FormatFor(""), MetricsFormat::kPrometheus);
  EXPECT_EQ(FormatFor("text/plain;version=0.0.4;q=0.5,*/*;q=0.1"), MetricsFormat::kPrometheus);
  EXPECT_EQ(FormatFor("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"),
            MetricsFormat::kOpenMetrics);
}

}  // namespace
}  // namespace outlast
