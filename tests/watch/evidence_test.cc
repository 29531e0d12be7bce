#include "watch/evidence.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "outlast/base/clock.h"
#include "outlast/blackbox/progress.h"
#include "tests/support/temp_folder.h"
#include "watch/look_reader.h"

namespace outlast {
namespace {

Segment BlackBox() {
  auto segment = Segment::Create({.generation = 1, .slot = 3, .rank = 3, .world = 4});
  EXPECT_TRUE(segment.ok()) << segment.status();
  return std::move(*segment);
}

Verdict Stopped() {
  Verdict verdict;
  verdict.verdict_class = VerdictClass::kStopped;
  verdict.generation = 2;
  verdict.culprits = {{.rank = 3,
                       .slot = 3,
                       .section = "da\xffta",
                       .phase = Phase::kData,
                       .step = 17,
                       .age = absl::Seconds(4)}};
  verdict.waiting = {0, 1, 2};
  verdict.comm = {"world", 77, 58, "function 1 count 1024"};
  verdict.reason = "rank 3 is stopped";
  return verdict;
}

TEST(Evidence, HoldsTheVerdictAndTheBoxesAsTheyWere) {
  const TempFolder run_dir;
  Segment box = BlackBox();
  ProgressWriter progress(box);
  progress.SetStep(17);
  progress.OpenSection(progress.Intern("data"), Phase::kData, 0, 1);
  const BoxOfRank boxes[] = {{3, box.fd()}};
  const int stacks[] = {3, 0, 1};

  const auto folder =
      WriteEvidence(run_dir.path(), 1, Stopped(), boxes, stacks, absl::Milliseconds(2));

  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(*folder, run_dir.path() + "/boxes/g2-1-stopped");
  std::ifstream file(*folder + "/verdict.json");
  const auto json = nlohmann::json::parse(file, nullptr, false);
  EXPECT_EQ(json["schema"], 1);
  EXPECT_EQ(json["class"], "stopped");
  EXPECT_EQ(json["culprits"][0]["rank"], 3);
  EXPECT_EQ(json["culprits"][0]["phase"], "data");
  EXPECT_EQ(json["culprits"][0]["age_s"], 4.0);
  EXPECT_EQ(json["comm"]["seq"], 58);
  EXPECT_EQ(json["stacks"], (std::vector<int>{3, 0, 1}));
  EXPECT_TRUE(json["first_divergent_seq"].is_null());

  const UniqueFd saved(open((*folder + "/rank3.box").c_str(), O_RDONLY | O_CLOEXEC));
  const auto view = SegmentView::Open(saved.get());
  ASSERT_TRUE(view.ok()) << view.status();
  const ProgressSnapshot look = ReadProgress(*view, 5);
  EXPECT_EQ(look.step, 17u);
  ASSERT_EQ(look.sections.size(), 1u);
  EXPECT_EQ(look.sections[0].name, "data");
}

TEST(Evidence, NeverOverwritesAnEarlierOne) {
  const TempFolder run_dir;
  EXPECT_TRUE(WriteEvidence(run_dir.path(), 1, Stopped(), {}, {}, {}).ok());
  EXPECT_TRUE(
      absl::IsAlreadyExists(WriteEvidence(run_dir.path(), 1, Stopped(), {}, {}, {}).status()));
}

// --- Looks ---

TEST(ProcessStatus, ReadsStateAndTracer) {
  EXPECT_EQ(ParseProcessStatus("Name:\tx\nState:\tT (stopped)\nTracerPid:\t0\n"),
            ProcessState::kStopped);
  EXPECT_EQ(ParseProcessStatus("Name:\tx\nState:\tD (disk sleep)\nTracerPid:\t0\n"),
            ProcessState::kUninterruptible);
  EXPECT_EQ(ParseProcessStatus("Name:\tx\nState:\tS (sleeping)\nTracerPid:\t12\n"),
            ProcessState::kTraced);
  EXPECT_EQ(ParseProcessStatus("Name:\tx\nState:\tt (tracing stop)\nTracerPid:\t12\n"),
            ProcessState::kTraced);
  EXPECT_EQ(ParseProcessStatus("Name:\tx\nState:\tZ (zombie)\n"), ProcessState::kDead);
  EXPECT_EQ(ParseProcessStatus("Name:\tx\nState:\tR (running)\nTracerPid:\t0\n"),
            ProcessState::kRunning);
  EXPECT_EQ(ParseProcessStatus(""), ProcessState::kUnknown);
  EXPECT_EQ(ParseProcessStatus("State:\t"), ProcessState::kUnknown);
}

TEST(LookReader, SeesARealProcessStopGoOnAndDie) {
  Segment box = BlackBox();
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  box.Adopt({.pid = child,
             .pid_start_time = ProcessStartTime(child),
             .incarnation = 1,
             .generation = 1,
             .rank = 3,
             .world = 4});
  auto reader = LookReader::Open(box.fd(), 3);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->Look(3, MonotonicNanos()).process, ProcessState::kRunning);

  int status = 0;
  kill(child, SIGSTOP);
  ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
  EXPECT_EQ(reader->Look(3, MonotonicNanos()).process, ProcessState::kStopped);

  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(reader->Look(3, MonotonicNanos()).process, ProcessState::kDead);
  // A reused pid is another process.
  EXPECT_EQ(ReadProcessState(getpid(), ProcessStartTime(getpid()) + 1), ProcessState::kDead);
}

TEST(LookReader, ReadsSectionsCommsPairsAndNewSteps) {
  Segment box = BlackBox();
  ProgressWriter progress(box);
  progress.SetStep(5);
  progress.OpenSection(progress.Intern("data"), Phase::kData, 0, 1);
  const uint32_t members[] = {2, 3};
  auto comm = CommCell::Open(box, {.id_hash = 9,
                                   .my_rank = 1,
                                   .members = members,
                                   .kind = CommKind::kTensor,
                                   .name = "tensor"});
  ASSERT_TRUE(comm.ok()) << comm.status();
  comm->SetProgressIsKnown();
  comm->SetState(CommState::kReady, 1);
  comm->Enter({.function = 1, .known = kKnowsFunction}, 2);
  auto pair = PairCell::Open(box, 9, 0);
  ASSERT_TRUE(pair.ok());
  pair->EnterSend();
  StepLogWriter steps(box);
  steps.Append({.step = 4});

  auto reader = LookReader::Open(box.fd(), 3);
  ASSERT_TRUE(reader.ok());
  const RankLook look = reader->Look(3, 10);
  EXPECT_EQ(look.progress.step, 5u);
  ASSERT_EQ(look.comms.size(), 1u);
  EXPECT_EQ(*look.comms[0].members, (std::vector<uint32_t>{2, 3}));
  EXPECT_EQ(look.comms[0].operations.size(), 1u);
  ASSERT_EQ(look.pairs.size(), 1u);
  EXPECT_EQ(look.pairs[0].sends_entered, 1u);
  EXPECT_EQ(reader->NewSteps().size(), 1u);
  EXPECT_EQ(reader->NewSteps().size(), 0u);
  comm->Enter({.function = 1, .known = kKnowsFunction}, 3);
  EXPECT_TRUE(reader->Look(3, 11).MovedSince(look));
}

}  // namespace
}  // namespace outlast
