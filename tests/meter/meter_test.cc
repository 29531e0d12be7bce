#include "outlast/meter/meter.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "outlast/testing/sim_clock.h"

namespace {
thread_local int64_t allocations = 0;
}  // namespace

// Counts what the step path allocates: nothing.
[[gnu::noinline]] void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  std::abort();
}
// std::stable_sort's: without it, a sanitizer's own would meet the free below.
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace outlast {
namespace {

class MeterTest : public ::testing::Test {
 protected:
  void Start(MeterOptions options = {}) {
    options.clock = &clock_;
    meter_ = Meter::Start(segment_, progress_, std::move(options)).value();
  }
  void Spend(absl::Duration time) { clock_.Advance(time); }
  std::vector<StepRecord> Records() const { return ReadStepLog(View(), 1).records; }
  SegmentView View() const { return SegmentView::Open(segment_.fd()).value(); }
  uint32_t OpenSections() const { return progress_.open_sections(); }

  testing::SimClock clock_;
  Segment segment_ = Segment::Create({.generation = 1, .slot = 3, .rank = 3, .world = 4}).value();
  ProgressWriter progress_{segment_};
  std::unique_ptr<Meter> meter_;
};

constexpr uint64_t kMs = 1'000'000;

TEST_F(MeterTest, WritesAStepWithItsPhasesIntoTheBlackBox) {
  Start();
  {
    auto scope = meter_->Step(7);
    scope.Enter(Phase::kData);
    Spend(absl::Milliseconds(1));
    scope.Enter(Phase::kForward);
    Spend(absl::Milliseconds(2));
    scope.Enter(Phase::kBackward);
    Spend(absl::Milliseconds(4));
    scope.Enter(Phase::kCommWait);
    Spend(absl::Milliseconds(8));
    scope.Enter(Phase::kCheckpointSnapshot);
    Spend(absl::Milliseconds(16));
    scope.Enter(Phase::kOptimizer);
    Spend(absl::Milliseconds(32));
    scope.Count({.real = 8100, .padded = 8192, .loss = 8000, .samples = 4});
    scope.SetLoss(2.5F, 0.5F);
  }
  ASSERT_EQ(Records().size(), 1u);
  const StepRecord record = Records()[0];
  EXPECT_EQ(record.step, 7u);
  EXPECT_EQ(record.generation, 1u);
  EXPECT_EQ(record.end_ns - record.start_ns, 63 * kMs);
  EXPECT_EQ(record.data_ns, 1 * kMs);
  EXPECT_EQ(record.forward_ns, 2 * kMs);
  EXPECT_EQ(record.backward_ns, (4 + 8) * kMs);  // the wait lies inside it
  EXPECT_EQ(record.collective_wait_ns, 8 * kMs);
  EXPECT_EQ(record.checkpoint_stall_ns, 16 * kMs);
  EXPECT_EQ(record.optimizer_ns, 32 * kMs);
  EXPECT_EQ(record.tokens_real, 8100u);
  EXPECT_EQ(record.tokens_padded, 8192u);
  EXPECT_EQ(record.tokens_loss, 8000u);
  EXPECT_EQ(record.samples, 4u);
  EXPECT_EQ(record.loss, 2.5F);
  EXPECT_EQ(record.gradient_norm, 0.5F);
  EXPECT_EQ(record.flags, 0);
}

TEST_F(MeterTest, ShowsTheStepThatAKilledProcessLeftOpen) {
  Start();
  const auto open = [this] {
    const std::vector<StepRecord> records = Records();
    return ReadOpenStep(View(), records.empty() ? nullptr : &records.back(),
                        absl::ToInt64Nanoseconds(clock_.Uptime()));
  };
  EXPECT_FALSE(open());
  const SectionDepth restore =
      progress_.OpenSection(progress_.Intern("restore"), Phase::kRestore, 0, 1);
  EXPECT_FALSE(open());
  progress_.CloseSection(restore);
  progress_.OpenSection(progress_.Intern("epoch"), Phase::kUser, 0, 1);
  {
    auto scope = meter_->Step(7);
    EXPECT_EQ(open()->step, 7u);
    scope.Enter(Phase::kBackward);
    Spend(absl::Milliseconds(5));
    EXPECT_EQ(open()->step, 7u);
    EXPECT_EQ(open()->generation, 1u);
    EXPECT_EQ(open()->flags, kStepAborted);
    EXPECT_EQ(open()->end_ns - open()->start_ns, 5 * kMs);
  }
  EXPECT_FALSE(open());
}

TEST_F(MeterTest, CountsAStepWithoutAMarkAsForward) {
  Start();
  {
    auto scope = meter_->Step(0);
    Spend(absl::Milliseconds(5));
  }
  EXPECT_EQ(Records()[0].forward_ns, 5 * kMs);
  EXPECT_TRUE(std::isnan(Records()[0].loss));
}

TEST_F(MeterTest, SharesTheSectionCellWithTheWatchdog) {
  Start();
  const SectionDepth outer = progress_.OpenSection(progress_.Intern("epoch"), Phase::kUser, 0, 1);
  {
    auto scope = meter_->Step(42);
    scope.Enter(Phase::kBackward);
    const ProgressSnapshot look = ReadProgress(View(), 0);
    EXPECT_EQ(look.step, 42u);
    EXPECT_EQ(look.phase, Phase::kBackward);
    ASSERT_EQ(look.sections.size(), 2u);
    EXPECT_EQ(look.sections[1].name, "backward");
    // A section that the phase opened and forgot ends with the phase.
    progress_.OpenSection(progress_.Intern("inner"), Phase::kUser, 0, 1);
    scope.Enter(Phase::kOptimizer);
    EXPECT_EQ(OpenSections(), 2u);
  }
  EXPECT_EQ(OpenSections(), 1u);
  progress_.CloseSection(outer);
}

TEST_F(MeterTest, AddsUpMicroBatchesAndStopsAtTheLargestCount) {
  Start();
  {
    auto scope = meter_->Step(0);
    scope.Count({.real = 1000, .samples = 1});
    scope.Count({.real = 500, .samples = 1});
    scope.Count({.padded = 0xffffffff});
    scope.Count({.padded = 5});
  }
  EXPECT_EQ(Records()[0].tokens_real, 1500u);
  EXPECT_EQ(Records()[0].samples, 2u);
  EXPECT_EQ(Records()[0].tokens_padded, 0xffffffffu);
}

TEST_F(MeterTest, MarksAStepThatItsGenerationDidNotOutlive) {
  Start();
  {
    auto scope = meter_->Step(0);
    AgentWords(segment_).SetAbortGeneration(1);
  }
  segment_.SetGeneration(2, 3, 4);
  { auto scope = meter_->Step(0); }
  {
    auto scope = meter_->Step(1);
    scope.Abandon();
  }
  EXPECT_EQ(Records()[0].flags, kStepAborted);
  EXPECT_EQ(Records()[1].flags, 0);
  EXPECT_EQ(Records()[1].generation, 2u);
  EXPECT_EQ(Records()[2].flags, kStepAborted);
}

TEST_F(MeterTest, TellsModelFlopsOfTokensOrSamples) {
  Start({.flops = FlopsOf(MlpShape{.widths = {10, 10}})});
  {
    auto scope = meter_->Step(0);
    scope.Count({.real = 5, .samples = 3});
  }
  EXPECT_DOUBLE_EQ(Records()[0].model_flops, 3 * 600.0);
  Start({.flops = FlopCount{.model = 100, .unit = FlopUnit::kToken}});
  {
    auto scope = meter_->Step(1);
    scope.Count({.real = 5, .samples = 3});
  }
  EXPECT_DOUBLE_EQ(Records()[1].model_flops, 500);
}

TEST_F(MeterTest, GivesMfuOnlyWhereFlopsAndPeakAreKnown) {
  const auto step = [&] {
    auto scope = meter_->Step(0);
    scope.Count({.real = 1000});
    Spend(absl::Milliseconds(100));
  };
  Start({.flops = FlopCount{.model = 50'000'000}, .peak = Peak::Declared(1e12, "test")});
  EXPECT_FALSE(meter_->mfu().has_value());  // no step yet
  step();
  EXPECT_DOUBLE_EQ(*meter_->mfu(), 0.5);  // 5e10 FLOPs in 0.1 s of 1e12
  Start({.flops = FlopCount{.model = 50'000'000}, .peak = PeakOf("a toaster")});
  step();
  EXPECT_FALSE(meter_->mfu().has_value());
  EXPECT_DOUBLE_EQ(*meter_->window().flops_per_second(), 5e11);
  Start({.peak = Peak::Declared(1e12, "test")});
  step();
  EXPECT_FALSE(meter_->mfu().has_value());
}

TEST_F(MeterTest, ShowsAnImpossibleMfuAsItIs) {
  Start({.flops = FlopCount{.model = 130'000'000}, .peak = Peak::Declared(1e12, "test")});
  {
    auto scope = meter_->Step(0);
    scope.Count({.real = 1000});
    Spend(absl::Milliseconds(100));
  }
  EXPECT_DOUBLE_EQ(*meter_->mfu(), 1.3);
}

TEST_F(MeterTest, KeepsItsRateOverAResumeAnEvaluationAndASave) {
  Start();
  const auto step = [&](int64_t number, absl::Duration pause, Phase phase) {
    auto scope = meter_->Step(number);
    scope.Count({.real = 1000});
    Spend(absl::Milliseconds(100));
    scope.Enter(phase);
    Spend(pause);
  };
  for (int i = 0; i < 50; ++i) step(i, absl::ZeroDuration(), Phase::kOptimizer);
  EXPECT_NEAR(*meter_->window().tokens_per_second(), 10'000, 1);
  step(50, absl::Seconds(3), Phase::kCheckpointWrite);
  EXPECT_NEAR(*meter_->window().tokens_per_second(), 10'000, 1);
  EXPECT_EQ(meter_->window().steps, 51);
  step(51, absl::Seconds(3), Phase::kEval);
  EXPECT_EQ(meter_->window().steps, 0);
  step(52, absl::ZeroDuration(), Phase::kOptimizer);
  segment_.SetGeneration(2, 3, 4);
  Spend(absl::Hours(1));
  for (int i = 40; i < 60; ++i) step(i, absl::ZeroDuration(), Phase::kOptimizer);
  EXPECT_NEAR(*meter_->window().tokens_per_second(), 10'000, 1);
  EXPECT_EQ(meter_->window().steps, 20);
}

TEST_F(MeterTest, RefusesOptionsByName) {
  const auto start = [&](MeterOptions options) {
    return std::string(Meter::Start(segment_, progress_, std::move(options)).status().message());
  };
  EXPECT_EQ(start({.flops = FlopsOf(MlpShape{})}),
            "MeterOptions.flops: MlpShape.widths has 0 entries, wanted at least 2");
  EXPECT_EQ(start({.flops = FlopCount{.model = -1}}),
            "MeterOptions.flops: model is -1, wanted 0 (unknown) or more");
}

TEST_F(MeterTest, TellsTheAgentWhatItCountsBy) {
  EXPECT_FALSE(ReadMeterEntry(View()).has_value());
  Start({.flops = FlopsOf(MlpShape{.widths = {10, 10}}), .peak = PeakOf("a toaster")});
  const MeterEntry unknown = ReadMeterEntry(View()).value();
  EXPECT_EQ(unknown.slot, 3);
  EXPECT_EQ(unknown.flops_per_unit, 600);
  EXPECT_EQ(unknown.flops_text,
            "600 FLOPs a sample; causal attention, embedding out, router out, recompute out; "
            "formula: multi-layer perceptron");
  EXPECT_EQ(unknown.peak_flops_per_second, 0);
  EXPECT_EQ(unknown.peak_text, "unknown peak (no peak is known for a device named \"a toaster\")");

  Start({.peak = PeakOf("NVIDIA H100 80GB HBM3")});  // the last one holds
  EXPECT_EQ(ReadMeterEntry(View())->peak_flops_per_second, 989.4e12);
  EXPECT_EQ(ReadMeterEntry(View())->flops_text, "unknown FLOPs (none were given)");
}

void RunManySteps(Meter& meter) {
  for (int64_t step = 0; step < 1000; ++step) {
    auto scope = meter.Step(step);
    for (const Phase phase :
         {Phase::kData, Phase::kForward, Phase::kBackward, Phase::kCommWait, Phase::kOptimizer}) {
      scope.Enter(phase);
    }
    scope.Count({.real = 1, .samples = 1});
    scope.SetLoss(1, 1);
  }
}

TEST(Meter, StepPathAllocatesNothing) {
  Segment segment = Segment::Create({.generation = 1}).value();
  ProgressWriter progress(segment);
  const auto meter = Meter::Start(segment, progress, {.flops = FlopCount{.model = 10}}).value();
  const int64_t before = allocations;
  RunManySteps(*meter);
  EXPECT_EQ(allocations, before);
}

// From here on any system call but the clock's (where it is one at all) and the end of the process
// kills it.
bool AllowOnlyTheClock() {
#define ALLOW(number) \
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
  sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                          ALLOW(SYS_clock_gettime), ALLOW(SYS_exit_group),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)};
#undef ALLOW
  const sock_fprog program = {.len = sizeof(filter) / sizeof(filter[0]), .filter = filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(Meter, StepPathMakesNoSyscallButTheClock) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Segment segment = Segment::Create({.generation = 1}).value();
    ProgressWriter progress(segment);
    const auto meter = Meter::Start(segment, progress, {.flops = FlopCount{.model = 10}}).value();
    if (!AllowOnlyTheClock()) syscall(SYS_exit_group, 77);
    RunManySteps(*meter);
    syscall(SYS_exit_group, 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
    GTEST_SKIP() << "this machine lets no seccomp filter in";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "wait status " << status;
}

}  // namespace
}  // namespace outlast
