// How a job ends: by a stop that was asked for, by itself, or by a fault that nothing may restart.
#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <utility>

#include "outlast/elastic/job.h"

namespace outlast {

void Job::BeginStop(int signal, const std::string& reason) {
  const bool was_reforming = phase_ == JobPhase::kReforming;
  phase_ = JobPhase::kStopping;
  stop_signal_ = signal;
  stop_reason_ = reason;
  stop_due_ = now_ + options_.stop_within;
  kill_due_ = now_ + std::min(options_.grace, options_.stop_within);
  // SIGKILL comes at the grace, so what leads to it starts earlier.
  seal_due_ = kill_due_ - std::min(options_.abort_term, (kill_due_ - now_) / 2);
  const int forwarded = signal == 0 ? SIGTERM : signal;
  bool all_joined = true;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.state == State::kExited || slot.state == State::kStaged)
      slot.due = absl::InfiniteDuration();
    if (slot.state != State::kStarting || slot.joined) continue;
    all_joined = false;
    Emit(ForwardSignal{static_cast<int>(i), slot.incarnation, forwarded});
    plain_was_signalled_ = true;
    slot.due = absl::InfiniteDuration();
    if (forwarded == SIGTERM) {  // no second one later
      slot.state = State::kTerminating;
      slot.due = kill_due_;
    }
  }
  if (was_reforming) return GiveUpStop(reason + " while re-forming");
  // Who has joined waits for the others, whom the signal ends, and begins no step.
  if (any_joined_ && !all_joined && newest_step_ == 0)
    return GiveUpStop(reason + " before all ranks had joined");
  Ask(newest_step_, reason);
}

void Job::Ask(int64_t newest_step, const std::string& reason) {
  bool anybody = false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const int index = static_cast<int>(i);
    if (IsAlive(slot) && slot.joined && !slot.finished) stop_.Include(index);
    anybody = anybody || stop_.includes(index);
  }
  if (!anybody) return;
  persist_due_ = stop_due_;
  Emit(AskStop{stop_.Ask(newest_step), reason});
}

void Job::TryGo() {
  if (stop_.Go()) Emit(GoStop{stop_.step()});
}

// S will not come: what all ranks have in memory is saved without their help.
void Job::GiveUpStop(const std::string& reason) {
  if (stop_.gave_up()) return;
  stop_.GiveUp();
  if (!any_joined_) return;
  Abort(reason);
  Persist(reason, stop_due_);
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!IsAlive(slot) || !slot.joined || slot.finished || slot.sealed || IsDying(slot)) continue;
    Terminate(static_cast<int>(i), std::max(now_, std::min(now_ + options_.abort_term, kill_due_)),
              reason);
  }
}

// The time for sealing and leaving is over.
void Job::EndStop() {
  seal_due_ = absl::InfiniteDuration();
  bool all_sealed = true;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const bool owes = stop_.includes(static_cast<int>(i)) && !slots_[i].finished;
    all_sealed = all_sealed && (!owes || slots_[i].sealed);
  }
  if (!all_sealed) GiveUpStop("the stop's step did not come in time");
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (IsAlive(slots_[i]) && !IsDying(slots_[i])) {
      Terminate(static_cast<int>(i), std::max(now_, kill_due_), "the stop's grace is over");
    }
  }
}

void Job::Hurry() {
  persist_due_ = absl::InfiniteDuration();
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (IsAlive(slots_[i]) && slots_[i].state != State::kKilled)
      Kill(static_cast<int>(i), "asked twice");
  }
}

void Job::End(JobOutcome outcome, int exit_code, const std::string& reason) {
  if (phase_ == JobPhase::kEnding || phase_ == JobPhase::kDone) return;
  phase_ = JobPhase::kEnding;
  end_code_ = outcome == JobOutcome::kWorkerFailed ? exit_code : ExitCodeOf(outcome);
  end_reason_ = reason;
  Abort(reason);
  persist_due_ = absl::InfiniteDuration();
  // A root that isn't ours is not written, where nothing restores nothing new was trained, and what
  // the root does not take was tried again already.
  const bool keep = outcome != JobOutcome::kRefused && outcome != JobOutcome::kNeedsHuman &&
                    outcome != JobOutcome::kNotInRoot;
  if (keep) Persist(reason, now_ + options_.stop_within);
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!IsAlive(slot)) {
      slot.due = absl::InfiniteDuration();
    } else if (!IsDying(slot)) {
      Terminate(static_cast<int>(i), now_ + patience(slot), reason);
    }
  }
}

void Job::Persist(const std::string& reason, absl::Duration due) {
  if (!any_joined_ || durable_) return;
  persist_due_ = due;
  Emit(PersistCommon{reason});
}

void Job::FinishWhenAllEnded() {
  if (phase_ == JobPhase::kDone || phase_ == JobPhase::kReforming) return;
  if (phase_ == JobPhase::kForming) return;
  if (std::any_of(slots_.begin(), slots_.end(), IsAlive)) return;
  const bool all_finished = std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.state == State::kDone || slot.state == State::kExited;
  });
  if (phase_ == JobPhase::kRunning || (phase_ == JobPhase::kStopping && all_finished)) {
    if (late_failure_) return FinishAs(*late_failure_, "a worker failed after its work was done");
    if (not_in_root()) {
      return FinishAs(ExitCodeOf(JobOutcome::kNotInRoot), *not_in_root(),
                      ExitCodeOf(JobOutcome::kFinished));
    }
    return FinishAs(ExitCodeOf(JobOutcome::kFinished), "finished");
  }
  if (persist_due_ != absl::InfiniteDuration()) return;
  if (phase_ == JobPhase::kEnding) {
    const bool trained = end_code_ == ExitCodeOf(JobOutcome::kNotInRoot);
    return FinishAs(end_code_, end_reason_,
                    trained ? std::optional(ExitCodeOf(JobOutcome::kFinished)) : std::nullopt);
  }
  const int code = StopCode();
  const bool unsaved = code == ExitCodeOf(JobOutcome::kPreemptedUnsaved) ||
                       code == ExitCodeOf(JobOutcome::kNotInRoot);
  FinishAs(code, StopReason(),
           unsaved && any_joined_ && !stop_.gave_up()
               ? std::optional(ExitCodeOf(JobOutcome::kPreemptedSaved, options_.preempt_exit))
               : std::nullopt);
}

void Job::FinishAs(int exit_code, std::string reason, std::optional<int> code_if_saved) {
  // A root that another run has taken takes nothing of ours any more.
  if (root_lost_) code_if_saved.reset();
  phase_ = JobPhase::kDone;
  if (!abandoned_.empty()) reason += "; " + abandoned_;
  if (armed_) Emit(DisarmTimer{1});
  armed_.reset();
  Emit(FinishJob{exit_code, std::move(reason), code_if_saved, stop_.step()});
}

int Job::StopCode() const {
  if (stop_signal_ == SIGINT) return ExitCodeOf(JobOutcome::kInterrupted);
  if (stop_signal_ == SIGHUP) return ExitCodeOf(JobOutcome::kHungUp);
  if (not_in_root()) return ExitCodeOf(JobOutcome::kNotInRoot);
  return durable_ ? ExitCodeOf(JobOutcome::kPreemptedSaved, options_.preempt_exit)
                  : ExitCodeOf(JobOutcome::kPreemptedUnsaved);
}

std::string Job::StopReason() const {
  if (not_in_root()) return fmt::format("stopped ({}): {}", stop_reason_, *not_in_root());
  if (!any_joined_) return fmt::format("stopped ({})", stop_reason_);
  return fmt::format(
      "stopped ({}): {}; {}", stop_reason_,
      stop_.gave_up() ? "the newest common snapshot" : fmt::format("step {}", stop_.step()),
      durable_ ? "saved" : "not durable");
}

}  // namespace outlast
