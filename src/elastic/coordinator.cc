// Events, agents that come and go, deadlines; what faults lead to is in coordinator_reform.cc, how
// a job ends in coordinator_stop.cc.
#include "outlast/elastic/coordinator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <csignal>

#include "outlast/base/status.h"
#include "outlast/elastic/journal.h"

namespace outlast {
namespace {

constexpr uint64_t kTimer = 1;

}  // namespace

Coordinator::Coordinator(ElasticOptions options, CoordinatorState state, const Id128& run_id,
                         uint64_t least_incarnation)
    : options_(std::move(options)),
      state_(std::move(state)),
      run_id_(run_id),
      least_incarnation_(least_incarnation),
      rates_(options_.peer_rate_floor, options_.peer_rate_share) {}

int Coordinator::absent() const {
  return static_cast<int>(std::count_if(
      agents_.begin(), agents_.end(), [](const auto& agent) { return agent.second.stream == 0; }));
}

std::vector<CoordinatorAction> Coordinator::Step(const CoordinatorEvent& event,
                                                 absl::Duration now) {
  if (phase_ == CoordinatorPhase::kSteppedDown) return {};
  now_ = now;
  std::visit([this](const auto& typed) { On(typed); }, event);
  if (phase_ != CoordinatorPhase::kDone && phase_ != CoordinatorPhase::kSteppedDown) {
    LookAtDeadlines();
    TryMeasure();
    TryForm();
    TryCommit();
    TryRun();
    TryFinish();
    TellWhoIsHere();
  }
  ArmNearest();
  return std::exchange(actions_, {});
}

// --- Events ---

void Coordinator::On(const StartEvent&) {
  if (std::exchange(started_yet_, true)) return;
  started_ = now_;
  job_base_ = state_.job_time;
  const bool is_new = state_.incarnation == 0;
  Append(StartedRecord{is_new ? run_id_ : state_.run_id,
                       std::max(state_.incarnation + 1, least_incarnation_)});
  join_due_ = now_ + options_.join;
  last_save_ = state_.incarnation << 32;  // no number of a former coordinator's comes again
  plain_.assign(static_cast<size_t>(state_.commit.map.world), false);
  for (const int rank : state_.commit.plain) plain_[static_cast<size_t>(rank)] = true;
  // Those who held ranks are expected back, with their workers.
  for (const RankRun& run : state_.commit.map.runs) {
    auto [at, is_first] = agents_.try_emplace(run.node);
    Agent& agent = at->second;
    if (is_first) agent.id = next_id_++;
    agent.node = run.node;
    agent.incarnation = run.incarnation;
    agent.segment = run.segment;
    agent.capacity = std::max(agent.capacity, run.first_slot + run.count);
    agent.lost_due = now_ + options_.rejoin_grace;
    agent.holds_ranks = true;
  }
  if (state_.ended) {
    phase_ = CoordinatorPhase::kDone;
  } else if (state_.ending) {
    phase_ = CoordinatorPhase::kEnding;
    end_due_ = now_ + options_.budget.stop_within;
  } else if (state_.stop) {
    phase_ = CoordinatorPhase::kDraining;
    end_due_ = now_ + options_.budget.stop_within;
    if (state_.stop_went == 0 && !state_.stop_gave_up)
      GiveUpStop("the coordinator was restarted before a step was agreed", false);
  } else if (state_.target > state_.generation()) {
    phase_ = CoordinatorPhase::kReforming;
    StartRound();
  } else if (state_.generation() > 0) {
    phase_ = CoordinatorPhase::kSuspect;
  }
}

void Coordinator::On(const HelloReceived& event) {
  if (phase_ == CoordinatorPhase::kDone && event.distrust.empty() &&
      event.hello.job == options_.job && !IsOfAnotherRun(event.hello)) {
    // Who has had no part in it must not take its end for his own.
    if (event.hello.run_id.is_zero()) {
      const control::Refused refused{
          control::Refusal::kNever,
          fmt::format("job {} had ended before agent {} came, with {} ({}): a new job wants a new "
                      "journal",
                      options_.job, event.hello.node, state_.ended->exit_code,
                      state_.ended->reason)};
      Emit(SendToAgent{event.stream, refused});
      Emit(CloseStream{event.stream, refused.reason});
      return;
    }
    Emit(SendToAgent{event.stream,
                     control::Welcome{state_.run_id, state_.incarnation, state_.generation()}});
    Emit(SendToAgent{event.stream, control::Done{state_.ended->exit_code, state_.ended->reason}});
    return;
  }
  if (const auto refused = WhyNot(event)) {
    Emit(SendToAgent{event.stream, *refused});
    Emit(CloseStream{event.stream, refused->reason});
    return;
  }
  const control::Hello& hello = event.hello;
  if (hello.coordinator > state_.incarnation) {
    phase_ = CoordinatorPhase::kSteppedDown;
    Emit(StepDown{fmt::format("agent {} has seen coordinator {}, this is {}", hello.node,
                              hello.coordinator, state_.incarnation)});
    return;
  }
  if (const auto known = agents_.find(hello.node); known != agents_.end()) {
    Agent& former = known->second;
    if (former.stream != 0) {
      nodes_of_streams_.erase(former.stream);
      Emit(CloseStream{former.stream, "the agent has a newer stream"});
    }
    if (former.incarnation != hello.incarnation)
      Remove(hello.node, "its agent was restarted, and its workers are gone");
  }
  auto [at, is_new] = agents_.try_emplace(hello.node);
  Agent& agent = at->second;
  if (is_new) agent.id = next_id_++;
  agent.node = hello.node;
  agent.incarnation = hello.incarnation;
  agent.stream = event.stream;
  agent.capacity = hello.capacity;
  agent.segment = hello.segment;
  agent.slot_hint = hello.slot_hint;
  agent.address = event.address;
  agent.peer_address = hello.peer_address;
  agent.measure_address = hello.measure_address;
  agent.saves_on_request = hello.saves_on_request;
  agent.watches_links = hello.watches_links;
  if (is_new) {
    rates_.Forget(hello.node);
    if (!hello.measure_address.empty())
      agent.measured_due = measuring_until_ = now_ + options_.measure_all;
    MayGrow();
  }
  agent.heard = now_;
  agent.lost_due = absl::InfiniteDuration();
  nodes_of_streams_[event.stream] = hello.node;
  may_have_changed_ = true;
  if (!hello.terms.empty() && hello.terms != state_.terms.terms && !TermsBind(hello.node))
    Append(TermsRecord{hello.node, hello.terms});
  Send(agent, control::Welcome{state_.run_id, state_.incarnation, state_.generation()});
  BringUpToDate(agent);
}

bool Coordinator::IsOfAnotherRun(const control::Hello& hello) const {
  return !hello.run_id.is_zero() && hello.run_id != state_.run_id;
}

std::optional<control::Refused> Coordinator::WhyNot(const HelloReceived& event) {
  using control::Refusal;
  using control::Refused;
  const control::Hello& hello = event.hello;
  if (!event.distrust.empty())
    return Refused{Refusal::kNever, fmt::format("agent {}: {}", hello.node, event.distrust)};
  if (hello.job != options_.job) {
    return Refused{Refusal::kNever, fmt::format("agent {} is of job '{}', this is job '{}'",
                                                hello.node, hello.job, options_.job)};
  }
  if (IsOfAnotherRun(hello)) {
    return Refused{Refusal::kBegunAnew,
                   fmt::format("job {} was begun anew as run {}; agent {} is of run {}",
                               options_.job, state_.run_id.hex(), hello.node, hello.run_id.hex())};
  }
  if (hello.capacity <= 0 || hello.node.empty())
    return Refused{Refusal::kNever, fmt::format("agent '{}' has no slots", hello.node)};
  if (const std::string unlike = WhyUnlike(hello); !unlike.empty())
    return Refused{Refusal::kNever, unlike};
  if (IsExcluded(hello.node))
    return Refused{Refusal::kExcluded, fmt::format("node {} is excluded", hello.node)};
  return WhyTaken(event);
}

// Two agents of one node name. The former may be dead without a word, which its silence tells: the
// newcomer, which may well be its successor, is let in then, and asks again until it is. A former
// that is heard of a while later lives.
std::optional<control::Refused> Coordinator::WhyTaken(const HelloReceived& event) {
  using control::Refusal;
  constexpr size_t kMostClaims = 64;
  const control::Hello& hello = event.hello;
  const auto known = agents_.find(hello.node);
  if (known == agents_.end() || known->second.incarnation == hello.incarnation) return {};
  Agent& former = known->second;
  if (former.stream == 0) return {};
  if (former.claims.size() >= kMostClaims && former.claims.count(hello.incarnation) == 0)
    former.claims.erase(former.claims.begin());
  const absl::Duration since = former.claims.try_emplace(hello.incarnation, now_).first->second;
  const bool lives = former.heard >= since + options_.beat / 2;
  return control::Refused{
      lives ? Refusal::kNever : Refusal::kLater,
      fmt::format("node name '{}' is taken by the agent at {}, which {}: give this one another "
                  "--node",
                  hello.node, former.address, lives ? "lives" : "may still live")};
}

std::string Coordinator::WhyUnlike(const control::Hello& hello) const {
  const auto say = [&](const std::string& whose, const Terms& wanted) {
    std::string differ = TermsThatDiffer(hello.terms, wanted);
    if (differ.empty()) return differ;
    return fmt::format("agent {} is not started as {} was: {}", hello.node, whose, differ);
  };
  std::string why = say(options_.terms_of, options_.terms);
  if (why.empty() && TermsBind(hello.node))
    why = say("agent " + state_.terms.node, state_.terms.terms);
  return why;
}

// Before the first generation nothing was done by them: they bind nobody once all who had them are
// gone. A former process of `node` is, or is dealt with otherwise.
bool Coordinator::TermsBind(const std::string& node) const {
  if (state_.terms.terms.empty()) return false;
  if (state_.generation() > 0) return true;
  return std::any_of(agents_.begin(), agents_.end(),
                     [&](const auto& agent) { return agent.first != node; });
}

void Coordinator::BringUpToDate(Agent& agent) {
  agent.prepared_round = 0;
  agent.staged = false;
  agent.bye = false;
  if (phase_ == CoordinatorPhase::kEnding || phase_ == CoordinatorPhase::kDraining) {
    SendStop(agent);
    return;
  }
  if (state_.generation() > 0) SendCommit(agent);
  if (save_ && IsLead(agent)) SendSave(agent);
  if (phase_ != CoordinatorPhase::kReforming) return;
  if (stage_ == Stage::kWaiting) {
    StartRound();
  } else if (stage_ == Stage::kPreparing) {
    agent.concerned = agent.holds_ranks || provisional_.Has(agent.node, agent.incarnation);
    if (agent.concerned) SendPrepare(agent);
  }
}

void Coordinator::On(const StreamLost& event) {
  const auto known = nodes_of_streams_.find(event.stream);
  if (known == nodes_of_streams_.end()) return;
  Lose(agents_.at(known->second), "its stream was closed");
}

// It is lost; whoever holds ranks may come back within its grace.
void Coordinator::Lose(Agent& agent, const std::string& reason) {
  nodes_of_streams_.erase(agent.stream);
  agent.stream = 0;
  may_have_changed_ = true;
  agent.prepare_due = agent.ack_due = absl::InfiniteDuration();
  if (!agent.holds_ranks) {
    Remove(agent.node, reason);
    return;
  }
  agent.lost_due = now_ + options_.rejoin_grace;
  if (phase_ == CoordinatorPhase::kRunning && HasWork(agent)) phase_ = CoordinatorPhase::kSuspect;
}

// By value: the name may belong to what is erased.
// NOLINTNEXTLINE(performance-unnecessary-value-param)
void Coordinator::Remove(std::string node, const std::string& reason, FaultClass fault_class) {
  const auto known = agents_.find(node);
  if (known == agents_.end()) return;
  const Agent agent = std::move(known->second);
  if (agent.stream != 0) {
    nodes_of_streams_.erase(agent.stream);
    Emit(CloseStream{agent.stream, reason});
  }
  agents_.erase(known);
  may_have_changed_ = true;
  stop_.Excuse(agent.id);
  const bool was_prepared = is_preparing() && state_.generation() > 0 && agent.concerned &&
                            provisional_.Has(node, agent.incarnation) && !agent.leaving;
  if ((HasWork(agent) && !agent.bye && !agent.leaving) || was_prepared) {
    NodeLost(node, agent.incarnation, reason, fault_class);
  } else if (save_ && HasWork(agent)) {
    EndSave(fmt::format("node {}: {}", node, reason));
  } else if (phase_ == CoordinatorPhase::kReforming && agent.concerned &&
             (stage_ == Stage::kPreparing || stage_ == Stage::kWaiting)) {
    StartRound();
  }
}

void Coordinator::On(const AgentSaid& event) {
  const auto known = nodes_of_streams_.find(event.stream);
  if (known == nodes_of_streams_.end()) {
    ++ignored_;
    return;
  }
  Agent& agent = agents_.at(known->second);
  agent.heard = now_;
  if (phase_ == CoordinatorPhase::kDone) {
    Send(agent, control::Done{state_.ended->exit_code, state_.ended->reason});
    return;
  }
  std::visit([&](const auto& message) { Hear(agent, message); }, event.message);
}

void Coordinator::On(const StopAsked& event) {
  if (phase_ == CoordinatorPhase::kDone) return;
  BeginStop(event.signal, fmt::format("signal {}", event.signal));
}

void Coordinator::On(const JournalRefused& event) {
  phase_ = CoordinatorPhase::kSteppedDown;
  Emit(StepDown{event.detail});
}

void Coordinator::On(const TimerFired& event) {
  if (event.timer == kTimer) armed_.reset();
}

void Coordinator::Hear(Agent& agent, const control::Beat& beat) {
  newest_step_ = std::max(newest_step_, beat.newest_step);
  if (state_.step_committed == 0 &&
      newest_step_ - state_.progress_base >= options_.budget.progress_steps) {
    Refund(0);
  }
  // What it says about a map that it has not heard of yet is about other ranks.
  agent.unreached.clear();
  agent.unmet.clear();
  if (agent.committed != state_.generation() || !agent.holds_ranks) return;
  agent.unreached = beat.unreached;
  agent.unmet = beat.unmet;
  TellOfUnmet(agent);
  using control::RankPhase;
  std::vector<int> finished, plain_done;
  for (const control::RankBeat& rank : beat.ranks) {
    if (rank.rank < 0 || rank.rank >= state_.commit.map.world) continue;
    const bool plain = rank.phase == RankPhase::kPlain || rank.phase == RankPhase::kPlainDone;
    plain_[static_cast<size_t>(rank.rank)] = plain;
    // While a generation forms, ranks are told by its map, and whoever joined takes part in it.
    const bool done = rank.phase == RankPhase::kFinished || rank.phase == RankPhase::kPlainDone;
    if (!done || is_preparing() || state_.is_finished(rank.rank)) continue;
    finished.push_back(rank.rank);
    if (plain) plain_done.push_back(rank.rank);
  }
  if (!finished.empty()) Append(FinishedRecord{std::move(finished)});
  if (!plain_done.empty()) Append(PlainDoneRecord{std::move(plain_done)});
  if (phase_ == CoordinatorPhase::kDraining && state_.stop_went == 0 && SomeStillJoin())
    GiveUpStop(state_.stop->reason, false);
}

void Coordinator::Hear(Agent& agent, const control::Leave& leave) {
  if (phase_ == CoordinatorPhase::kEnding) {
    if (leave.hurry && !state_.stop_hurries) GiveUpStop("asked twice", true);
    return;
  }
  const std::string reason = fmt::format("node {}: signal {}", agent.node, leave.signal);
  const bool by_a_person = leave.signal == SIGINT || leave.signal == SIGHUP;
  if (leave.hurry || by_a_person || phase_ == CoordinatorPhase::kDraining) {
    if (phase_ != CoordinatorPhase::kDraining) BeginStop(leave.signal, reason);
    if (leave.hurry) GiveUpStop("asked twice", true);
    return;
  }
  if (agent.leaving) return;
  agent.leaving = true;
  if (!HasWork(agent)) return Release(agent);
  if (!RestCanGoOn()) return BeginStop(leave.signal, reason);
  leave_signal_ = leave.signal;
  // A batch system tells all nodes at once: then there is nobody to go on.
  const absl::Duration stays = leave.stays > absl::ZeroDuration()
                                   ? leave.stays
                                   : std::min(leave.within, options_.budget.grace) / 2;
  leave_due_ = std::min(leave_due_, now_ + std::min(options_.beat, stays / 4));
  // The rest is for the end of its part in the generation.
  agent.save_due = now_ + stays * 3 / 4;
}

// It has left the job; the job goes on.
void Coordinator::Release(Agent& agent) {
  Send(agent, control::Done{ExitCodeOf(JobOutcome::kLeft), "left on request"});
  Remove(agent.node, "left on request");
}

void Coordinator::Hear(Agent&, const control::SaveReport& report) {
  using control::SaveOutcome;
  switch (report.outcome) {
    case SaveOutcome::kCommitted:
      if (!state_.final_save_failed.empty()) Append(SaveFailedRecord{state_.root_lost, ""});
      if (report.step <= state_.step_committed) return;
      Refund(report.step);
      if (!save_) TryGrow();
      return;
    case SaveOutcome::kRefused:
      return End(JobOutcome::kRefused, 0, report.detail);
    case SaveOutcome::kNothingRestores:
      return End(JobOutcome::kNeedsHuman, 0, "no checkpoint restores: " + report.detail);
    case SaveOutcome::kFinalSaveFailed:
      if (state_.final_save_failed != report.detail)
        Append(SaveFailedRecord{state_.root_lost, report.detail});
      return;
    case SaveOutcome::kRootLost:
      if (state_.root_lost.empty())
        Append(SaveFailedRecord{report.detail, state_.final_save_failed});
      return BeginStop(0, report.detail);
  }
}

void Coordinator::Hear(Agent& agent, const control::Bye& bye) {
  if (bye.generation < state_.generation() && agent.holds_ranks &&
      phase_ != CoordinatorPhase::kDraining && phase_ != CoordinatorPhase::kEnding) {
    ++ignored_;
    return;
  }
  agent.bye = true;
  durable_ = durable_ || bye.durable;
  // Its ranks have ended, and without them nothing is saved.
  if (save_ && HasWork(agent)) EndSave(fmt::format("node {} has ended its ranks", agent.node));
}

// --- Membership ---

void Coordinator::Exclude(const std::string& node, const std::string& reason) {
  Append(ExcludedRecord{node, reason, JobTime() + options_.exclude_for});
  if (const auto known = agents_.find(node); known != agents_.end())
    Send(known->second, control::Exclude{reason});
}

bool Coordinator::IsExcluded(const std::string& node) const {
  return std::any_of(state_.excluded.begin(), state_.excluded.end(), [&](const auto& excluded) {
    return excluded.node == node && JobTime() < excluded.until;
  });
}

// It holds a rank of the newest generation that is not done.
bool Coordinator::HasWork(const Agent& agent) const {
  if (!agent.holds_ranks) return false;
  for (const RankRun& run : state_.commit.map.runs) {
    if (run.node != agent.node) continue;
    for (int rank = run.first_rank; rank < run.first_rank + run.count; ++rank) {
      if (!state_.is_finished(rank)) return true;
    }
  }
  return false;
}

AssignRequest Coordinator::Request() const {
  AssignRequest request{.last = state_.commit.map, .finished = state_.plain_done};
  const auto may_hold = [this](const std::string& node, const Agent& agent) {
    const bool there = agent.stream != 0 || agent.lost_due != absl::InfiniteDuration();
    return there && !agent.leaving && !IsExcluded(node) &&
           (agent.holds_ranks || !IsBeingMeasured(node, agent));
  };
  int slots = 0;
  for (const auto& [node, agent] : agents_) {
    if (may_hold(node, agent) && !IsShunned(node)) slots += agent.capacity;
  }
  const bool may_shun = slots >= options_.membership.min_world;
  for (const auto& [node, agent] : agents_) {
    if (!may_hold(node, agent) || (may_shun && IsShunned(node))) continue;
    request.live.push_back(
        {node, agent.incarnation, agent.capacity, agent.segment, agent.slot_hint});
  }
  request.may_grow = options_.may_grow && state_.finished.empty();
  request.trusts_link = trusts_link_;
  return request;
}

bool Coordinator::RestCanGoOn() const {
  AssignRequest request = Request();
  request.trusts_link = true;
  return Assign(request, options_.membership).ok();
}

// --- Deadlines ---

void Coordinator::LookAtDeadlines() {
  LookAtAgents();
  LookAtMeasurements();
  LookAtChanges();
  for (size_t i = 0; i < early_exits_.size();) {
    if (early_exits_[i].due > now_) {
      ++i;
      continue;
    }
    const EarlyExit exit = early_exits_[i];
    early_exits_.erase(early_exits_.begin() + static_cast<std::ptrdiff_t>(i));
    Charge(exit.node, exit.agent, exit.fault);
    i = 0;  // the rest may have become void
  }
  if (phase_ == CoordinatorPhase::kReforming) {
    if (stage_ == Stage::kWaiting && now_ >= wait_due_) {
      if (!std::exchange(trusts_link_, true)) {
        wait_due_ = now_ + options_.join;
        StartRound();
      } else {
        const auto map = Assign(Request(), options_.membership);
        End(JobOutcome::kNoQuorum, 0, std::string(MessageOf(map.status())));
      }
    } else if (stage_ == Stage::kRestoring && now_ >= restore_due_) {
      TryNext("a rank did not say in time whether it could restore");
    }
  }
  if (phase_ == CoordinatorPhase::kForming && now_ >= join_due_) {
    const auto map = Assign(Request(), options_.membership);
    End(JobOutcome::kNoQuorum, 0,
        fmt::format("not enough agents came in {}: {}", absl::FormatDuration(options_.join),
                    MessageOf(map.status())));
  }
  if (phase_ == CoordinatorPhase::kDraining && now_ >= seal_due_) {
    seal_due_ = absl::InfiniteDuration();
    if (state_.stop_went == 0) GiveUpStop("the stop's step did not come in time", false);
  }
}

// Each agent's deadlines. A removal changes the list, so one is dealt with at a time.
void Coordinator::LookAtAgents() {
  for (bool again = true; again;) {
    again = false;
    for (auto& [node, agent] : agents_) {
      if (agent.stream != 0 && now_ - agent.heard >= options_.beat_loss) {
        Emit(CloseStream{agent.stream, "no beat"});
        Lose(agent, "it fell silent");
        again = true;
        break;
      }
      std::string reason;
      if (agent.lost_due <= now_) reason = "lost, and not back in time";
      if (agent.prepare_due <= now_) reason = "it did not answer PREPARE in time";
      if (agent.ack_due <= now_) reason = "it did not answer COMMIT in time";
      if (reason.empty() && staged_due_ <= now_ && agent.concerned && !agent.staged &&
          phase_ == CoordinatorPhase::kReforming && stage_ == Stage::kPreparing &&
          provisional_.Has(node, agent.incarnation)) {
        reason = "its ranks were not staged in time";
      }
      if (reason.empty()) continue;
      Remove(node, reason);
      again = true;
      break;
    }
  }
}

// Once at each change, and no more often than people read.
void Coordinator::TellWhoIsHere() {
  constexpr absl::Duration kPause = absl::Seconds(10);
  const bool waits = phase_ == CoordinatorPhase::kForming ||
                     (phase_ == CoordinatorPhase::kReforming && stage_ == Stage::kWaiting);
  if (!waits) {
    told_.clear();
    may_have_changed_ = true;
    tell_due_ = absl::InfiniteDuration();
    return;
  }
  if (!may_have_changed_) return;
  tell_due_ = told_at_ + kPause;
  if (now_ < tell_due_) return;
  may_have_changed_ = false;
  tell_due_ = absl::InfiniteDuration();
  const std::string here = WhoIsHere();
  if (here.empty() || here == told_) return;
  told_ = here;
  told_at_ = now_;
  const bool last_call =
      phase_ == CoordinatorPhase::kForming && last_call_due_ != absl::InfiniteDuration();
  const bool forms = phase_ == CoordinatorPhase::kForming;
  const absl::Duration due = last_call ? last_call_due_ : forms ? join_due_ : wait_due_;
  const auto seconds = static_cast<int64_t>(std::ceil(absl::ToDoubleSeconds(due - now_)));
  Emit(Announce{
      last_call ? fmt::format("{}; starts in {} s (--last-call)", here, seconds)
                : fmt::format("{}; {} s left{}", here, seconds, forms ? " (--join-timeout)" : "")});
}

// Empty: nobody has come yet.
std::string Coordinator::WhoIsHere() {
  constexpr int kNamed = 8;
  int here = 0;
  std::string names;
  for (const auto& [node, agent] : agents_) {
    node_slots_ = std::max(node_slots_, agent.capacity);
    if (agent.stream == 0 || agent.leaving) continue;
    if (++here <= kNamed) names += (names.empty() ? "" : ", ") + node;
  }
  if (node_slots_ == 0) return {};
  const auto nodes = [this](int slots) { return (slots + node_slots_ - 1) / node_slots_; };
  const int least = nodes(options_.membership.min_world),
            most = nodes(options_.membership.max_world);
  const int spares = nodes(options_.spare_slots);
  std::string wanted =
      least == most ? fmt::format("{}", most) : fmt::format("{} to {}", least, most);
  if (spares > 0) wanted += fmt::format(" and {} spare", spares);
  if (here > kNamed) names += fmt::format(" and {} more", here - kNamed);
  return fmt::format("waiting for nodes: {} of {} here{}",
                     here == 0 ? "none" : std::to_string(here), wanted,
                     here == 0 ? "" : " (" + names + ")");
}

absl::Duration Coordinator::Nearest() const {
  if (phase_ == CoordinatorPhase::kDone || phase_ == CoordinatorPhase::kSteppedDown)
    return absl::InfiniteDuration();
  absl::Duration nearest =
      std::min({leave_due_, seal_due_, end_due_, tell_due_, NearestMeasurement()});
  if (save_) nearest = std::min(nearest, save_->due);
  for (const auto& [node, agent] : agents_) {
    nearest = std::min({nearest, agent.lost_due, agent.prepare_due, agent.ack_due});
    if (agent.stream != 0) nearest = std::min(nearest, agent.heard + options_.beat_loss);
  }
  for (const EarlyExit& exit : early_exits_) nearest = std::min(nearest, exit.due);
  if (phase_ == CoordinatorPhase::kForming)
    nearest = std::min({nearest, join_due_, last_call_due_});
  if (phase_ == CoordinatorPhase::kRunning) nearest = std::min(nearest, grow_due_);
  if (phase_ == CoordinatorPhase::kReforming) {
    if (stage_ == Stage::kWaiting) nearest = std::min(nearest, wait_due_);
    if (stage_ == Stage::kPreparing) nearest = std::min(nearest, staged_due_);
    if (stage_ == Stage::kRestoring) nearest = std::min(nearest, restore_due_);
  }
  return nearest;
}

// Beats move the nearest deadline with each message: a timer that fires a little early is cheaper
// than one that is armed a thousand times, so only a deadline before the armed one is armed anew.
void Coordinator::ArmNearest() {
  const absl::Duration nearest = Nearest();
  if (nearest == absl::InfiniteDuration()) {
    if (armed_) Emit(DisarmTimer{kTimer});
    armed_.reset();
  } else if (!armed_ || nearest < *armed_) {
    Emit(ArmTimer{kTimer, nearest});
    armed_ = nearest;
  }
}

void Coordinator::Append(const JournalPayload& record) {
  Emit(AppendJournal{EncodeJournalRecord(state_, record)});
  state_.Apply(record);
}

}  // namespace outlast
