// Measures the trainer's steps: phases, tokens, FLOPs, into the step log of the rank's black box,
// where they outlive it.
//
//   OUTLAST_ASSIGN_OR_RETURN(auto meter, outlast::Meter::Start(*run, {.flops =
//   outlast::FlopsOf(shape)})); auto scope = meter->Step(step);             // ends with the scope
//   scope.Enter(outlast::Phase::kForward);
//   scope.Count({.real = 8100, .padded = 8192, .loss = 8000, .samples = 4});
//
// The step path takes no lock, allocates nothing, waits for no device and makes no system call: it
// reads the clock and stores. A phase also opens a section in the black box, so a trainer that is
// metered is watched.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "outlast/base/clock.h"
#include "outlast/blackbox/progress.h"
#include "outlast/blackbox/segment.h"
#include "outlast/blackbox/step_log.h"
#include "outlast/meter/flops.h"
#include "outlast/meter/ledger_file.h"
#include "outlast/meter/peak.h"

namespace outlast {

class Meter;
class Run;

struct MeterOptions {
  // FLOPs a token or a sample; FlopsOf's error comes out of Start. Left out: unknown, then there is
  // no MFU.
  absl::StatusOr<FlopCount> flops = FlopCount{};
  // The peak of this rank's device. Unknown is fine: FLOP/s are shown, MFU is not.
  Peak peak;
  // Borrowed for the meter's life; null: the machine's.
  Clock* clock = nullptr;
};

// What a step, or one micro-batch of it, trained on.
struct StepCounts {
  uint32_t real = 0;    // tokens without padding: what model FLOPs are counted by
  uint32_t padded = 0;  // tokens as computed
  uint32_t loss = 0;    // tokens that the loss sees
  uint32_t samples = 0;
};

// One step under way; what Meter::Step returns. The trainer's thread only.
//
// Time before the first Enter, and in Phase::kUser, counts as forward. kCommWait counts as
// collective wait and, as it lies inside them, as the forward, backward or optimizer phase that was
// left for it. kCheckpointSnapshot and kCheckpointWrite are the checkpoint stall. Other phases
// (kEval, kCompile ...) are part of the step's time and of none of its parts.
class StepScope {
 public:
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;
  // Appends the step's record. A step whose generation was aborted meanwhile is marked so.
  ~StepScope();

  // The phase that runs from now on. Well under 1 us.
  void Enter(Phase phase);
  // Adds to the step's counters: once a step, or once a micro-batch. They stop at 2^32 - 1.
  void Count(const StepCounts& counts);
  // The step's loss and the norm of its gradient, as measured: NaN stays NaN.
  void SetLoss(float loss, float gradient_norm);
  // This step will not count: it ended before its update, for another reason than an abort.
  void Abandon() { record_.flags |= kStepAborted; }

 private:
  friend class Meter;
  StepScope(Meter& meter, int64_t step);
  void CloseShare(int64_t now);

  Meter& meter_;
  StepRecord record_{};
  Phase phase_ = Phase::kNone;
  Phase compute_phase_ = Phase::kForward;
  int64_t entered_ns_ = 0;
  SectionDepth section_ = 0;
};

// Whole steps since the window began: at the meter's start, after a step with evaluation in it, in
// a new generation, and where RestartWindow was called. So a resume or a pause never bends a rate.
struct MeterWindow {
  int64_t steps = 0;
  int64_t time_ns = 0;  // of these steps, without checkpoint stalls; the steady clock's
  uint64_t tokens_real = 0;
  uint64_t samples = 0;
  double model_flops = 0;  // 0: unknown

  // Of this rank. None: no time yet.
  std::optional<double> tokens_per_second() const;
  std::optional<double> samples_per_second() const;
  std::optional<double> flops_per_second() const;
};

// One a rank. The trainer's thread only: it shares that thread's ProgressWriter.
class Meter {
 public:
  // Borrows `run`. kInvalidArgument and kOutOfRange: what is wrong with which option.
  static absl::StatusOr<std::unique_ptr<Meter>> Start(Run& run, MeterOptions options = {});
  // The same over a black box; `progress` is the writer that the thread's other sections use.
  // Borrows both.
  static absl::StatusOr<std::unique_ptr<Meter>> Start(Segment& black_box, ProgressWriter& progress,
                                                      MeterOptions options = {});

  // Begins step `step`, which ends with the scope. One at a time.
  StepScope Step(int64_t step) { return StepScope(*this, step); }

  const MeterWindow& window() const { return window_; }
  void RestartWindow() { window_ = {}; }
  // The window's MFU, 0..1, by flops().convention; above 1 an input is wrong, and it is shown all
  // the same. None: no whole step yet, or FLOPs or peak are unknown.
  std::optional<double> mfu() const;

  const FlopCount& flops() const { return flops_; }
  const Peak& peak() const { return peak_; }

 private:
  friend class StepScope;
  Meter(Segment& black_box, ProgressWriter& progress, FlopCount flops, MeterOptions options);

  int64_t Now() const;
  void Finish(StepRecord& record);
  void AddToWindow(const StepRecord& record);

  Segment& black_box_;
  ProgressWriter& progress_;
  StepLogWriter step_log_;
  AgentWords agent_;
  FlopCount flops_;
  Peak peak_;
  Clock* clock_;
  uint16_t step_name_ = 0;
  uint16_t phase_names_[kPhaseCount] = {};
  MeterWindow window_;
  uint64_t window_generation_ = 0;
};

// The step that the rank's process had begun and not ended, as a record that is marked aborted and
// ends at `now_ns` (CLOCK_MONOTONIC): what a process leaves that is killed inside a step. `last` is
// the newest record of its step log, or null. None: no step is open.
std::optional<StepRecord> ReadOpenStep(const SegmentView& black_box, const StepRecord* last,
                                       int64_t now_ns);

// What the meter of a rank counts by, as its black box tells; none: no meter was started. Its time
// is left at 0.
std::optional<MeterEntry> ReadMeterEntry(const SegmentView& black_box);

}  // namespace outlast
