// Workers and their deadlines; the link is in node_link.cc, stops and ends in node_stop.cc.
#include "outlast/elastic/node_agent.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>

namespace outlast {
namespace {

constexpr uint64_t kTimer = 1;

}  // namespace

NodeAgent::NodeAgent(NodeOptions options)
    : options_(std::move(options)), slots_(static_cast<size_t>(std::max(options_.capacity, 0))) {}

std::vector<NodeAction> NodeAgent::Step(const NodeEvent& event, const JobView& view) {
  if (is_over_) return {};
  now_ = view.now;
  newest_step_ = std::max(newest_step_, view.newest_step);
  std::visit([this](const auto& typed) { On(typed); }, event);
  LookAtSlots();
  LookAtStop();
  if (!stopping_ && is_preparing()) {
    Refill();
    TryPrepared();
  }
  TryCommitted();
  FinishWhenAllEnded();
  LookAtLink();
  ArmNearest();
  return std::exchange(actions_, {});
}

// --- Workers ---

void NodeAgent::On(const WorkerJoined& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || slot->state != State::kStarting || slot->joined) return;
  slot->joined = any_joined_ = beat_now_ = true;
  slot->plain = false;
  if (is_preparing()) {
    slot->due = std::max(slot->spawned_at + options_.elastic.budget.respawn,
                         now_ + options_.elastic.budget.soft_abort);
  }
}

void NodeAgent::On(const WorkerStaged& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || !slot->joined) return;
  if (slot->state == State::kStarting ||
      (slot->state == State::kUnwinding && event.left == committed_)) {
    slot->state = State::kStaged;
    slot->due = absl::InfiniteDuration();
    // The driver enters it on the same condition.
    if (committed_ > aborted_ && event.left < committed_ && slot->rank >= 0)
      slot->state = State::kActive;
  } else if (slot->state == State::kActive && event.left == committed_) {
    slot->state = State::kStaged;
    // Most likely a peer has died, and we hear of it in a moment: of a lost node, which may come
    // back, only after its grace.
    if (!is_preparing()) {
      slot->due = now_ + options_.elastic.beat_loss + options_.elastic.rejoin_grace +
                  options_.elastic.budget.soft_abort;
    }
  }
}

void NodeAgent::On(const WorkerFinished& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || !slot->joined) return;
  slot->finished = beat_now_ = true;
  stop_.Excuse(event.slot);
  if (IsDying(*slot) || slot->state == State::kAbandoned) return;
  slot->state = slot->state == State::kExited ? State::kDone : State::kLeaving;
  slot->due = absl::InfiniteDuration();
  if (!stopping_ && is_preparing()) FillAgain(*slot);
  if (stopping_) AnswerStop();
}

void NodeAgent::On(const WorkerStopped& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || !stopping_ || !slot->joined) return;
  slot->sealed = true;
  if (!IsDying(*slot) && slot->state != State::kAbandoned) slot->state = State::kStopped;
}

// The others need not wait for the rest of its end, which takes long where it held much memory.
void NodeAgent::On(const WorkerDying& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || slot->state != State::kActive || is_preparing() || stopping_) return;
  slot->state = State::kKilled;
  slot->due = now_ + options_.elastic.budget.respawn;
  slot->held = true;
  const ProcessEnd end{.signal = event.signal, .out_of_memory = event.out_of_memory};
  Report(event.slot, ClassOf(end), end, std::to_string(128 + event.signal), kInBody,
         fmt::format("rank {}: {}", slot->rank, HowItEnded(end)));
}

void NodeAgent::On(const WorkerEnded& event) {
  Slot* const slot = Present(event.slot, event.incarnation);
  if (slot == nullptr || (!IsAlive(*slot) && slot->state != State::kAbandoned)) return;
  const State before = slot->state;
  const bool joined = slot->joined;
  const bool ours = IsDying(*slot) || before == State::kAbandoned || event.end.by_us;
  slot->due = absl::InfiniteDuration();
  beat_now_ = true;
  if (slot->finished) {
    slot->state = State::kDone;
    // It must not be hidden, but there is nothing left to be done again.
    if (!ours && !event.end.clean()) {
      Report(event.slot, FaultClass::kCrash, event.end, "after its work was done", 0,
             fmt::format("rank {}: {} after its work was done", slot->rank, HowItEnded(event.end)));
    }
    if (!stopping_ && is_preparing()) FillAgain(*slot);
    return;
  }
  slot->state = State::kEmpty;
  if (stopping_) {
    const bool owes = stop_.includes(event.slot) && !slot->sealed && !ours && !gave_up_;
    if (!owes) return;
    const std::string detail = fmt::format("rank {}: {}", slot->rank, HowItEnded(event.end));
    Report(event.slot, FaultClass::kPreempt, event.end, "during a stop", 0, detail);
    GiveUpStop(detail + " during a stop", true);
    return;
  }
  EndedInGeneration(event.slot, ours ? State::kKilled : before, joined, event.end);
}

// `before` is kKilled for whatever we had sent a signal to.
void NodeAgent::EndedInGeneration(int index, State before, bool joined, const ProcessEnd& end) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  const bool plain = slot.plain && !joined;
  const bool held = slot.held;
  Vacate(slot);
  if (slot.rank < 0) return;  // it had been released
  slot.held = held;
  if (before == State::kKilled) {
    if (is_preparing() || held) return;
    // Somebody else in the agent ended it: no cause, but the slot is empty.
    ProcessEnd by_us = end;
    by_us.by_us = true;
    slot.held = true;
    return Report(index, FaultClass::kCrash, by_us, "ended by us", 0,
                  fmt::format("rank {} was ended by us", slot.rank));
  }
  if (plain && end.clean()) {
    slot.state = State::kDone;
    return;
  }
  const bool is_early = joined && end.clean();
  const int code = end.signal != 0 ? 128 + end.signal : end.code;
  if (is_early && !is_preparing()) {
    slot.state = State::kExited;
  } else {
    // A victim is replaced at once; what was born for the generation that forms, or dies in an open
    // one, waits for the coordinator's word.
    slot.held = !is_preparing() || slot.born > committed_;
  }
  Report(index, ClassOf(end), end, std::to_string(code), joined ? kInBody : 0,
         fmt::format("rank {}: {}{}", slot.rank, HowItEnded(end),
                     is_early ? " while others run" : ""));
}

void NodeAgent::On(const VerdictGiven& event) {
  if (event.culprit < 0 || event.culprit >= static_cast<int>(slots_.size())) return;
  Slot& slot = slots_[static_cast<size_t>(event.culprit)];
  const std::string detail =
      fmt::format("rank {}: {}: {}", slot.rank, event.verdict_class, event.detail);
  if (slot.state == State::kActive && stopping_) {
    Report(event.culprit, FaultClass::kHang, {}, event.verdict_class, event.phase, detail);
    return GiveUpStop(detail, true);
  }
  slot.stopped = event.stopped;
  if (slot.state == State::kStaged && !is_preparing()) slot.due = now_;
  if (slot.state == State::kActive && !is_preparing())
    Report(event.culprit, FaultClass::kHang, {}, event.verdict_class, event.phase, detail);
  if (slot.stopped && slot.state == State::kUnwinding) Kill(event.culprit, detail);
}

void NodeAgent::On(const TimerFired& event) {
  if (event.timer == kTimer) armed_.reset();
}

void NodeAgent::Report(int index, FaultClass fault_class, const ProcessEnd& end, std::string what,
                       uint32_t phase, std::string detail) {
  const Slot& slot = slots_[static_cast<size_t>(index)];
  const bool died = fault_class == FaultClass::kCrash || fault_class == FaultClass::kResource;
  control::Fault fault{.rank = slot.rank,
                       .generation = slot.born > committed_ ? target_ : committed_,
                       .process = slot.incarnation,
                       .born = slot.born,
                       .fault_class = fault_class,
                       .end = end,
                       .what = std::move(what),
                       .phase = phase,
                       .detail = std::move(detail),
                       .plain = IsPlain(slot) || (slot.plain && died),
                       .finished = slot.finished};
  const bool by_end = !end.clean() || fault_class == FaultClass::kEarlyExit;
  const std::string found_by = fault_class == FaultClass::kHang ? "watchdog: " + fault.what
                               : by_end                         ? "process exit"
                                                                : fault.what;
  Emit(RecordFault{.fault = {.fault_class = fault_class,
                             .rank = slot.rank,
                             .generation = fault.generation,
                             .step_reached = newest_step_,
                             .step_committed = step_committed_,
                             .end = end,
                             .found_by = found_by,
                             .detail = fault.detail,
                             .root = FaultRoot(fault_class, fault.what, phase),
                             .victim = is_preparing() && slot.born <= committed_,
                             .node = options_.node},
                   .budget_used = 0,
                   .budget = 0});
  // It says that something else broke what it was in.
  if (fault_class == FaultClass::kCrash && end.clean()) fault.evidence = control::Evidence::kPeer;
  faults_.push_back(fault);
  Send(std::move(fault));
}

// --- Generations ---

// Nothing of the next attempt starts while a plain process of the former one may still hold its
// ports and devices.
void NodeAgent::Refill() {
  const bool plain_is_dying = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return IsDying(slot) && IsPlain(slot);
  });
  if (plain_is_dying) return;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    const bool wanted = slot.state == State::kEmpty && slot.rank >= 0 && !slot.held;
    if (!wanted || slot.plain || no_spawn_before_ > now_) continue;
    Spawn(static_cast<int>(i), target_);
    slot.due = now_ + options_.elastic.budget.respawn;
  }
}

// Of a rank whose work is done, for the generation that forms. A process that still lives has some
// time to end by itself.
void NodeAgent::FillAgain(Slot& slot) {
  if (slot.state == State::kLeaving) {
    if (slot.rank >= 0) slot.due = now_ + options_.elastic.budget.soft_abort;
  } else if (slot.state == State::kDone) {
    Vacate(slot);
    slot.finished = slot.held = false;
  }
}

bool NodeAgent::IsReady(const Slot& slot) const {
  switch (slot.state) {
    case State::kStaged:
    case State::kDone:
      return true;
    case State::kStarting:
      return IsPlain(slot);
    case State::kEmpty:
      return slot.plain && !slot.held && no_spawn_before_ <= now_;
    default:
      return false;
  }
}

void NodeAgent::TryPrepared() {
  if (said_staged_ || link_ != Link::kUp || round_owner_ != coordinator_) return;
  for (const Slot& slot : slots_) {
    if (slot.rank >= 0 && !IsReady(slot)) return;
  }
  said_staged_ = true;
  Send(control::Prepared{
      .generation = target_, .round = round_, .staged = true, .last_step = newest_step_});
}

void NodeAgent::TryCommitted() {
  if (said_committed_ || link_ != Link::kUp || committed_ == 0 || committed_ <= aborted_) return;
  bool holds_any = false;
  for (const Slot& slot : slots_) {
    if (slot.rank < 0) continue;
    holds_any = true;
    const bool runs = slot.state == State::kActive || slot.state == State::kLeaving ||
                      slot.state == State::kDone ||
                      (slot.state == State::kStarting && IsPlain(slot));
    if (!runs && slot.born != committed_) return;
    // Of the first generation, and of plain slots, each enters when it joins.
    if (!runs && slot.state != State::kStarting) return;
  }
  if (!holds_any) return;
  said_committed_ = true;
  Send(control::Committed{committed_});
}

void NodeAgent::Abort(const std::string& reason) {
  if (aborted_ >= committed_) return;
  aborted_ = committed_;
  Emit(AbortGeneration{committed_, reason});
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.state == State::kActive) {
      slot.state = State::kUnwinding;
      slot.due = now_ + options_.elastic.budget.soft_abort;
      if (slot.stopped) Kill(static_cast<int>(i), "stopped: soft means do nothing to it");
    } else if (slot.state == State::kStarting && slot.joined) {
      slot.due = std::max(slot.spawned_at + options_.elastic.budget.respawn,
                          now_ + options_.elastic.budget.soft_abort);
    } else if (slot.state == State::kStaged) {
      slot.due = absl::InfiniteDuration();
    } else if (slot.state == State::kExited) {
      Vacate(slot);
    }
  }
}

void NodeAgent::Spawn(int index, uint64_t generation) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  slot.state = State::kStarting;
  slot.incarnation = ++last_process_;
  slot.born = generation;
  slot.joined = slot.finished = slot.sealed = slot.held = slot.stopped = false;
  slot.spawned_at = now_;
  slot.due = absl::InfiniteDuration();
  said_bye_ = false;
  Emit(SpawnWorker{index, slot.incarnation, generation, slot.attempts++});
}

void NodeAgent::Vacate(Slot& slot) {
  slot.state = State::kEmpty;
  slot.plain = slot.plain && !slot.joined;
  slot.joined = false;
  slot.due = absl::InfiniteDuration();
}

// --- Deadlines and processes ---

void NodeAgent::LookAtSlots() {
  std::vector<int> stuck;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.due > now_ || !is_preparing() || stopping_) continue;
    if (slot.state == State::kUnwinding || slot.state == State::kStarting)
      stuck.push_back(static_cast<int>(i));
  }
  if (!stuck.empty()) Emit(CaptureStacks{stuck, "not back in time for the next generation"});
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].due <= now_) SlotIsDue(static_cast<int>(i));
  }
}

void NodeAgent::SlotIsDue(int index) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  switch (slot.state) {
    case State::kTerminating:
      return Kill(index, "SIGTERM did not end it");
    case State::kKilled:
      slot.state = State::kAbandoned;
      slot.due = absl::InfiniteDuration();
      slot.stopped = false;
      if (!stopping_ && slot.rank >= 0) {
        Report(index, FaultClass::kHardware, {}, "unkillable", 0,
               fmt::format("rank {} did not end {} after SIGKILL", slot.rank,
                           absl::FormatDuration(options_.elastic.budget.reap)));
      }
      return;
    default:
      slot.due = absl::InfiniteDuration();
  }
  switch (slot.state) {
    case State::kStaged:
      return Report(
          index, FaultClass::kCrash, {}, "left the generation", 0,
          fmt::format("rank {}: left generation {} with kAborted, which nobody had aborted",
                      slot.rank, committed_));
    case State::kUnwinding:
      return Terminate(index, now_ + patience(slot), "not back in ForEachGeneration in time");
    case State::kLeaving:
      if (stopping_ || !is_preparing()) return;
      return Terminate(index, now_ + patience(slot), "its rank is wanted again");
    case State::kStarting: {
      if (!is_preparing()) return;
      const bool replacement = slot.born > committed_;
      Terminate(index, now_ + patience(slot), "not staged in time");
      if (!replacement) return;
      slot.held = true;
      return Report(index, FaultClass::kHang, {}, "respawn", 0,
                    fmt::format("rank {}: not staged {} after its spawn", slot.rank,
                                absl::FormatDuration(now_ - slot.spawned_at)));
    }
    default:
      return;
  }
}

void NodeAgent::Terminate(int index, absl::Duration kill_at, const std::string& reason) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  slot.state = State::kTerminating;
  slot.due = kill_at;
  Emit(KillWorker{index, slot.incarnation, KillHow::kTerm, reason});
}

void NodeAgent::Kill(int index, const std::string& reason) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  slot.state = State::kKilled;
  slot.due = now_ + options_.elastic.budget.reap;
  Emit(KillWorker{index, slot.incarnation, KillHow::kKill, reason});
}

NodeAgent::Slot* NodeAgent::Present(int slot, uint64_t incarnation) {
  if (slot < 0 || slot >= static_cast<int>(slots_.size())) return nullptr;
  Slot& found = slots_[static_cast<size_t>(slot)];
  if (found.incarnation != incarnation || found.state == State::kEmpty ||
      found.state == State::kDone)
    return nullptr;
  return &found;
}

bool NodeAgent::IsAlive(const Slot& slot) {
  return slot.state != State::kEmpty && slot.state != State::kExited &&
         slot.state != State::kDone && slot.state != State::kAbandoned;
}

bool NodeAgent::IsDying(const Slot& slot) {
  return slot.state == State::kTerminating || slot.state == State::kKilled;
}

absl::Duration NodeAgent::patience(const Slot& slot) const {
  return slot.joined ? options_.elastic.budget.abort_term : options_.elastic.budget.grace;
}

absl::Duration NodeAgent::Nearest() const {
  absl::Duration nearest = std::min({link_due_, beat_due_, alone_due_, seal_due_, persist_due_});
  const bool awaits_farewell = stopping_ && persist_due_ == absl::InfiniteDuration() &&
                               std::none_of(slots_.begin(), slots_.end(), IsAlive);
  if (awaits_farewell) nearest = std::min(nearest, farewell_due_);
  for (const Slot& slot : slots_) {
    nearest = std::min(nearest, slot.due);
    const bool backs_off = slot.state == State::kEmpty && is_preparing() && no_spawn_before_ > now_;
    if (backs_off) nearest = std::min(nearest, no_spawn_before_);
  }
  return nearest;
}

// As the coordinator's: only a deadline before the armed one is armed anew.
void NodeAgent::ArmNearest() {
  const absl::Duration nearest = is_over_ ? absl::InfiniteDuration() : Nearest();
  if (nearest == absl::InfiniteDuration()) {
    if (armed_) Emit(DisarmTimer{kTimer});
    armed_.reset();
  } else if (!armed_ || nearest < *armed_) {
    Emit(ArmTimer{kTimer, nearest});
    armed_ = nearest;
  }
}

}  // namespace outlast
