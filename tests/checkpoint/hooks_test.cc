// What may veto a checkpoint before its manifest: the scan for infinities and NaNs, programs, and
// hooks of the process itself.
#include "checkpoint/hooks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "checkpoint/non_finite.h"
#include "checkpoint/save_wire.h"
#include "tests/checkpoint/disk_fixture.h"
#include "tests/checkpoint/job_fixture.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const auto kNeverOver = [] { return false; };

template <typename Word>
std::span<const std::byte> BytesOf(const std::vector<Word>& words) {
  return std::as_bytes(std::span(words));
}

// --- The scan

struct Special {
  DType dtype;
  uint64_t bits;
  bool finite;
};

class FirstNonFiniteOf : public ::testing::TestWithParam<Special> {};

// Bit patterns by the types' definitions: IEEE 754, and OCP's "8-bit floating point specification"
// and its FNUZ variants.
INSTANTIATE_TEST_SUITE_P(
    Bits, FirstNonFiniteOf,
    ::testing::Values(
        Special{DType::kF16, 0x7c00, false}, Special{DType::kF16, 0xfe00, false},
        Special{DType::kF16, 0x7bff, true},  // the largest
        Special{DType::kBF16, 0x7f80, false}, Special{DType::kBF16, 0xff80, false},
        Special{DType::kBF16, 0x7fc0, false}, Special{DType::kBF16, 0x7f7f, true},
        Special{DType::kF32, 0x7f800000, false}, Special{DType::kF32, 0xffc00000, false},
        Special{DType::kF32, 0x7f800001, false}, Special{DType::kF32, 0xff7fffff, true},
        Special{DType::kF64, 0x7ff0000000000000, false},
        Special{DType::kF64, 0xfff8000000000000, false},
        Special{DType::kF64, 0x7fefffffffffffff, true},
        // The low half alone looks like an F32's infinity.
        Special{DType::kF64, 0x3ff000007f800000, true},
        Special{DType::kC64, 0x7f8000003f800000, false},
        Special{DType::kC64, 0x3f8000007f800000, false},
        Special{DType::kC64, 0x3f8000003f800000, true}, Special{DType::kF8E5M2, 0x7c, false},
        Special{DType::kF8E5M2, 0xfd, false}, Special{DType::kF8E5M2, 0x7b, true},
        Special{DType::kF8E4M3, 0x7f, false}, Special{DType::kF8E4M3, 0xff, false},
        Special{DType::kF8E4M3, 0x7e, true},
        Special{DType::kF8E4M3, 0x78, true},  // all of the exponent: a number here
        Special{DType::kF8E8M0, 0xff, false}, Special{DType::kF8E8M0, 0x7f, true},
        Special{DType::kF8E4M3Fnuz, 0x80, false}, Special{DType::kF8E4M3Fnuz, 0x7f, true},
        Special{DType::kF8E5M2Fnuz, 0x80, false}, Special{DType::kF8E5M2Fnuz, 0xff, true},
        Special{DType::kU16, 0x7c00, true}, Special{DType::kI64, 0x7ff0000000000000, true}),
    [](const auto& param) {
      return std::string(NameOf(param.param.dtype)) + "_" + std::to_string(param.index);
    });

TEST_P(FirstNonFiniteOf, FindsItWhereverItLies) {
  const Special& special = GetParam();
  const auto size = static_cast<size_t>(BitsOf(special.dtype)) / 8;
  constexpr size_t kElements = 40'000;  // some stretches, and a part of one
  for (const size_t at : {size_t{0}, size_t{1}, size_t{2047}, size_t{16'384}, kElements - 1}) {
    std::vector<uint64_t> memory(kElements * size / 8 + 1);
    auto* bytes = reinterpret_cast<std::byte*>(memory.data());
    std::memcpy(bytes + at * size, &special.bits, size);  // little endian
    const auto found = FirstNonFinite(special.dtype, {bytes, kElements * size});
    EXPECT_EQ(found.has_value(), !special.finite) << at;
    EXPECT_EQ(found.value_or(at), at);
  }
}

TEST(FirstNonFinite, FindsNothingInNothing) {
  EXPECT_FALSE(FirstNonFinite(DType::kF32, {}).has_value());
}

TEST(MatchesPattern, KnowsStarsAndQuestionMarks) {
  EXPECT_TRUE(MatchesPattern("blocks.0.mask", "*.mask"));
  EXPECT_TRUE(MatchesPattern("blocks.0.mask", "blocks.*.m?sk"));
  EXPECT_TRUE(MatchesPattern("a.mask.mask", "*.mask"));
  EXPECT_TRUE(MatchesPattern("", "**"));
  EXPECT_TRUE(MatchesPattern("mask", "mask"));
  EXPECT_FALSE(MatchesPattern("mask2", "mask"));
  EXPECT_FALSE(MatchesPattern("masks", "*mask"));
  EXPECT_FALSE(MatchesPattern("", "?"));
}

// Rank 1's rows 2 and 3 of a [4, 3] tensor, and a mask that is rightly infinite.
class ScanOfTwoRanks : public ::testing::Test {
 protected:
  HookView View() const {
    HookView view{"/ckpt/step", 7, {}};
    view.shards.push_back({0, "/w0", {{"w", DType::kF32, {4, 3}, {0, 0}, {2, 3}, BytesOf(low_)}}});
    view.shards.push_back({1,
                           "/w1",
                           {{"w", DType::kF32, {4, 3}, {2, 0}, {2, 3}, BytesOf(high_)},
                            {"mask", DType::kF32, {1}, {0}, {1}, BytesOf(mask_)}}});
    return view;
  }
  std::vector<float> low_ = std::vector<float>(6), high_ = std::vector<float>(6), mask_ = {0};
};

TEST_F(ScanOfTwoRanks, NamesTensorRankAndIndexInTheWholeTensor) {
  high_[4] = std::numeric_limits<float>::quiet_NaN();
  const HookVerdict verdict = MakeNonFiniteHook({})->Check(View(), kNeverOver);
  EXPECT_EQ(verdict.outcome, HookVerdict::Outcome::kVeto);
  EXPECT_EQ(verdict.note, "tensor 'w' (F32) of rank 1 is not finite at [3, 1]");
}

TEST_F(ScanOfTwoRanks, LeavesOutWhatItIsTold) {
  mask_[0] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(MakeNonFiniteHook({})->Check(View(), kNeverOver).outcome, HookVerdict::Outcome::kVeto);
  const HookVerdict verdict = MakeNonFiniteHook({"m*k"})->Check(View(), kNeverOver);
  EXPECT_EQ(verdict.outcome, HookVerdict::Outcome::kOk);
  EXPECT_EQ(verdict.note, "48 bytes of floats are finite");
}

TEST_F(ScanOfTwoRanks, GivesUpAtItsDeadline) {
  EXPECT_EQ(MakeNonFiniteHook({})->Check(View(), [] { return true; }).outcome,
            HookVerdict::Outcome::kError);
}

// --- What is asked, and what comes of it

class Saying final : public CommitHook {
 public:
  Saying(std::string name, HookVerdict verdict, absl::Duration takes = absl::ZeroDuration())
      : name_(std::move(name)), verdict_(std::move(verdict)), takes_(takes) {}
  std::string_view name() const override { return name_; }
  absl::Duration deadline() const override { return absl::Milliseconds(50); }
  HookVerdict Check(const HookView&, const std::function<bool()>&) override {
    ++asked;
    absl::SleepFor(takes_);
    return verdict_;
  }
  std::atomic<int> asked{0};

 private:
  const std::string name_;
  const HookVerdict verdict_;
  const absl::Duration takes_;
};

HookProgram Shell(std::string name, const std::string& text,
                  absl::Duration deadline = absl::Minutes(1)) {
  return {std::move(name), {"sh", "-c", text, "sh"}, deadline};
}

HookResult AskProgram(const std::string& text, absl::Duration deadline = absl::Minutes(1)) {
  HookOptions options;
  options.programs = {Shell("gate", text, deadline)};
  return AskHooks(MakeHooks(options), {"/ckpt/step-7", 7, std::vector<HookShard>(2)}).at(0);
}

TEST(AskHooks, StopsAtTheFirstThatIsNotOk) {
  const auto ok = std::make_shared<Saying>("one", HookVerdict{});
  const auto veto =
      std::make_shared<Saying>("two", HookVerdict{HookVerdict::Outcome::kVeto, "no good"});
  const auto last = std::make_shared<Saying>("three", HookVerdict{});
  const auto results = AskHooks({ok, veto, last}, {});
  ASSERT_EQ(results.size(), 2u);
  EXPECT_EQ(results[0].result, "ok");
  EXPECT_EQ(results[1].result, "veto");
  EXPECT_EQ(last->asked, 0);
  const absl::Status status = JudgeHooks(results);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(MessageOf(status), "hook 'two' vetoes it: no good");
}

TEST(AskHooks, TakesALateAnswerForAnError) {
  const auto late = std::make_shared<Saying>("late", HookVerdict{}, absl::Milliseconds(60));
  const auto results = AskHooks({late}, {});
  EXPECT_EQ(results.at(0).result, "error");
  EXPECT_EQ(results.at(0).note, "it answered after its deadline of 50ms");
}

TEST(AskHooks, GivesAProgramTheFolderTheStepAndTheWorld) {
  const HookResult result =
      AskProgram("echo \"$1 $OUTLAST_CHECKPOINT $OUTLAST_STEP $OUTLAST_WORLD\"");
  EXPECT_EQ(result.result, "ok");
  EXPECT_EQ(result.note, "/ckpt/step-7 /ckpt/step-7 7 2");
}

TEST(AskHooks, TakesExitCodeThreeForAVetoAndOthersForErrors) {
  const HookResult veto = AskProgram("echo looked; echo loss is 9.1; exit 3");
  EXPECT_EQ(veto.result, "veto");
  EXPECT_EQ(veto.note, "loss is 9.1");
  const HookResult crash = AskProgram("echo Traceback >&2; exit 1");
  EXPECT_EQ(crash.result, "error");
  EXPECT_EQ(crash.note, "exit code 1: Traceback");
  EXPECT_EQ(AskProgram("kill -SEGV $$").note, "signal 11");
}

TEST(AskHooks, KillsAProgramAtItsDeadline) {
  const HookResult hung = AskProgram("echo waiting; sleep 300", absl::Milliseconds(100));
  EXPECT_EQ(hung.result, "error");
  EXPECT_EQ(hung.note, "killed at its deadline of 100ms: waiting");
}

TEST(CheckHookOptions, NamesWhatCannotBe) {
  const auto message = [](HookOptions options) {
    return std::string(MessageOf(CheckHookOptions(options)));
  };
  EXPECT_EQ(message({}), "");
  EXPECT_THAT(message({.programs = {Shell("No Name", "")}}), HasSubstr("programs.name: 'No Name'"));
  EXPECT_THAT(message({.programs = {Shell("a", ""), Shell("a", "")}}), HasSubstr("'a'"));
  EXPECT_THAT(message({.programs = {Shell("non_finite", "")}}), HasSubstr("'non_finite'"));
  EXPECT_THAT(message({.programs = {{"a", {}}}}), HasSubstr("programs.command: 'a'"));
  EXPECT_THAT(message({.programs = {Shell("a", "", absl::ZeroDuration())}}),
              HasSubstr("programs.deadline"));
  EXPECT_THAT(message({.own = {nullptr}}), HasSubstr("own"));
}

TEST(EncodeOptions, CarriesHooksToTheAgent) {
  CheckpointerOptions options{.uri = "/ckpt"};
  options.hooks.non_finite = HookOptions::NonFinite::kVeto;
  options.hooks.non_finite_skip = {"*.mask"};
  options.hooks.programs = {{"gate", {"/bin/check", "--deep"}, absl::Milliseconds(1500)}};
  const auto back = DecodeOptions(EncodeOptions(options));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->hooks.non_finite, HookOptions::NonFinite::kVeto);
  EXPECT_THAT(back->hooks.non_finite_skip, ElementsAre("*.mask"));
  ASSERT_EQ(back->hooks.programs.size(), 1u);
  EXPECT_EQ(back->hooks.programs[0].name, "gate");
  EXPECT_THAT(back->hooks.programs[0].command, ElementsAre("/bin/check", "--deep"));
  EXPECT_EQ(back->hooks.programs[0].deadline, absl::Milliseconds(1500));
}

// --- Saves

// Two ranks that train 30 steps, and save every tenth.
class HookedJob : public ::testing::Test {
 protected:
  HookedJob() {
    spec_.steps = 30;
    spec_.floats = 1000;
    spec_.checkpoints = {.uri = folder_ / "root", .every = Every::Steps(10), .keep_last = 9};
    // Each save is over before the next is due.
    spec_.at_step = [this](LocalWorld&, outlast::Run&, int64_t step) {
      const int64_t deadline = MonotonicNanos() + 20'000'000'000;
      while (step % 10 == 9 && ended_ < step / 10 && MonotonicNanos() < deadline)
        absl::SleepFor(absl::Milliseconds(1));
    };
    seen_.on_durable = [this](int64_t) { ++ended_; };
    seen_.on_failed = [this] { ++ended_; };
  }
  Manifest ManifestOf(int64_t step) const {
    const auto root = Root::Open(folder_ / "root", {.access = Access::kRead}).value();
    const Listing listing = root->List().value();
    for (const CheckpointInfo& info : listing.checkpoints)
      if (info.step == step && info.manifest.has_value()) return *info.manifest;
    return {};
  }

  TempFolder folder_;
  std::atomic<int64_t> ended_{0};
  JobSpec spec_;
  Seen seen_;
};

TEST_F(HookedJob, SavesWhatAllHooksFindGoodAndKeepsWhatTheySaid) {
  spec_.checkpoints.hooks.non_finite = HookOptions::NonFinite::kVeto;
  spec_.checkpoints.hooks.programs = {
      Shell("gate",
            "test -s $1/w00000.safetensors && test -s $1/w00001.receipt.json && "
            "! test -e $1/MANIFEST.json && echo seen")};
  RunJob(spec_, seen_);
  EXPECT_EQ(seen_.result.exit_code, 0) << seen_.result.reason;
  EXPECT_THAT(seen_.durable, ElementsAre(10, 20, 30));
  const Manifest manifest = ManifestOf(20);
  ASSERT_EQ(manifest.hooks.size(), 2u);
  EXPECT_EQ(manifest.hooks[0].name, "non_finite");
  EXPECT_EQ(manifest.hooks[1].name, "gate");
  EXPECT_EQ(manifest.hooks[1].note, "seen");
  const auto record =
      ParseHooks(ReadFileText(folder_ / ("root/" + manifest.checkpoint + "/hooks.json")));
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(record->checkpoint, manifest.checkpoint);
  EXPECT_EQ(record->hooks[1].result, "ok");
  EXPECT_TRUE(VerifyCheckpoint(folder_ / ("root/" + manifest.checkpoint)).empty());
}

TEST_F(HookedJob, GoesOnTrainingOverAVetoAndKeepsTheOlderCheckpoint) {
  spec_.checkpoints.hooks.programs = {
      Shell("gate", "test $OUTLAST_STEP = 20 && echo loss went up && exit 3; exit 0")};
  spec_.checkpoints.keep_last = 2;
  RunJob(spec_, seen_);
  EXPECT_EQ(seen_.result.exit_code, 0) << seen_.result.reason;
  EXPECT_THAT(seen_.durable, ElementsAre(10, 30));
  ASSERT_EQ(seen_.failures.size(), 1u);
  EXPECT_THAT(seen_.failures[0], AllOf(HasSubstr("save of step 20"),
                                       HasSubstr("hook 'gate' vetoes it: loss went up")));
  EXPECT_THAT(CommittedSteps(spec_.checkpoints.uri), ElementsAre(30, 10));
  const auto root = Root::Open(folder_ / "root", {.access = Access::kRead}).value();
  EXPECT_EQ(root->List()->checkpoints.size(), 2u) << "nothing of the vetoed save is left";
}

TEST_F(HookedJob, AbortsTheSaveOfAHookThatHangsAndNamesIt) {
  spec_.checkpoints.hooks.programs = {
      Shell("slow_gate", "test $OUTLAST_STEP = 20 && sleep 300; exit 0", absl::Milliseconds(200))};
  RunJob(spec_, seen_);
  EXPECT_EQ(seen_.result.exit_code, 0) << seen_.result.reason;
  EXPECT_THAT(seen_.durable, ElementsAre(10, 30));
  ASSERT_EQ(seen_.failures.size(), 1u);
  EXPECT_THAT(seen_.failures[0],
              HasSubstr("hook 'slow_gate' failed: killed at its deadline of 200ms"));
}

TEST_F(HookedJob, EndsWith88WhereTheLastStateIsVetoed) {
  spec_.checkpoints.hooks.programs = {
      Shell("gate", "test $OUTLAST_STEP = 30 && exit 3; echo $OUTLAST_STEP; exit 0")};
  RunJob(spec_, seen_);
  EXPECT_EQ(seen_.result.exit_code, 88);
  EXPECT_THAT(seen_.result.reason, HasSubstr("hook 'gate' vetoes it: it gave no reason"));
  EXPECT_EQ(seen_.failures.size(), 1u) << "the same bytes are not judged twice";
  EXPECT_THAT(CommittedSteps(spec_.checkpoints.uri), ElementsAre(20, 10));
}

TEST_F(HookedJob, AsksTheHooksOfTheProcessThatSaves) {
  const auto veto =
      std::make_shared<Saying>("own", HookVerdict{HookVerdict::Outcome::kVeto, "not now"});
  spec_.service.own_hooks = {veto};
  RunJob(spec_, seen_);
  EXPECT_EQ(veto->asked, 3);
  EXPECT_THAT(seen_.durable, IsEmpty());
}

TEST_F(HookedJob, RefusesTheTrainersOwnHooksUnderAnAgent) {
  spec_.checkpoints.hooks.own = {std::make_shared<Saying>("mine", HookVerdict{})};
  RunJob(spec_, seen_);
  EXPECT_NE(seen_.result.exit_code, 0);
  EXPECT_EQ(seen_.finished, 0);
}

// A world of one without an agent: the trainer's own C++ is asked, and the scan sees its memory.
TEST(HooksWithoutAnAgent, SeeEachTensorInMemory) {
  struct Looking final : CommitHook {
    std::string_view name() const override { return "look"; }
    absl::Duration deadline() const override { return absl::Minutes(1); }
    HookVerdict Check(const HookView& view, const std::function<bool()>&) override {
      const HookTensor& tensor = view.shards.at(0).tensors.at(0);
      float second = 0;
      std::memcpy(&second, tensor.bytes.data() + sizeof second, sizeof second);
      return {second == 5 ? HookVerdict::Outcome::kVeto : HookVerdict::Outcome::kOk, "five"};
    }
  };
  TempFolder folder;
  const auto run = outlast::Run::Join().value();
  CheckpointerOptions options{.uri = folder / "root", .every = Every::Steps(1)};
  options.hooks.non_finite = HookOptions::NonFinite::kVeto;
  options.hooks.own = {std::make_shared<Looking>()};
  const auto checkpoints = Checkpointer::Open(*run, options).value();
  std::vector<float> weights = {1, 2, 3};
  StateView state;
  state.regions.push_back(
      {"w", DType::kF32, {3}, {}, {3}, std::as_writable_bytes(std::span(weights))});
  const absl::Status status = run->ForEachGeneration([&](Generation&) -> absl::Status {
    OUTLAST_RETURN_IF_ERROR(checkpoints->Restore(state).status());
    EXPECT_EQ(checkpoints->Finish(1, state), absl::OkStatus());
    weights[1] = 5;
    EXPECT_THAT(MessageOf(checkpoints->Finish(2, state)), HasSubstr("hook 'look' vetoes it: five"));
    weights[2] = std::numeric_limits<float>::infinity();
    EXPECT_THAT(MessageOf(checkpoints->Finish(3, state)),
                HasSubstr("hook 'non_finite' vetoes it: tensor 'w' (F32) of rank 0 is not finite "
                          "at [2]"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(CommittedSteps(folder / "root"), ElementsAre(1));
}

// --- After a crash: everything is there but the manifest.

class RollForwardOfHooked : public ::testing::Test {
 protected:
  RollForwardOfHooked() {
    ranks_.resize(2);
    for (OwnedState& rank : ranks_) rank.Add("wte", DType::kF32, {64});
    name_ = Save(*root_, 10, ranks_, {.hooks = {"gate"}, .commit = false}).value();
  }
  void Said(std::string result) {
    const HooksRecord record{name_, {{"gate", std::move(result), "a note"}}};
    WriteFileText(root_->PathOf(name_) + "/hooks.json", ToText(record).value());
  }
  std::vector<std::string> RollForward() { return root_->RollForward({}, {"a", 1, 0}).value(); }

  TempFolder folder_;
  std::unique_ptr<Root> root_ = OpenRoot(folder_ / "root");
  std::vector<OwnedState> ranks_;
  std::string name_;
};

TEST_F(RollForwardOfHooked, CommitsWhereEachHookWasOk) {
  Said("ok");
  EXPECT_THAT(RollForward(), ElementsAre(name_));
  EXPECT_EQ(root_->List()->checkpoints.at(0).manifest->hooks.at(0).note, "a note");
}
TEST_F(RollForwardOfHooked, CommitsNothingThatWasVetoed) {
  Said("veto");
  EXPECT_THAT(RollForward(), IsEmpty());
}
TEST_F(RollForwardOfHooked, CommitsNothingWhoseHookFailed) {
  Said("error");
  EXPECT_THAT(RollForward(), IsEmpty());
}
TEST_F(RollForwardOfHooked, CommitsNothingThatWasNotJudgedYet) {
  EXPECT_THAT(RollForward(), IsEmpty());
}

}  // namespace
}  // namespace outlast
