#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "checkpoint/checkpointer_impl.h"
#include "checkpoint/hooks.h"
#include "outlast/base/clock.h"
#include "run/link.h"

namespace outlast {
namespace {

constexpr absl::Duration kFreeBufferTimeout = absl::Seconds(60);
// Of several nodes: how long a snapshot that the disk wants waits for word of other nodes' ranks.
constexpr absl::Duration kWordTimeout = absl::Seconds(3);
constexpr double kLargestStallShare = 0.01;  // of a step: above it, memory snapshots are spaced
constexpr int64_t kCadenceWindow = 32;       // snapshots between two looks at the share

}  // namespace

void Checkpointer::Impl::AddStall(int64_t started_ns) {
  const int64_t stall = MonotonicNanos() - started_ns;
  window_stall_ns_ += stall;
  tally_->Change([&](CheckpointStats& stats) { stats.stall_ns += stall; });
}

absl::Status Checkpointer::Impl::CheckBeforeUpdate() const {
  if (!run_.is_aborted()) return absl::OkStatus();
  return Error(absl::StatusCode::kAborted, "generation {} ended before an update",
               run_.generation());
}

absl::Status Checkpointer::Impl::BeforeUpdate() {
  if (absl::Status status = CheckBeforeUpdate(); !status.ok()) {
    if (snapshotter_ != nullptr) snapshotter_->GiveUp();
    return status;
  }
  updates_are_announced_ = true;
  ++updates_;
  if (snapshotter_ != nullptr && snapshotter_->is_running()) {
    FinishSnapshot();
    // An abort while the copy ended: the trainer must not update a state that its peers take as it
    // is.
    OUTLAST_RETURN_IF_ERROR(CheckBeforeUpdate());
  }
  live_ = ahead_ = std::nullopt;
  return absl::OkStatus();
}

void Checkpointer::Impl::FinishSnapshot() {
  SectionScope section = run_.Section("snapshot", {.phase = Phase::kCheckpointSnapshot});
  const int64_t started = MonotonicNanos();
  snapshotter_->Finish();
  AddStall(started);
}

// Until the first save nothing is copied, and no name is known.
absl::StatusOr<std::optional<uint32_t>> Checkpointer::Impl::NumberOf(
    std::string_view region) const {
  if (snapshotter_ == nullptr) return std::nullopt;
  const std::optional<uint32_t> number = snapshotter_->RegionOf(region);
  if (number) return number;
  return Error(absl::StatusCode::kInvalidArgument,
               "region '{}': not in the state, whose {} regions begin with '{}'", region,
               own_rows_.size(), own_rows_.empty() ? "" : own_rows_.front().name);
}

void Checkpointer::Impl::FinishRegion(std::optional<uint32_t> number) {
  if (!number || snapshotter_->Announce(*number)) return;
  SectionScope section = run_.Section("snapshot", {.phase = Phase::kCheckpointSnapshot});
  const int64_t started = MonotonicNanos();
  snapshotter_->FinishRegion(*number);
  AddStall(started);
}

absl::Status Checkpointer::Impl::BeforeUpdate(std::string_view region) {
  OUTLAST_ASSIGN_OR_RETURN(const std::optional<uint32_t> number, NumberOf(region));
  if (absl::Status status = CheckBeforeUpdate(); !status.ok()) {
    if (snapshotter_ != nullptr) snapshotter_->GiveUp();
    return status;
  }
  if (!std::exchange(updates_are_announced_, true)) ++updates_;
  FinishRegion(number);
  OUTLAST_RETURN_IF_ERROR(CheckBeforeUpdate());
  live_ = ahead_ = std::nullopt;
  return absl::OkStatus();
}

void Checkpointer::Impl::TellSkipped(int64_t step, uint64_t generation) {
  run_.link()
      .Notify(MessageKind::kSkipped, generation, PayloadWriter().Int(step).bytes())
      .IgnoreError();  // a lost keeper ends this process anyway
}

// By the keeper. One that it asked for when this rank was past it already is answered too, so that
// the other ranks do not keep theirs; of several nodes the lead finds that out for itself.
bool Checkpointer::Impl::IsWanted(int64_t step) {
  const int64_t wanted = table_->wanted_step();
  if (wanted == step) return true;
  if (wanted == kNoStep || wanted > step || table_->is_led()) return false;
  const Live missed{run_.generation(), wanted};
  if (std::exchange(missed_, missed) != missed) TellSkipped(wanted, run_.generation());
  return false;
}

bool Checkpointer::Impl::IsDiskDue(int64_t step) {
  if (IsWanted(step)) return true;
  return !options_.every.is_auto() && step % options_.every.steps() == 0;
}

bool Checkpointer::Impl::IsSnapshotDue(int64_t step) const {
  const bool is_auto = options_.snapshot_every.is_auto();
  const SealTable::Cadence cadence = table_->cadence();
  if (table_->is_led()) {
    // Of two cadences one's steps are the other's too, so that ranks that hear of a change at
    // different times still have steps in common.
    return step % (cadence.every * (is_auto ? 1 : options_.snapshot_every.steps())) == 0;
  }
  if (!is_auto) return step % options_.snapshot_every.steps() == 0;
  return step < cadence.from || step % cadence.every == 0;
}

// On the trainer's thread or the copier's.
void Checkpointer::Impl::DistrustUpdates(int64_t step) {
  tally_->Change([](CheckpointStats& stats) { ++stats.changed; });
  if (distrusts_updates_.exchange(true)) return;
  PrintToStderr(
      "outlast: rank {}: a region of kind kStable was changed between SaveIfDue of step {} and the "
      "next BeforeUpdate; that snapshot is given up, and from now on SaveIfDue copies all\n",
      run_.rank(), step);
}

// Each step while that costs under 1 % of it; else so seldom that it does. Rank 0 decides from its
// own stalls, for all, from a step that none has reached.
void Checkpointer::Impl::ConsiderCadence(int64_t step) {
  if (run_.rank() != 0 || !options_.snapshot_every.is_auto()) return;
  if (++window_steps_ < kCadenceWindow) return;
  const int64_t now = MonotonicNanos();
  const int64_t every = table_->cadence().every;
  if (window_started_ns_ != 0) {
    const double step_ns =
        static_cast<double>(now - window_started_ns_) / static_cast<double>(window_steps_);
    const double stall_ns = static_cast<double>(window_stall_ns_) /
                            static_cast<double>(window_steps_) * static_cast<double>(every);
    const auto wanted = static_cast<int64_t>(
        std::clamp(std::ceil(stall_ns / (kLargestStallShare * step_ns)), 1.0, 1024.0));
    const int64_t wished = wished_every_.load();
    const int64_t now_every = wished > 0 ? wished : every;
    if (wanted > now_every * 2 || wanted * 2 < now_every) {
      if (table_->is_led()) {
        wished_every_ = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(wanted)));
      } else {
        table_->SetCadence({step + 3, wanted});
      }
    }
  }
  window_started_ns_ = now;
  window_stall_ns_ = 0;
  window_steps_ = 0;
}

absl::Status Checkpointer::Impl::Snapshot(int64_t step, const StateView& state,
                                          Snapshotter::Want want, Urgency urgency) {
  const bool must = urgency == Urgency::kMust;
  Snapshotter::Request request;
  request.step = step;
  request.generation = run_.generation();
  request.update_stamp = updates_;
  request.want = want;
  // Of several nodes the agents agree on what is saved.
  request.may_be_left_out = want == Snapshotter::Want::kDisk && !must && !table_->is_led();
  const bool may_be_lazy = updates_are_announced_ && !must && !distrusts_updates_.load();
  request.mode = may_be_lazy ? Snapshotter::Mode::kLazy : Snapshotter::Mode::kEager;
  updates_are_announced_ = false;
  ahead_.reset();
  const int64_t started = MonotonicNanos();
  // The save that holds the last free buffer must not be slow on purpose.
  if (must && options_.disk_bytes_per_second != 0)
    OUTLAST_RETURN_IF_ERROR(run_.link().Notify(MessageKind::kHurry, request.generation, ""));
  const absl::Duration began = Clock::Real().Uptime();
  const absl::Duration deadline = began + kFreeBufferTimeout;
  // What other nodes' ranks hold is heard late: with very short steps all buffers may wait for it.
  const auto may_wait_for_word = [&] {
    return want != Snapshotter::Want::kMemory && table_->is_led() &&
           Clock::Real().Uptime() < began + kWordTimeout && snapshotter_->awaits_others();
  };
  while (true) {
    OUTLAST_ASSIGN_OR_RETURN(const bool begun, snapshotter_->Begin(request, state));
    if (begun) break;
    if (run_.is_aborted())
      return Error(absl::StatusCode::kAborted, "generation {} ended", request.generation);
    if (!must && may_wait_for_word()) {
      Clock::Real().SleepFor(absl::Microseconds(100));
      continue;
    }
    if (!must) {
      tally_->Change([](CheckpointStats& stats) { ++stats.skipped; });
      if (want != Snapshotter::Want::kMemory) TellSkipped(step, request.generation);
      return absl::OkStatus();
    }
    if (Clock::Real().Uptime() > deadline) {
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "snapshot of step {}: no buffer was free for {}", step,
                   absl::FormatDuration(kFreeBufferTimeout));
    }
    Clock::Real().SleepFor(absl::Milliseconds(1));  // until the save that pins them has ended
  }
  KeepRegions(state);
  live_ = Live{request.generation, step};
  if (want != Snapshotter::Want::kMemory) disk_ = live_;
  AddStall(started);
  return absl::OkStatus();
}

// A state that is further along must never be saved under an older step's name.
absl::Status Checkpointer::Impl::CheckStep(int64_t step, std::string_view call) const {
  if (step >= state_step_) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "{} of step {}: the state is of step {} already, at least that wanted", call, step,
               state_step_);
}

absl::Status Checkpointer::Impl::SaveIfDue(int64_t step, const StateView& state) {
  OUTLAST_RETURN_IF_ERROR(CheckStep(step, "SaveIfDue"));
  OUTLAST_RETURN_IF_ERROR(EnsureBuffers(state));
  // A trainer that did not announce its update may have changed what is still being copied; one
  // that announced single regions has not changed the others.
  if (!updates_are_announced_) {
    snapshotter_->GiveUp();
  } else if (snapshotter_->is_running()) {
    FinishSnapshot();
  }
  state_step_ = step;
  OUTLAST_ASSIGN_OR_RETURN(const Run::StepVerdict verdict, run_.CompleteStep(step));
  if (verdict == Run::StepVerdict::kSaveAndStop) {
    OUTLAST_RETURN_IF_ERROR(Snapshot(step, state, Snapshotter::Want::kDiskLast, Urgency::kMust));
    run_.MarkStopped(step);
    return absl::OkStatus();
  }
  if (run_.is_aborted())
    return Error(absl::StatusCode::kAborted, "generation {} ended", run_.generation());
  ConsiderCadence(step);
  const bool disk = IsDiskDue(step);
  if (!disk && !IsSnapshotDue(step)) {
    live_.reset();
    return absl::OkStatus();
  }
  return Snapshot(step, state, disk ? Snapshotter::Want::kDisk : Snapshotter::Want::kMemory,
                  Urgency::kMaySkip);
}

absl::Status Checkpointer::Impl::Release() {
  if (snapshotter_ != nullptr) snapshotter_->Finish();
  live_.reset();
  return absl::OkStatus();
}

absl::Status Checkpointer::Impl::Release(std::string_view region) {
  OUTLAST_ASSIGN_OR_RETURN(const std::optional<uint32_t> number, NumberOf(region));
  FinishRegion(number);
  live_.reset();
  return absl::OkStatus();
}

absl::Status Checkpointer::Impl::Finish(int64_t step, const StateView& state) {
  OUTLAST_RETURN_IF_ERROR(CheckStep(step, "Finish"));
  SectionScope section = run_.Section("finish", {.phase = Phase::kCheckpointWrite});
  OUTLAST_RETURN_IF_ERROR(EnsureBuffers(state));
  const bool is_sealed = !snapshotter_->is_running() || snapshotter_->Finish();
  IsWanted(step);  // one that was missed is answered here too: no SaveIfDue comes any more
  const absl::Duration deadline =
      absl::Seconds(120) + 2 * TimeOfHooks(options_.hooks) +
      absl::Seconds(static_cast<double>(StateBytes(state)) * run_.world() / 50e6);
  const auto ask = [&](FinishAsk what) -> absl::StatusOr<bool> {
    const std::string payload = PayloadWriter().Int(step).Int(what).bytes();
    OUTLAST_ASSIGN_OR_RETURN(
        const Message answer,
        run_.link().Call(MessageKind::kFinish, run_.generation(), payload, deadline));
    return PayloadReader(answer.payload).Int<uint8_t>() != 0;
  };
  OUTLAST_ASSIGN_OR_RETURN(bool is_durable, ask(FinishAsk::kQuery));
  if (is_durable) return absl::OkStatus();
  // The last step's snapshot may have been for memory alone, or none at all: then the disk gets one
  // of its own.
  if (!is_sealed || disk_ != Live{run_.generation(), step}) {
    OUTLAST_RETURN_IF_ERROR(Snapshot(step, state, Snapshotter::Want::kDisk, Urgency::kMust));
  }
  const auto waited = ask(FinishAsk::kWait);
  return waited.ok() ? absl::OkStatus()
                     : Annotate(waited.status(), fmt::format("final save of step {}", step));
}

}  // namespace outlast
