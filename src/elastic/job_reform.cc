// From a fault to the next generation.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "outlast/elastic/job.h"

namespace outlast {
// `before` is kKilled for whatever we had sent a signal to.
void Job::EndedWhileRunning(int index, State before, bool joined, const ProcessEnd& end) {
  Slot& slot = slots_[index];
  const bool plain = slot.plain && !joined;
  if (before == State::kKilled) {
    Vacate(slot);
    if (phase_ == JobPhase::kReforming) return;
    // Somebody else in the agent ended it. No cause, but the slot is empty; only the hourly cap is
    // left to bound this.
    if (history_.restarts_in_last_hour(now_) >= options_.restarts_per_hour_limit) {
      return End(
          JobOutcome::kRestartsUsedUp, 0,
          fmt::format("{} restarts in an hour are used up", options_.restarts_per_hour_limit));
    }
    history_.AddRestart(now_);
    Reform(fmt::format("rank {} was ended by us", index));
    if (plain) TerminatePlain("a peer was ended");
    return;
  }
  if (plain && end.clean()) {
    slot.state = State::kDone;
    return;
  }
  if (joined && end.clean() && phase_ == JobPhase::kRunning) {
    slot.state = State::kExited;
    slot.due = now_ + options_.early_exit_grace;
    return;
  }
  const FaultClass fault_class = ClassOf(end);
  const int code = end.signal != 0 ? 128 + end.signal : end.code;
  // Whether it had reached the body is all that is known of the phase here.
  FaultRecord fault =
      MakeRecord(fault_class, index, end, std::to_string(code), joined ? kInBody : 0);
  Vacate(slot);
  Fault(index, std::move(fault));
  if (plain && phase_ == JobPhase::kReforming) TerminatePlain(fmt::format("rank {} failed", index));
}

FaultRecord Job::MakeRecord(FaultClass fault_class, int index, const ProcessEnd& end,
                            std::string_view what, uint32_t phase) const {
  return {.fault_class = fault_class,
          .rank = index,
          .generation = generation_,
          .step_reached = newest_step_,
          .step_committed = step_committed_,
          .end = end,
          .found_by = "process exit",
          .detail = fmt::format("rank {}: {}", index, HowItEnded(end)),
          .root = FaultRoot(fault_class, what, phase)};
}

void Job::Fault(int index, FaultRecord fault) {
  fault.victim = phase_ == JobPhase::kReforming && slots_[index].born <= generation_;
  Charge(index, fault);
}

void Job::Charge(int index, const FaultRecord& fault) {
  faults_.push_back(fault);
  if (!fault.victim) history_.Add(fault);
  const bool as_crash = CountsAsCrash(fault.fault_class);
  Emit(RecordFault{fault, as_crash ? history_.crashes : history_.others,
                   as_crash ? options_.max_restarts : options_.other_class_limit});
  if (fault.victim) return;
  const Judgement judgement = JudgeFault(history_, fault, options_, now_, seed_);
  if (!judgement.restart) {
    return End(JobOutcome::kWorkerFailed, judgement.exit_code,
               fmt::format("{}; {}", fault.detail, judgement.reason));
  }
  history_.AddRestart(now_);
  no_spawn_before_ = std::max(no_spawn_before_, now_ + judgement.delay);
  if (slots_[index].state == State::kNone) slots_[index].due = no_spawn_before_;
  Reform(fault.detail);
}

void Job::Reform(const std::string& reason) {
  if (phase_ == JobPhase::kReforming) return;
  phase_ = JobPhase::kReforming;
  Abort(reason);
  for (Slot& slot : slots_) {
    if (slot.state == State::kActive) {
      slot.state = State::kUnwinding;
      slot.due = now_ + options_.soft_abort;
    } else if (slot.state == State::kStarting && slot.joined) {
      slot.due = std::max(slot.spawned_at + options_.respawn, now_ + options_.soft_abort);
    } else if (slot.state == State::kStaged) {
      slot.due = absl::InfiniteDuration();
    } else if (slot.state == State::kExited) {
      Vacate(slot);
    }
  }
}

void Job::TerminatePlain(const std::string& reason) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].state == State::kStarting && IsPlain(slots_[i])) {
      Terminate(static_cast<int>(i), now_ + options_.grace, reason);
    }
  }
}

// Nothing of the next attempt starts while a plain process of the former one may still hold its
// ports and devices.
void Job::Refill() {
  const bool plain_is_dying = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return IsDying(slot) && IsPlain(slot);
  });
  if (plain_is_dying) return;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.state != State::kNone || slot.plain || slot.due > now_) continue;
    Spawn(static_cast<int>(i), generation_ + 1);
    slot.due = now_ + options_.respawn;
  }
}

// Who enters the next generation may wait for any rank of it, so those whose work was done take
// part again. Where all who unwind have finished as well, nobody does.
void Job::FillTheFinishedAgain() {
  const bool somebody_goes_on = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.state == State::kNone || slot.state == State::kStarting ||
           slot.state == State::kStaged;
  });
  if (!somebody_goes_on) return;
  for (Slot& slot : slots_) {
    if (!slot.joined) continue;  // a plain program that is done
    if (slot.state == State::kDone) {
      Vacate(slot);
      late_failure_.reset();  // its work is done again
    } else if (slot.state == State::kLeaving && slot.due == absl::InfiniteDuration()) {
      slot.due = now_ + options_.soft_abort;
    }
  }
}

void Job::TryCommit() {
  std::vector<int> members;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const bool is_waited_for = slot.due != absl::InfiniteDuration();
    if (slot.state == State::kDone || (slot.state == State::kLeaving && !is_waited_for)) continue;
    const bool ready = slot.state == State::kStaged ||
                       (slot.state == State::kStarting && IsPlain(slot)) ||
                       (slot.state == State::kNone && slot.plain && slot.due <= now_);
    if (!ready) return;
    members.push_back(static_cast<int>(i));
  }
  phase_ = JobPhase::kRunning;
  no_spawn_before_ = -absl::InfiniteDuration();
  if (members.empty()) return;  // those who unwound had finished: nothing is left to be formed
  Emit(CommitGeneration{++generation_, members});
  for (const int index : members) {
    Slot& slot = slots_[index];
    slot.due = absl::InfiniteDuration();
    if (slot.state == State::kStaged) slot.state = State::kActive;
    if (slot.state == State::kNone) Spawn(index, generation_);
  }
}

void Job::Spawn(int index, uint64_t generation) {
  Slot& slot = slots_[index];
  slot.state = State::kStarting;
  slot.incarnation = ++last_incarnation_;
  slot.born = generation;
  slot.spawned_at = now_;
  slot.due = absl::InfiniteDuration();
  Emit(SpawnWorker{index, slot.incarnation, generation, attempts_[index]++});
}

void Job::Vacate(Slot& slot) {
  slot.state = State::kNone;
  slot.plain = !slot.joined;
  slot.joined = slot.finished = slot.sealed = false;
  slot.due = std::max(now_, no_spawn_before_);
}

void Job::Refund() {
  history_.Refund();
  progress_base_ = newest_step_;
}

}  // namespace outlast
