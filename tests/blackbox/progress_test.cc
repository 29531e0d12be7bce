#include "outlast/blackbox/progress.h"

#include <string>
#include <vector>

#include "outlast/base/digest.h"
#include "tests/blackbox/support.h"

namespace outlast {
namespace {

struct Fixture {
  Segment segment = Segment::Create({.world = 2}).value();
  ProgressWriter writer{segment};
  SegmentView view = SegmentView::Open(segment.fd()).value();

  ProgressSnapshot Look(uint64_t now = 100) const { return ReadProgress(view, now); }
};

TEST(Progress, ShowsOpenSectionsFromTheOutsideIn) {
  Fixture f;
  f.writer.SetStep(41);
  f.writer.OpenSection(f.writer.Intern("eval"), Phase::kEval, 1'000, 10);
  f.writer.OpenSection(f.writer.Intern("forward"), Phase::kForward, 0, 30);
  f.writer.Tick(7);

  const ProgressSnapshot look = f.Look(100);

  EXPECT_EQ(look.step, 41u);
  EXPECT_EQ(look.depth, 2u);
  EXPECT_EQ(look.phase, Phase::kForward);
  EXPECT_EQ(look.sections_opened, 2u);
  ASSERT_EQ(look.sections.size(), 2u);
  EXPECT_EQ(look.sections[0].name, "eval");
  EXPECT_EQ(look.sections[0].phase, Phase::kEval);
  EXPECT_EQ(look.sections[0].limit_ns, 1'000u);
  EXPECT_TRUE(look.sections[0].limit_is_declared);
  EXPECT_EQ(look.sections[0].age_ns, 90u);
  EXPECT_EQ(look.sections[0].opened, 1u);
  EXPECT_EQ(look.sections[1].name, "forward");
  EXPECT_FALSE(look.sections[1].limit_is_declared);
  EXPECT_EQ(look.sections[1].progress, 7u);
  EXPECT_EQ(look.sections[1].opened, 2u);
}

TEST(Progress, WritesItsRowAndWordByteForByte) {
  Fixture f;
  f.writer.OpenSection(f.writer.Intern("forward"), Phase::kForward, 9, 0x1122);
  f.writer.Tick(3);

  // id (FNV-1a 64 of the name, folded), phase 4, flags 1, name 8; start, limit, progress, sections
  // opened.
  EXPECT_EQ(testing::HexOf(f.segment.sections()[0]).substr(0, 80),
            "54db4a0d"
            "04"
            "01"
            "0800"
            "2211000000000000"
            "0900000000000000"
            "0300000000000000"
            "0100000000000000");
  EXPECT_EQ(f.segment.header().section_word, 0x0d4adb5400010401u);
}

TEST(Progress, ClosingASectionClosesWhatIsOpenInside) {
  Fixture f;
  const SectionDepth outer = f.writer.OpenSection(f.writer.Intern("eval"), Phase::kEval, 0, 1);
  const SectionDepth inner = f.writer.OpenSection(f.writer.Intern("data"), Phase::kData, 0, 2);
  f.writer.OpenSection(f.writer.Intern("user"), Phase::kUser, 0, 3);

  f.writer.CloseSection(inner);
  EXPECT_EQ(f.Look().sections.size(), 1u);
  EXPECT_EQ(f.Look().phase, Phase::kEval);
  f.writer.CloseSection(inner);  // once more: nothing
  EXPECT_EQ(f.Look().sections.size(), 1u);
  f.writer.CloseSection(outer);

  const ProgressSnapshot look = f.Look();
  EXPECT_TRUE(look.sections.empty());
  EXPECT_EQ(look.depth, 0u);
  EXPECT_EQ(look.phase, Phase::kNone);
  EXPECT_EQ(f.segment.header().section_word, 0u);
}

TEST(Progress, CountsSectionsBelowTheSixteenthWithoutARow) {
  Fixture f;
  const uint16_t name = f.writer.Intern("nested");
  for (int i = 0; i < 20; ++i) f.writer.OpenSection(name, Phase::kUser, 0, 1);
  EXPECT_EQ(f.Look().depth, 20u);
  EXPECT_EQ(f.Look().sections.size(), 16u);

  for (int i = 0; i < 20; ++i) f.writer.CloseSection();
  f.writer.CloseSection();  // none is open
  f.writer.Tick(1);

  EXPECT_EQ(f.Look().depth, 0u);
  EXPECT_EQ(f.Look().sections_opened, 20u);
}

TEST(Progress, TicksAnOuterSection) {
  Fixture f;
  const SectionDepth outer = f.writer.OpenSection(f.writer.Intern("eval"), Phase::kEval, 0, 1);
  f.writer.OpenSection(f.writer.Intern("data"), Phase::kData, 0, 2);

  f.writer.Tick(outer, 5);

  EXPECT_EQ(f.Look().sections[0].progress, 5u);
  EXPECT_EQ(f.Look().sections[1].progress, 0u);
}

TEST(Progress, MovesWithATickAStepOrASectionButNotWithABeat) {
  Fixture f;
  const uint16_t name = f.writer.Intern("data");
  f.writer.OpenSection(name, Phase::kData, 0, 1);
  const ProgressSnapshot first = f.Look();

  f.writer.BeatNative();
  f.writer.BeatGil();
  f.writer.BeatMain();
  EXPECT_FALSE(f.Look().MovedSince(first));
  EXPECT_EQ(f.Look().beat_native, 1u);

  f.writer.Tick(1);
  EXPECT_TRUE(f.Look().MovedSince(first));
  const ProgressSnapshot second = f.Look();
  f.writer.CloseSection();
  f.writer.OpenSection(name, Phase::kData, 0, 1);
  f.writer.Tick(1);
  EXPECT_TRUE(f.Look().MovedSince(second));  // the same section, opened again
  const ProgressSnapshot third = f.Look();
  f.writer.SetStep(1);
  EXPECT_TRUE(f.Look().MovedSince(third));
}

TEST(Progress, CarriesErrorsAndUnwinding) {
  Fixture f;
  f.writer.SetError(-5);
  f.writer.SetUnwinding(1);
  EXPECT_EQ(f.Look().last_error, -5);
  EXPECT_EQ(f.Look().unwinding, 1u);
}

TEST(AgentWords, ReachTheWorkerAndAbortsNeverGoBack) {
  Segment agents = Segment::Create({}).value();
  Segment workers = Segment::Open(Duplicate(agents.fd()).value()).value();
  AgentWords agent(agents);
  const AgentWords worker(workers);

  agent.SetAbortGeneration(4);
  agent.SetAbortGeneration(3);
  agent.SetStopStep(100);
  agent.SetTraceMask(6);

  EXPECT_EQ(worker.abort_generation(), 4u);
  EXPECT_EQ(worker.stop_step(), 100u);
  EXPECT_EQ(worker.trace_mask(), 6u);
}

TEST(Phase, HasANameForEachNumber) {
  EXPECT_EQ(PhaseName(Phase::kInit), "init");
  EXPECT_EQ(PhaseName(Phase::kCheckpointSnapshot), "checkpoint_snapshot");
  EXPECT_EQ(PhaseName(Phase::kCommWait), "comm_wait");
  EXPECT_EQ(PhaseName(Phase::kUser), "user");
  EXPECT_EQ(PhaseName(static_cast<Phase>(16)), "unknown");
}

}  // namespace
}  // namespace outlast
