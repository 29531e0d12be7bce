// A job whose agent was killed, and how the next one goes on with it.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "outlast/elastic/job.h"

namespace outlast {

JobMemo Job::Memo() const {
  using Where = JobMemo::Where;
  const auto where_of = [](State state) {
    switch (state) {
      case State::kStarting:
        return Where::kStarting;
      case State::kStaged:
      case State::kActive:
      case State::kUnwinding:
      case State::kStopped:
        return Where::kInside;
      case State::kLeaving:
        return Where::kLeaving;
      case State::kTerminating:
        return Where::kTerminating;
      case State::kKilled:
        return Where::kKilled;
      case State::kDone:
        return Where::kDone;
      case State::kAbandoned:
        return Where::kAbandoned;
      case State::kNone:
      case State::kExited:  // others still run, so its slot is filled again
        break;
    }
    return Where::kNone;
  };
  JobMemo memo{.generation = generation_,
               .last_incarnation = last_incarnation_,
               .is_ending = phase_ != JobPhase::kRunning && phase_ != JobPhase::kReforming,
               .any_joined = any_joined_,
               .step_committed = step_committed_,
               .progress_base = progress_base_,
               .late_failure = late_failure_.value_or(0),
               .final_save_failed = final_save_failed_.value_or(""),
               .history = history_,
               .slots = {}};
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const bool is_vacated = slot.state == State::kExited;
    memo.slots.push_back({.where = where_of(slot.state),
                          .joined = slot.joined && !is_vacated,
                          .plain = is_vacated ? !slot.joined : slot.plain,
                          .finished = slot.finished,
                          .incarnation = slot.incarnation,
                          .born = slot.born,
                          .attempts = attempts_[i]});
  }
  return memo;
}

Job::Job(JobOptions options, const JobMemo& memo, uint64_t seed) : Job(std::move(options), seed) {
  using Where = JobMemo::Where;
  constexpr std::pair<Where, State> kStates[] = {{Where::kNone, State::kNone},
                                                 {Where::kStarting, State::kStarting},
                                                 {Where::kInside, State::kUnwinding},
                                                 {Where::kLeaving, State::kLeaving},
                                                 {Where::kTerminating, State::kTerminating},
                                                 {Where::kKilled, State::kKilled},
                                                 {Where::kDone, State::kDone},
                                                 {Where::kAbandoned, State::kAbandoned}};
  generation_ = memo.generation;
  last_incarnation_ = memo.last_incarnation;
  any_joined_ = memo.any_joined;
  step_committed_ = memo.step_committed;
  progress_base_ = memo.progress_base;
  if (memo.late_failure != 0) late_failure_ = memo.late_failure;
  if (!memo.final_save_failed.empty()) final_save_failed_ = memo.final_save_failed;
  history_ = memo.history;
  for (size_t i = 0; i < std::min(slots_.size(), memo.slots.size()); ++i) {
    const JobMemo::Slot& from = memo.slots[i];
    Slot& slot = slots_[i];
    slot.state = std::ranges::find(kStates, from.where, &std::pair<Where, State>::first)->second;
    slot.incarnation = from.incarnation;
    slot.born = from.born;
    slot.joined = from.joined;
    slot.plain = from.plain;
    slot.finished = from.finished;
    attempts_[i] = from.attempts;
  }
}

// The workers have been told already that the generation has ended: it does not come back.
void Job::GoOn() {
  phase_ = JobPhase::kReforming;
  Abort("its agent was killed, and another one has taken its place");
  for (Slot& slot : slots_) GoOnWith(slot);
}

std::vector<int> Job::LateForAdoption() const {
  std::vector<int> late;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.state == State::kUnwinding && slot.adopted && slot.due <= now_)
      late.push_back(static_cast<int>(i));
  }
  return late;
}

// Whoever does not unwind after a peer's fault fails after a peer. Here nobody else has failed:
// most likely it hung already, and the agent was killed before the watch could say so. Several may
// wait for one of them in what they cannot leave: that is one fault.
void Job::BlameLateForAdoption(const std::vector<int>& late) {
  std::string who = fmt::format("rank {}", late.front());
  for (size_t i = 1; i < late.size(); ++i) who += fmt::format(", rank {}", late[i]);
  FaultRecord fault = MakeRecord(FaultClass::kHang, late.front(), {}, "late for adoption", 0);
  fault.found_by = kFoundByAdoption;
  fault.detail =
      fmt::format("{}: not back {} after another agent took over: hung since then or before", who,
                  absl::FormatDuration(options_.soft_abort));
  Charge(late.front(), fault);
}

void Job::GoOnWith(Slot& slot) {
  switch (slot.state) {
    case State::kNone:
      slot.due = now_;
      return;
    case State::kStarting:
      slot.spawned_at = now_;
      if (!IsPlain(slot)) slot.due = now_ + options_.respawn;
      return;
    case State::kUnwinding:
      slot.adopted = true;
      slot.due = now_ + options_.soft_abort;
      return;
    case State::kTerminating:
      slot.due = now_ + patience(slot);
      return;
    case State::kKilled:
      slot.due = now_ + options_.reap;
      return;
    default:
      return;
  }
}

}  // namespace outlast
