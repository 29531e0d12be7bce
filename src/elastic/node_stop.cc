// How a node's part of a job ends.
#include <fmt/format.h>

#include <algorithm>
#include <csignal>

#include "outlast/elastic/node_agent.h"

namespace outlast {
namespace {

// As Coordinator::StopCode, where there is no coordinator to say it.
int StopCode(int signal, bool durable, const JobOptions& budget) {
  if (signal == SIGINT) return ExitCodeOf(JobOutcome::kInterrupted);
  if (signal == SIGHUP) return ExitCodeOf(JobOutcome::kHungUp);
  return durable ? ExitCodeOf(JobOutcome::kPreemptedSaved, budget.preempt_exit)
                 : ExitCodeOf(JobOutcome::kPreemptedUnsaved);
}

}  // namespace

// --- Asked here ---

void NodeAgent::On(const StopAsked& event) {
  if (event.signal == SIGINT) ++interrupts_;
  const bool hurry = event.signal == SIGINT && interrupts_ >= 2;
  if (leave_ && !hurry) return;  // a second one changes nothing
  const JobOptions& budget = options_.elastic.budget;
  const absl::Duration within = budget.stop_within;
  // SIGKILL comes at the grace, so what leads to it starts earlier.
  const absl::Duration kill = std::min(budget.grace, within);
  const absl::Duration stays = kill - std::min(budget.abort_term, kill / 2);
  leave_ = control::Leave{.signal = event.signal, .hurry = hurry, .within = within, .stays = stays};
  Send(*leave_);
  if (hurry) {
    EndAll(ExitCodeOf(JobOutcome::kInterrupted), "asked twice", false);
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (IsAlive(slots_[i]) && slots_[i].state != State::kKilled)
        Kill(static_cast<int>(i), "asked twice");
    }
    return;
  }
  // Whatever the coordinator says, or doesn't: the platform's time is this node's limit.
  farewell_due_ = now_ + within;
  if (committed_ == 0 && link_ != Link::kUp) {  // nothing ran, and there is nobody to agree with
    return EndAll(StopCode(event.signal, false, budget),
                  fmt::format("stopped (signal {})", event.signal), false);
  }
  if (stop_due_ == absl::InfiniteDuration()) {
    kill_due_ = now_ + kill;
    seal_due_ = now_ + stays;
  }
}

// --- Agreed with the coordinator ---

void NodeAgent::Hear(const control::Stop& stop) {
  using control::StopHow;
  if (!stopping_) BeginStop(stop.signal, stop.within);
  if (stop.how == StopHow::kAtStep) {
    if (gave_up_) return;
    if (stop.step != stop_.step()) {
      AskWorkers(stop.step, stop.reason);
    } else {
      answered_ = false;
    }
    return AnswerStop();
  }
  GiveUpStop(stop.reason, stop.how == StopHow::kAtOnce);
  if (stop.how != StopHow::kHurry) return;
  persist_due_ = absl::InfiniteDuration();
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (IsAlive(slots_[i]) && slots_[i].state != State::kKilled)
      Kill(static_cast<int>(i), stop.reason);
  }
}

void NodeAgent::BeginStop(int signal, absl::Duration within) {
  const JobOptions& budget = options_.elastic.budget;
  stopping_ = true;
  stop_due_ = now_ + within;
  kill_due_ = std::min(kill_due_, now_ + std::min(budget.grace, within));
  seal_due_ = std::min(seal_due_,
                       kill_due_ - std::min(budget.abort_term,
                                            std::max(absl::ZeroDuration(), kill_due_ - now_) / 2));
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.state == State::kStaged) slot.due = absl::InfiniteDuration();
    if (slot.state == State::kExited) slot.state = State::kDone;
    if (slot.state != State::kStarting || slot.joined) continue;
    Emit(ForwardSignal{static_cast<int>(i), slot.incarnation, signal});
    slot.due = absl::InfiniteDuration();
    if (signal == SIGTERM) {  // no second one later
      slot.state = State::kTerminating;
      slot.due = kill_due_;
    }
  }
}

void NodeAgent::AskWorkers(int64_t step, const std::string& reason) {
  bool anybody = false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!IsAlive(slot) || !slot.joined || slot.finished) continue;
    stop_.Include(static_cast<int>(i));
    anybody = true;
  }
  stop_.AskFor(step);
  answered_ = false;
  if (anybody) Emit(AskStop{step, reason});
}

void NodeAgent::On(const StopAnswered& event) {
  if (Present(event.slot, event.incarnation) == nullptr || !stopping_) return;
  if (stop_.OnAnswer(event.slot, event.on_time, event.step, event.asked)) {
    answered_ = true;  // the next question is answered anew
    return Send(control::Stopping{.asked = stop_.step(), .on_time = false, .step = event.step});
  }
  AnswerStop();
}

void NodeAgent::AnswerStop() {
  if (answered_ || stop_.step() == 0 || gave_up_ || !stop_.everybody_is_on_time()) return;
  answered_ = link_ == Link::kUp;
  Send(control::Stopping{.asked = stop_.step(), .on_time = true});
}

void NodeAgent::Hear(const control::Go& go) {
  if (!stopping_ || gave_up_ || went_ || go.step != stop_.step()) return;
  went_ = true;
  if (any_joined_ && is_member()) persist_due_ = stop_due_;
  Emit(GoStop{go.step});
}

void NodeAgent::On(const StopPersisted& event) {
  if (!stopping_) return;
  durable_ = durable_ || event.durable;
  persist_due_ = absl::InfiniteDuration();
}

// --- Saves that the coordinator wants before it changes the world ---

void NodeAgent::Hear(const control::Save& save) {
  if (save.number == wanted_save_) {  // told again
    if (saved_) Send(*saved_);
    return;
  }
  wanted_save_ = save.number;
  saved_.reset();
  const bool trains = !stopping_ && save.generation == committed_ && committed_ > aborted_;
  if (!trains) return On(WantedSaveEnded{save.number, false, 0, "its generation has ended"});
  Emit(WantSave{save.number, save.reason});
}

void NodeAgent::On(const WantedSaveEnded& event) {
  if (event.number != wanted_save_ || saved_) return;
  saved_ = control::Saved{event.number, event.durable, event.step, event.detail};
  Send(*saved_);
}

// --- Deadlines ---

// S will not come: what all ranks have in memory is saved without their help.
void NodeAgent::GiveUpStop(const std::string& reason, bool keep) {
  if (std::exchange(gave_up_, true)) return;
  stop_.GiveUp();
  Abort(reason);
  if (keep) Persist(reason);
  if (kill_due_ == absl::InfiniteDuration()) kill_due_ = now_;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!IsAlive(slot) || slot.finished || slot.sealed || IsDying(slot)) continue;
    const absl::Duration until = now_ + patience(slot);
    Terminate(static_cast<int>(i), slot.joined ? until : std::max(until, kill_due_), reason);
  }
}

// The time for sealing and leaving is over.
void NodeAgent::EndStop() {
  seal_due_ = absl::InfiniteDuration();
  bool all_sealed = went_;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const bool owes = stop_.includes(static_cast<int>(i)) && !slots_[i].finished;
    all_sealed = all_sealed && (!owes || slots_[i].sealed);
  }
  if (!all_sealed) GiveUpStop("the stop's step did not come in time", true);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (IsAlive(slots_[i]) && !IsDying(slots_[i]))
      Terminate(static_cast<int>(i), std::max(now_, kill_due_), "the stop's grace is over");
  }
}

void NodeAgent::LookAtStop() {
  // It has left, and its ranks are being ended already.
  const bool has_left = leave_ && !stopping_ && committed_ > 0 && !is_preparing() && !is_member();
  if (has_left) seal_due_ = absl::InfiniteDuration();
  if (now_ >= seal_due_) {
    if (!stopping_) BeginStop(leave_ ? leave_->signal : SIGTERM, kill_due_ - now_);
    EndStop();
  }
  if (now_ >= persist_due_) persist_due_ = absl::InfiniteDuration();
}

// Ends all workers, then the agent.
void NodeAgent::EndAll(int exit_code, const std::string& reason, bool keep) {
  if (!end_) end_ = {exit_code, reason};
  if (!stopping_) {
    stopping_ = true;
    stop_due_ = now_ + options_.elastic.budget.stop_within;
  }
  seal_due_ = absl::InfiniteDuration();
  GiveUpStop(reason, keep);
}

void NodeAgent::Persist(const std::string& reason) {
  if (!any_joined_ || !is_member() || durable_) return;
  persist_due_ = stop_due_;
  Emit(PersistCommon{reason});
}

void NodeAgent::FinishWhenAllEnded() {
  if (is_over_) return;
  const bool lives = std::any_of(slots_.begin(), slots_.end(), IsAlive);
  // It left, and the generation that it was in goes on without it.
  if (leave_ && !stopping_ && !lives && committed_ > 0 && !is_preparing() && !is_member()) {
    return Finish(ExitCodeOf(JobOutcome::kLeft), "left on request");
  }
  if (!stopping_) {
    if (said_bye_ || lives || committed_ == 0 || is_preparing() || link_ != Link::kUp) return;
    bool holds_any = false;
    for (const Slot& slot : slots_) {
      if (slot.rank < 0) continue;
      holds_any = true;
      const bool is_done = slot.state == State::kDone || slot.state == State::kExited;
      if (!is_done) return;
    }
    if (!holds_any) return;
    said_bye_ = true;
    return Send(control::Bye{.generation = committed_, .final_step = newest_step_});
  }
  if (lives || persist_due_ != absl::InfiniteDuration()) return;
  // A batch system's TERM to every process ends trainers before they have agreed on a step.
  if (any_joined_ && is_member() && !durable_ && !gave_up_) {
    GiveUpStop("the trainers have ended", /*keep=*/true);
    if (persist_due_ != absl::InfiniteDuration()) return;
  }
  if (end_) return Finish(end_->first, end_->second);
  if (farewell_due_ == absl::InfiniteDuration())
    farewell_due_ = std::max(now_, stop_due_) + options_.elastic.budget.stop_within;
  if (!said_bye_ && link_ == Link::kUp) {
    said_bye_ = true;
    Send(control::Bye{.generation = committed_, .durable = durable_, .final_step = newest_step_});
  }
  if (now_ < farewell_due_) return;
  Finish(StopCode(leave_ ? leave_->signal : SIGTERM, durable_, options_.elastic.budget),
         "the coordinator did not say how the job ended");
}

void NodeAgent::Finish(int exit_code, const std::string& reason) {
  is_over_ = true;
  Emit(FinishJob{exit_code, reason});
}

}  // namespace outlast
