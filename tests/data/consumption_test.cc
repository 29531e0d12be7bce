#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "outlast/base/status.h"
#include "outlast/data/consumption_check.h"
#include "outlast/data/consumption_log.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;
using Lines = std::vector<ConsumptionLine>;

// The ranks of one generation of a run, from step `begin` to before `end`, whose cursor stood at
// `begin`.
constexpr CursorOptions kData{.samples = 100, .batch = 8, .seed = 7};
const Id128 kRun1 = Id128::FromName("run 1");
const Id128 kRun2 = Id128::FromName("run 2");

void Write(Lines& lines, Id128 run, uint64_t generation, int64_t begin, int64_t end,
           int world = 2) {
  Cursor cursor = Cursor::Create(kData).value();
  for (int64_t step = 0; step < end; ++step) {
    for (int rank = 0; step >= begin && rank < world; ++rank) {
      lines.push_back({run, generation, step, rank, cursor.RankIds(rank, world).value()});
    }
    ASSERT_TRUE(cursor.Advance().ok());
  }
}

absl::StatusOr<ConsumptionReport> Check(const Lines& lines, int64_t steps,
                                        std::optional<int> world = 2) {
  return CheckConsumption(lines, {.data = kData, .world = world, .steps = steps});
}

std::string Fault(const Lines& lines, int64_t steps, std::optional<int> world = 2) {
  const absl::Status status = Check(lines, steps, world).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  return std::string(MessageOf(status));
}

TEST(ConsumptionLine, IsWrittenAsDocumentedAndReadBack) {
  const ConsumptionLine line{kRun1, 2, 117, 3, {20931, 77, Cursor::kPadding}};
  EXPECT_EQ(FormatLine(line), kRun1.hex() + " 2 117 3 20931,77,-");
  EXPECT_EQ(ParseLine(FormatLine(line)).value(), line);
}

TEST(ConsumptionLine, ThatIsMalformedIsRefusedWithTheField) {
  const std::string run = kRun1.hex();
  for (const auto& [text, says] : std::vector<std::pair<std::string, std::string>>{
           {"", "id ''"},
           {"12 1 2 3 4", "id '12'"},
           {run, "generation ''"},
           {run + " x 2 3 4", "generation 'x'"},
           {run + " 1 -2 3 4", "step '-2'"},
           {run + " 1 2 99999999999 4", "rank '99999999999'"},
           {run + " 1 2 3", "sample ''"},
           {run + " 1 2 3 4,", "sample ''"},
           {run + " 1 2 3 4 5", "sample '4 5'"},
           {run + " 1 2 3 4,-5", "sample '-5'"}}) {
    const absl::Status status = ParseLine(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(MessageOf(status)), HasSubstr(says));
  }
}

TEST(ParseLines, LeavesOutALastLineThatWasCutOff) {
  const std::string line = FormatLine({kRun1, 1, 0, 0, {5}});
  EXPECT_EQ(ParseLines(line + "\n" + line).value().size(), 1u);
  EXPECT_EQ(ParseLines("").value().size(), 0u);
  EXPECT_THAT(std::string(MessageOf(ParseLines(line + "\nabc\n").status())),
              HasSubstr("line 2: id 'abc'"));
}

class ConsumptionLogTest : public testing::Test {
 protected:
  const TempFolder folder_;
};

TEST_F(ConsumptionLogTest, HoldsTheLinesOfAllProcessesWhole) {
  const std::string path = folder_ / "consumed";
  constexpr int kProcesses = 4;
  constexpr int kSteps = 200;
  for (int rank = 0; rank < kProcesses; ++rank) {
    if (fork() != 0) continue;
    auto log = ConsumptionLog::Open(path);
    for (int step = 0; log.ok() && step < kSteps; ++step) {
      if (!log->Append({kRun1, 1, step, rank, std::vector<int64_t>(50, rank)}).ok()) _exit(1);
    }
    _exit(log.ok() ? 0 : 1);
  }
  for (int rank = 0; rank < kProcesses; ++rank) {
    int status = 0;
    ASSERT_GT(wait(&status), 0);
    ASSERT_EQ(status, 0);
  }
  const Lines lines = ReadConsumptionLog(path).value();
  EXPECT_EQ(lines.size(), static_cast<size_t>(kProcesses * kSteps));
  for (const ConsumptionLine& line : lines)
    EXPECT_EQ(line.ids, std::vector<int64_t>(50, line.rank));
}

TEST_F(ConsumptionLogTest, NamesThePathThatCannotBeOpened) {
  const std::string path = folder_ / "none/consumed";
  EXPECT_THAT(std::string(MessageOf(ConsumptionLog::Open(path).status())), HasSubstr(path));
  EXPECT_EQ(ReadConsumptionLog(path).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ConsumptionLogTest, SaysWhenTheDiskIsFull) {
  auto log = ConsumptionLog::Open("/dev/full").value();
  EXPECT_EQ(log.Append({kRun1, 1, 0, 0, {1}}).code(), absl::StatusCode::kResourceExhausted);
}

// One invocation of a two-rank trainer in a process of its own: goes on from the cursor saved at
// `saved`, saves every third step, logs each before its update, and dies by SIGKILL after logging
// step `kill_at`.
void RunUntilKilled(const std::string& log_path, const std::string& saved, Id128 run, int64_t steps,
                    int64_t kill_at) {
  if (fork() != 0) {
    int status = 0;
    ASSERT_GT(wait(&status), 0);
    ASSERT_TRUE(kill_at < steps ? WIFSIGNALED(status) : status == 0) << status;
    return;
  }
  std::ifstream stream(saved);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  auto cursor = text.empty() ? Cursor::Create(kData) : Cursor::FromText(kData, text);
  auto log = ConsumptionLog::Open(log_path);
  if (!cursor.ok() || !log.ok()) _exit(1);
  for (int64_t step = cursor->consumed() / kData.batch; step < steps; ++step) {
    if (step % 3 == 0) std::ofstream(saved) << cursor->ToText();
    for (int rank = 0; rank < 2; ++rank) {
      if (!log->Append({run, 1, step, rank, cursor->RankIds(rank, 2).value()}).ok()) _exit(1);
      if (step == kill_at) kill(getpid(), SIGKILL);
    }
    if (!cursor->Advance().ok()) _exit(1);
  }
  _exit(0);
}

// Case O21: 12 steps an epoch; killed in the first and in the second of three.
TEST_F(ConsumptionLogTest, ProvesThatATwiceKilledRunConsumedEachSampleOnce) {
  const std::string log = folder_ / "consumed";
  const std::string saved = folder_ / "cursor";
  RunUntilKilled(log, saved, kRun1, 36, 7);
  RunUntilKilled(log, saved, kRun2, 36, 17);
  RunUntilKilled(log, saved, Id128::FromName("run 3"), 36, 36);

  const ConsumptionReport report = Check(ReadConsumptionLog(log).value(), 36).value();
  EXPECT_EQ(report.consumed, 288);
  // Saved at 6 and 15: steps 6 and 7 (half), then 15, 16 and 17 (half) ran twice.
  EXPECT_THAT(report.superseded_attempts,
              ElementsAre(Pair(6, 1), Pair(7, 1), Pair(15, 1), Pair(16, 1), Pair(17, 1)));
  EXPECT_EQ(report.superseded_lines, 2 + 1 + 2 + 2 + 1);
}

TEST(CheckConsumption, AcceptsAnUndisturbedRun) {
  Lines lines;
  Write(lines, kRun1, 1, 0, 30);
  const ConsumptionReport report = Check(lines, 30).value();
  EXPECT_EQ(report.steps, 30);
  EXPECT_EQ(report.consumed, 240);  // 30 steps of 8; nothing is padded under kDrop
  EXPECT_EQ(report.superseded_lines, 0);
  EXPECT_EQ(report.superseded_steps(), 0);
}

TEST(CheckConsumption, OfNoStepsIsAResultOfItsOwn) { EXPECT_EQ(Check({}, 0).value().consumed, 0); }

TEST(CheckConsumption, CountsWhatALaterGenerationReplaced) {
  Lines lines;
  Write(lines, kRun1, 1, 0, 8);
  lines.push_back(
      {kRun1, 1, 8, 0, {1, 2, 3, 4}});  // rank 1 was killed before it wrote; whatever the line says
  Write(lines, kRun1, 2, 7, 9);
  Write(lines, kRun1, 3, 8, 20);
  const ConsumptionReport report = Check(lines, 20).value();
  EXPECT_EQ(report.superseded_lines, 2 + 1 + 2);
  EXPECT_THAT(report.superseded_attempts, ElementsAre(Pair(7, 1), Pair(8, 2)));
  EXPECT_EQ(report.superseded_steps(), 3);
}

TEST(CheckConsumption, TakesTheLastRunEvenIfItsGenerationsAreLower) {
  Lines lines;
  Write(lines, kRun1, 5, 0, 16);
  Write(lines, kRun2, 1, 10, 20);
  const ConsumptionReport report = Check(lines, 20).value();
  EXPECT_EQ(report.superseded_steps(), 6);
  EXPECT_EQ(report.superseded_lines, 12);
}

TEST(CheckConsumption, FollowsAWorldThatChangesWhenNoneIsGiven) {
  Lines lines;
  Write(lines, kRun1, 1, 0, 10, 4);
  Write(lines, kRun1, 2, 9, 15, 3);
  EXPECT_EQ(Check(lines, 15, std::nullopt).value().superseded_lines, 4);
  EXPECT_THAT(Fault(lines, 15, 4), HasSubstr("step 9: "));
}

TEST(CheckConsumption, RefusesAMissingStepOrRank) {
  Lines lines;
  Write(lines, kRun1, 1, 0, 5);
  EXPECT_EQ(Fault(lines, 6), "step 5: no line, 6 steps wanted");
  EXPECT_EQ(Fault(lines, 4), "step 4: found, but the run should have 4 steps");
  lines.erase(lines.begin() + 2 * 3);
  EXPECT_EQ(Fault(lines, 5), "step 3: no line of rank 0 of 2");
}

TEST(CheckConsumption, RefusesAStepThatRanTwiceInOneGeneration) {
  Lines lines;
  Write(lines, kRun1, 1, 0, 5);
  Write(lines, kRun1, 1, 3, 4);
  EXPECT_EQ(Fault(lines, 5), "step 3: two lines of rank 0 in generation 1");
}

TEST(CheckConsumption, RefusesOtherSamplesThanTheOrders) {
  Lines lines;
  Write(lines, kRun1, 1, 0, 5);
  std::swap(lines[4].ids, lines[6].ids);
  EXPECT_THAT(Fault(lines, 5), HasSubstr("step 2: found '" + kRun1.hex() + " 1 2 0 "));
}

TEST(CheckConsumption, RefusesASkippedSampleAfterAResume) {
  Lines lines;
  Write(lines, kRun1, 1, 0, 5);
  Lines ahead;  // resumed one batch too far
  Write(ahead, kRun2, 1, 6, 9);
  for (ConsumptionLine& line : ahead) --line.step;
  lines.insert(lines.end(), ahead.begin(), ahead.end());
  EXPECT_THAT(Fault(lines, 8), HasSubstr("step 5: found"));
}

TEST(CheckConsumption, RefusesStepsThatOnlyAnAbandonedHistoryRan) {
  Lines lines;
  Write(lines, kRun1, 1, 0, 12);
  Write(lines, kRun2, 1, 4, 8);
  EXPECT_EQ(
      Fault(lines, 12),
      "step 8: last run in run 1, generation 1, but the step before it in run 2, generation 1");
}

TEST(CheckConsumption, RefusesAPlanThatMakesNoSense) {
  EXPECT_EQ(Check({}, -1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Check({}, 1, 0).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace outlast
