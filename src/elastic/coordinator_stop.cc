// How a job of several nodes ends: by a stop that was asked for, by itself, or by a fault.
#include <fmt/format.h>

#include <algorithm>
#include <csignal>

#include "outlast/elastic/coordinator.h"

namespace outlast {

void Coordinator::BeginStop(int signal, const std::string& reason) {
  using Phase = CoordinatorPhase;
  if (phase_ == Phase::kDraining || phase_ == Phase::kEnding || phase_ == Phase::kDone) return;
  const Phase before = phase_;
  const JobOptions& budget = options_.budget;
  Append(StopBegunRecord{signal, reason});
  phase_ = Phase::kDraining;
  seal_due_ = now_ + std::min(budget.grace, budget.stop_within) - budget.abort_term;
  end_due_ = now_ + budget.stop_within + budget.reap + options_.beat_loss;
  leave_due_ = absl::InfiniteDuration();
  save_.reset();
  for (auto& [node, agent] : agents_) agent.prepare_due = agent.ack_due = absl::InfiniteDuration();
  if (before == Phase::kRunning && !SomeStillJoin()) {
    AskAgents(newest_step_);
  } else {
    GiveUpStop(reason, false);
  }
}

// Some ranks have joined, and wait for those that have not, which a stop ends: no step will ever
// come that all could agree on.
bool Coordinator::SomeStillJoin() const {
  if (newest_step_ > 0) return false;
  bool any_joined = false, any_plain = false;
  for (int rank = 0; rank < state_.commit.map.world; ++rank) {
    if (state_.is_finished(rank)) continue;
    (plain_[static_cast<size_t>(rank)] ? any_plain : any_joined) = true;
  }
  return any_joined && any_plain;
}

void Coordinator::AskAgents(int64_t newest_step) {
  for (const auto& [node, agent] : agents_) {
    if (HasWork(agent) && !agent.bye) stop_.Include(agent.id);
  }
  stop_.Ask(newest_step);
  for (auto& [node, agent] : agents_) SendStop(agent);
}

void Coordinator::Hear(Agent& agent, const control::Stopping& stopping) {
  if (phase_ != CoordinatorPhase::kDraining) {
    ++ignored_;
    return;
  }
  newest_step_ = std::max(newest_step_, stopping.step);
  if (stop_.OnAnswer(agent.id, stopping.on_time, stopping.step, stopping.asked))
    return AskAgents(newest_step_);
  if (!stop_.Go()) return;
  Append(StopWentRecord{stop_.step()});
  for (const auto& [node, other] : agents_) Send(other, control::Go{stop_.step()});
}

// The step will not come: what all ranks have in memory is saved without their help.
void Coordinator::GiveUpStop(const std::string& reason, bool hurry) {
  const bool known = state_.stop_gave_up && (state_.stop_hurries || !hurry);
  if (known) return;
  stop_.GiveUp();
  Append(StopGaveUpRecord{hurry, reason});
  for (auto& [node, agent] : agents_) SendStop(agent);
}

void Coordinator::SendStop(Agent& agent) {
  using control::StopHow;
  control::Stop stop{.signal = SIGTERM, .within = options_.budget.stop_within};
  if (state_.stop && state_.stop->signal != 0) stop.signal = state_.stop->signal;
  stop.reason = state_.ending         ? state_.ending->reason
                : state_.stop_gave_up ? state_.stop_failure
                                      : state_.stop->reason;
  if (state_.stop_hurries) {
    stop.how = StopHow::kHurry;
  } else if (state_.ending) {
    stop.how = state_.ending->keep ? StopHow::kAtOnce : StopHow::kNoSave;
  } else if (state_.stop_gave_up) {
    stop.how = StopHow::kAtOnce;
  } else {
    stop.step = state_.stop_went != 0 ? state_.stop_went : stop_.step();
  }
  Send(agent, stop);
  if (stop.how == StopHow::kAtStep && state_.stop_went != 0)
    Send(agent, control::Go{state_.stop_went});
}

void Coordinator::End(JobOutcome outcome, int exit_code, const std::string& reason) {
  if (phase_ == CoordinatorPhase::kEnding || phase_ == CoordinatorPhase::kDone) return;
  // A root that isn't ours is not written, where nothing restores nothing new was trained, and what
  // the root does not take was tried again already.
  const bool keep = outcome != JobOutcome::kRefused && outcome != JobOutcome::kNeedsHuman &&
                    outcome != JobOutcome::kNotInRoot;
  Append(EndingRecord{outcome == JobOutcome::kWorkerFailed ? exit_code : ExitCodeOf(outcome),
                      reason, keep});
  phase_ = CoordinatorPhase::kEnding;
  const JobOptions& budget = options_.budget;
  end_due_ = now_ + budget.stop_within + budget.reap + options_.beat_loss;
  seal_due_ = leave_due_ = absl::InfiniteDuration();
  save_.reset();
  stop_.GiveUp();
  for (auto& [node, agent] : agents_) {
    agent.prepare_due = agent.ack_due = absl::InfiniteDuration();
    SendStop(agent);
  }
}

bool Coordinator::IsEarlyExit(int rank) const {
  return std::any_of(early_exits_.begin(), early_exits_.end(),
                     [rank](const EarlyExit& exit) { return exit.fault.rank == rank; });
}

void Coordinator::TryFinish() {
  if (phase_ == CoordinatorPhase::kForming || phase_ == CoordinatorPhase::kDone) return;
  bool all_finished = state_.commit.map.world > 0 && phase_ != CoordinatorPhase::kEnding;
  for (int rank = 0; all_finished && rank < state_.commit.map.world; ++rank)
    all_finished = state_.is_finished(rank) || IsEarlyExit(rank);
  const bool is_over = phase_ == CoordinatorPhase::kDraining || phase_ == CoordinatorPhase::kEnding;
  if (!all_finished && !is_over) return;
  if (now_ < end_due_) {
    // Nobody waits for spares, nor for a lost one longer than its grace.
    for (const auto& [node, agent] : agents_) {
      if (agent.holds_ranks && !agent.bye) return;
    }
  }
  if (phase_ == CoordinatorPhase::kEnding)
    return FinishAs(state_.ending->exit_code, state_.ending->reason);
  if (!all_finished) {
    return FinishAs(StopCode(), fmt::format("stopped ({}): {}", state_.stop->reason,
                                            durable_ ? "saved" : "not durable"));
  }
  if (state_.late_failure)
    return FinishAs(*state_.late_failure, "a worker failed after its work was done");
  const std::string& lost = state_.root_lost.empty() ? state_.final_save_failed : state_.root_lost;
  if (!lost.empty()) return FinishAs(ExitCodeOf(JobOutcome::kNotInRoot), lost);
  FinishAs(ExitCodeOf(JobOutcome::kFinished), "finished");
}

void Coordinator::FinishAs(int exit_code, const std::string& reason) {
  Append(EndedRecord{exit_code, reason});
  phase_ = CoordinatorPhase::kDone;
  save_.reset();
  for (const auto& [node, agent] : agents_) Send(agent, control::Done{exit_code, reason});
  Emit(FinishJob{exit_code, reason});
}

int Coordinator::StopCode() const {
  if (state_.stop->signal == SIGINT) return ExitCodeOf(JobOutcome::kInterrupted);
  if (state_.stop->signal == SIGHUP) return ExitCodeOf(JobOutcome::kHungUp);
  if (!state_.root_lost.empty() || !state_.final_save_failed.empty())
    return ExitCodeOf(JobOutcome::kNotInRoot);
  return durable_ ? ExitCodeOf(JobOutcome::kPreemptedSaved, options_.budget.preempt_exit)
                  : ExitCodeOf(JobOutcome::kPreemptedUnsaved);
}

}  // namespace outlast
