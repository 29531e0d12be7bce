// Events, deadlines and single processes; what faults lead to is in job_reform.cc, how a job ends
// in job_stop.cc.
#include "outlast/elastic/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <utility>

namespace outlast {
namespace {

constexpr uint64_t kTimer = 1;

bool IsStopSignal(int signal) {
  return signal == SIGTERM || signal == SIGINT || signal == SIGHUP || signal == SIGUSR1 ||
         signal == SIGUSR2;
}

}  // namespace

Job::Job(JobOptions options, uint64_t seed)
    : options_(std::move(options)),
      seed_(seed),
      slots_(std::max(options_.world, 0)),
      attempts_(slots_.size(), 0) {}

std::vector<JobAction> Job::Step(const JobEvent& event, const JobView& view) {
  if (phase_ == JobPhase::kDone) return {};
  now_ = view.now;
  newest_step_ = std::max(newest_step_, view.newest_step);
  if (step_committed_ == 0 && newest_step_ - progress_base_ >= options_.progress_steps) Refund();
  // The event goes first: what arrives at its deadline is in time.
  std::visit([this](const auto& typed) { On(typed); }, event);
  LookAtDeadlines();
  if (phase_ == JobPhase::kReforming) {
    FillTheFinishedAgain();
    Refill();
    TryCommit();
  }
  FinishWhenAllEnded();
  ArmNearest();
  return std::exchange(actions_, {});
}

bool Job::is_whole() const {
  return phase_ == JobPhase::kRunning &&
         std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
           return slot.state == State::kActive || slot.state == State::kLeaving ||
                  slot.state == State::kDone || (slot.state == State::kStarting && IsPlain(slot));
         });
}

// --- Events ---

void Job::On(const StartEvent&) {
  if (phase_ != JobPhase::kForming) return;
  if (generation_ > 0) return GoOn();
  phase_ = JobPhase::kRunning;
  generation_ = 1;
  std::vector<int> members;
  for (size_t i = 0; i < slots_.size(); ++i) members.push_back(static_cast<int>(i));
  Emit(CommitGeneration{generation_, members});
  for (const int index : members) Spawn(index, generation_);
}

void Job::On(const WorkerJoined& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || slot->state != State::kStarting || slot->joined) return;
  slot->joined = any_joined_ = true;
  if (phase_ == JobPhase::kReforming)
    slot->due = std::max(slot->spawned_at + options_.respawn, now_ + options_.soft_abort);
}

void Job::On(const WorkerStaged& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || !slot->joined) return;
  if (slot->state == State::kStarting ||
      (slot->state == State::kUnwinding && (slot->adopted || event.left == generation_))) {
    slot->state = State::kStaged;
    slot->adopted = false;
    slot->due = absl::InfiniteDuration();
    // The keeper enters it on the same condition.
    if (generation_ > aborted_ && event.left < generation_) slot->state = State::kActive;
  } else if (slot->state == State::kActive && event.left == generation_) {
    slot->state = State::kStaged;
    // Most likely a peer has died, and we hear of it in a moment.
    if (phase_ == JobPhase::kRunning) slot->due = now_ + options_.soft_abort;
  }
}

void Job::On(const WorkerFinished& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || !slot->joined) return;
  slot->finished = true;
  stop_.Excuse(event.slot);
  if (IsDying(*slot) || slot->state == State::kAbandoned) return;
  slot->state = slot->state == State::kExited ? State::kDone : State::kLeaving;
  slot->due = absl::InfiniteDuration();
  if (phase_ == JobPhase::kStopping) TryGo();
}

void Job::On(const WorkerStopped& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || phase_ != JobPhase::kStopping || !slot->joined) return;
  slot->sealed = true;
  if (!IsDying(*slot) && slot->state != State::kAbandoned) slot->state = State::kStopped;
}

// The others need not wait for the rest of its end, which takes long where it held much memory.
void Job::On(const WorkerDying& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || slot->state != State::kActive || phase_ != JobPhase::kRunning) return;
  if (final_save_failed_) return;  // its WorkerEnded ends the job
  const ProcessEnd end{.signal = event.signal, .out_of_memory = event.out_of_memory};
  FaultRecord fault =
      MakeRecord(ClassOf(end), event.slot, end, std::to_string(128 + event.signal), kInBody);
  fault.found_by = "death notice";
  slot->state = State::kKilled;
  slot->due = now_ + options_.respawn;
  Fault(event.slot, std::move(fault));
}

void Job::On(const WorkerEnded& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || (!IsAlive(*slot) && slot->state != State::kAbandoned)) return;
  const State before = slot->state;
  const bool joined = slot->joined;
  const bool ours = IsDying(*slot) || before == State::kAbandoned || event.end.by_us;
  slot->due = absl::InfiniteDuration();
  if (slot->finished) {
    slot->state = State::kDone;
    if (ours || event.end.clean()) return;
    // It must not be hidden, but there is nothing left to be done again.
    FaultRecord fault =
        MakeRecord(FaultClass::kCrash, event.slot, event.end, "after its work was done", 0);
    faults_.push_back(fault);
    Emit(RecordFault{fault, history_.crashes, options_.max_restarts});
    if (!late_failure_) late_failure_ = WorkerExitCode(FaultClass::kCrash, event.end);
    return;
  }
  slot->state = State::kNone;
  const bool going_on = phase_ == JobPhase::kRunning || phase_ == JobPhase::kReforming;
  if (going_on && final_save_failed_ && joined && !ours && !event.end.clean()) {
    // All is trained, and its save was tried again: a restart would only fail once more.
    return End(JobOutcome::kNotInRoot, 0, *final_save_failed_);
  }
  if (going_on) {
    EndedWhileRunning(event.slot, ours ? State::kKilled : before, joined, event.end);
  } else if (phase_ == JobPhase::kStopping && stop_.includes(event.slot) && !slot->sealed &&
             !ours) {
    // Batch systems signal every process of a job, so the stop's own signal may end it. Nothing is
    // charged either way.
    const FaultClass fault_class =
        IsStopSignal(event.end.signal) ? FaultClass::kPreempt : FaultClass::kCrash;
    const FaultRecord fault = MakeRecord(fault_class, event.slot, event.end, "during a stop", 0);
    faults_.push_back(fault);
    Emit(RecordFault{fault, history_.crashes, options_.max_restarts});
    GiveUpStop(fault.detail + " during a stop");
  }
}

void Job::On(const VerdictGiven& event) {
  if (event.culprit < 0 || event.culprit >= static_cast<int>(slots_.size())) return;
  Slot& slot = slots_[event.culprit];
  if ((slot.state == State::kExited || slot.state == State::kStaged) &&
      phase_ == JobPhase::kRunning) {
    slot.due = now_;  // others do wait for it: the grace is over
    return;
  }
  const std::string reason =
      fmt::format("rank {}: {}: {}", event.culprit, event.verdict_class, event.detail);
  if (slot.state == State::kActive && phase_ == JobPhase::kStopping) return GiveUpStop(reason);
  if (slot.state == State::kActive && phase_ == JobPhase::kRunning) {
    FaultRecord fault =
        MakeRecord(FaultClass::kHang, event.culprit, {}, event.verdict_class, event.phase);
    fault.found_by = "watchdog: " + event.verdict_class;
    fault.detail = reason;
    Fault(event.culprit, std::move(fault));
  }
  if (event.stopped && slot.state == State::kUnwinding) Kill(event.culprit, reason);
}

void Job::On(const StopAsked& event) {
  if (event.signal == SIGINT) ++interrupts_;
  const std::string reason = fmt::format("signal {}", event.signal);
  if (phase_ == JobPhase::kStopping || phase_ == JobPhase::kEnding) {
    if (event.signal == SIGINT && interrupts_ >= 2) Hurry();
  } else {
    BeginStop(event.signal, reason);
  }
}

void Job::On(const StopAnswered& event) {
  const Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || phase_ != JobPhase::kStopping) return;
  const int64_t former = stop_.step();
  if (stop_.OnAnswer(event.slot, event.on_time, event.step, event.asked)) {
    Ask(std::max(newest_step_, event.step),
        fmt::format("rank {} was late for step {}", event.slot, former));
  }
  TryGo();
}

void Job::On(const StopPersisted& event) {
  durable_ = durable_ || event.durable;
  persist_due_ = absl::InfiniteDuration();
}

void Job::On(const CheckpointCommitted& event) {
  final_save_failed_.reset();
  if (event.step <= step_committed_) return;
  step_committed_ = event.step;
  Refund();
}

void Job::On(const RestoreFailed& event) {
  End(JobOutcome::kNeedsHuman, 0, "no checkpoint restores: " + event.detail);
}

void Job::On(const RootRefused& event) { End(JobOutcome::kRefused, 0, event.detail); }

void Job::On(const RootLost& event) {
  if (!root_lost_) root_lost_ = event.detail;
  if (phase_ == JobPhase::kRunning || phase_ == JobPhase::kReforming) BeginStop(0, event.detail);
}

void Job::On(const FinalSaveFailed& event) { final_save_failed_ = event.detail; }

void Job::On(const TimerFired& event) {
  if (event.timer == kTimer) armed_.reset();
}

// --- Deadlines ---

void Job::LookAtDeadlines() {
  if (phase_ == JobPhase::kStopping && now_ >= seal_due_) EndStop();
  if (now_ >= persist_due_) persist_due_ = absl::InfiniteDuration();
  std::vector<int> stuck;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.due > now_ || phase_ != JobPhase::kReforming) continue;
    if (slot.state == State::kUnwinding || slot.state == State::kStarting)
      stuck.push_back(static_cast<int>(i));
  }
  if (!stuck.empty()) Emit(CaptureStacks{stuck, "not back in time for the next generation"});
  const std::vector<int> late = LateForAdoption();
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].due <= now_) SlotIsDue(static_cast<int>(i));
  }
  if (!late.empty()) BlameLateForAdoption(late);
}

void Job::SlotIsDue(int index) {
  Slot& slot = slots_[index];
  switch (slot.state) {
    case State::kTerminating:
      return Kill(index, "SIGTERM did not end it");
    case State::kKilled:
      return Abandon(index);
    case State::kNone:
      return;  // Refill looks after it
    default:
      slot.due = absl::InfiniteDuration();
  }
  switch (slot.state) {
    case State::kExited:
      if (!OthersRun(index)) {
        slot.state = State::kDone;
      } else {
        Vacate(slot);
        FaultRecord fault = MakeRecord(FaultClass::kEarlyExit, index, {}, "early", 0);
        fault.found_by = "early-exit grace";
        fault.detail = fmt::format("rank {}: exit code 0 while others run", index);
        Fault(index, std::move(fault));
      }
      return;
    case State::kStaged: {
      FaultRecord fault = MakeRecord(FaultClass::kCrash, index, {}, "left the generation", 0);
      fault.found_by = "staged";
      fault.detail =
          fmt::format("rank {}: left generation {} with kAborted, which nobody had aborted", index,
                      generation_);
      return Fault(index, std::move(fault));
    }
    case State::kUnwinding:
      return Terminate(index, now_ + patience(slot), "not back in ForEachGeneration in time");
    case State::kLeaving:
      if (phase_ != JobPhase::kReforming) return;
      return Terminate(index, now_ + patience(slot), "its rank is wanted again");
    case State::kStarting: {
      if (phase_ != JobPhase::kReforming) return;
      const bool replacement = slot.born > generation_;
      Terminate(index, now_ + patience(slot), "not staged in time");
      if (!replacement) return;
      FaultRecord fault = MakeRecord(FaultClass::kHang, index, {}, "respawn", 0);
      fault.found_by = "respawn deadline";
      fault.detail = fmt::format("rank {}: not staged {} after its spawn", index,
                                 absl::FormatDuration(now_ - slot.spawned_at));
      return Fault(index, std::move(fault));
    }
    default:
      return;
  }
}

absl::Duration Job::Nearest() const {
  if (phase_ == JobPhase::kDone) return absl::InfiniteDuration();
  absl::Duration nearest =
      phase_ == JobPhase::kStopping ? std::min(seal_due_, persist_due_) : persist_due_;
  for (const Slot& slot : slots_) {
    // A slot whose back-off is over waits for other processes, which have deadlines of their own.
    if (slot.state != State::kNone || slot.due > now_) nearest = std::min(nearest, slot.due);
  }
  return nearest;
}

void Job::ArmNearest() {
  const absl::Duration nearest = Nearest();
  if (nearest == absl::InfiniteDuration()) {
    if (armed_) Emit(DisarmTimer{kTimer});
    armed_.reset();
  } else if (armed_ != nearest) {
    Emit(ArmTimer{kTimer, nearest});
    armed_ = nearest;
  }
}

// --- Processes ---

void Job::Abort(const std::string& reason) {
  if (aborted_ == generation_) return;
  aborted_ = generation_;
  Emit(AbortGeneration{generation_, reason});
}

void Job::Terminate(int index, absl::Duration kill_at, const std::string& reason) {
  Slot& slot = slots_[index];
  slot.state = State::kTerminating;
  slot.due = kill_at;
  Emit(KillWorker{index, slot.incarnation, KillHow::kTerm, reason});
}

void Job::Kill(int index, const std::string& reason) {
  Slot& slot = slots_[index];
  slot.state = State::kKilled;
  slot.due = now_ + options_.reap;
  Emit(KillWorker{index, slot.incarnation, KillHow::kKill, reason});
}

void Job::Abandon(int index) {
  slots_[index].state = State::kAbandoned;
  slots_[index].due = absl::InfiniteDuration();
  const std::string who = fmt::format("rank {} did not end {} after SIGKILL", index,
                                      absl::FormatDuration(options_.reap));
  abandoned_ += (abandoned_.empty() ? "" : "; ") + who;
  // Its slot can't be filled here, and there is no other node.
  if (phase_ == JobPhase::kReforming || phase_ == JobPhase::kRunning)
    End(JobOutcome::kExcluded, 0, who);
}

Job::Slot* Job::Present(int slot, uint64_t incarnation) {
  if (slot < 0 || slot >= static_cast<int>(slots_.size())) return nullptr;
  Slot& found = slots_[slot];
  if (found.incarnation != incarnation || found.state == State::kNone ||
      found.state == State::kDone)
    return nullptr;
  return &found;
}

bool Job::IsAlive(const Slot& slot) {
  return slot.state != State::kNone && slot.state != State::kExited && slot.state != State::kDone &&
         slot.state != State::kAbandoned;
}

bool Job::IsDying(const Slot& slot) {
  return slot.state == State::kTerminating || slot.state == State::kKilled;
}

bool Job::OthersRun(int index) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& other = slots_[i];
    if (static_cast<int>(i) != index && IsAlive(other) && other.joined && !other.finished)
      return true;
  }
  return false;
}

absl::Duration Job::patience(const Slot& slot) const {
  return slot.joined ? options_.abort_term : options_.grace;
}

}  // namespace outlast
