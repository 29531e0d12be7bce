// From a fault to the next generation.
#include <fmt/format.h>

#include <algorithm>

#include "outlast/base/status.h"
#include "outlast/elastic/coordinator.h"

namespace outlast {

bool Coordinator::is_preparing() const {
  return phase_ == CoordinatorPhase::kReforming &&
         (stage_ == Stage::kPreparing || stage_ == Stage::kWaiting);
}

// --- Faults ---

void Coordinator::Hear(Agent& agent, const control::Fault& fault) {
  if (fault.finished) {
    if (state_.was_faulted(agent.incarnation, fault.process)) return;
    const FaultRecord record{.fault_class = fault.fault_class,
                             .rank = fault.rank,
                             .generation = fault.generation,
                             .end = fault.end,
                             .detail = fault.detail,
                             .node = agent.node};
    Append(FaultedRecord{
        .fault = record, .agent = agent.incarnation, .process = fault.process, .at = JobTime()});
    Emit(RecordFault{record, state_.history.crashes, options_.budget.max_restarts});
    return;
  }
  if (phase_ == CoordinatorPhase::kDraining) {
    // Batch systems signal every process of a job. Nothing is charged either way.
    GiveUpStop(fault.detail + " during a stop", false);
    return;
  }
  const bool is_newest = fault.generation == state_.generation() ||
                         (is_preparing() && fault.generation == state_.target);
  if (phase_ == CoordinatorPhase::kEnding || phase_ == CoordinatorPhase::kForming || !is_newest) {
    ++ignored_;
    return;
  }
  if (!state_.final_save_failed.empty() && !fault.plain && !fault.end.by_us && !fault.end.clean()) {
    // All is trained, and its save was tried again: a restart would only fail once more.
    return End(JobOutcome::kNotInRoot, 0, state_.final_save_failed);
  }
  if (fault.fault_class == FaultClass::kEarlyExit && fault.end.clean() && !is_preparing()) {
    const bool known =
        std::any_of(early_exits_.begin(), early_exits_.end(), [&](const EarlyExit& exit) {
          return exit.agent == agent.incarnation && exit.fault.process == fault.process;
        });
    if (!known) {
      early_exits_.push_back(
          {agent.node, agent.incarnation, fault, now_ + options_.budget.early_exit_grace});
    }
    return;
  }
  // Its agent may be removed for what its ranks died of.
  const std::string node = agent.node;
  const uint64_t incarnation = agent.incarnation;
  if (!is_preparing() && !fault.end.by_us && !fault.plain) RemoveWhoIsCutOff();
  Charge(node, incarnation, fault);
}

void Coordinator::NodeLost(const std::string& node, uint64_t incarnation, const std::string& reason,
                           FaultClass fault_class) {
  const std::string detail = fmt::format("node {}: {}", node, reason);
  if (phase_ == CoordinatorPhase::kDraining) return GiveUpStop(detail + " during a stop", false);
  if (phase_ == CoordinatorPhase::kEnding || phase_ == CoordinatorPhase::kForming) return;
  int rank = -1;
  for (const RankRun& run : state_.commit.map.runs) {
    if (rank < 0 && run.node == node && run.incarnation == incarnation) rank = run.first_rank;
  }
  Charge(node, incarnation,
         {.rank = rank,
          .generation = state_.generation(),
          // One that was prepared for its first generation here is no victim of the last one.
          .born = rank < 0 ? state_.target : 0,
          .fault_class = fault_class,
          .what = std::string(FaultClassName(fault_class)),
          .detail = detail,
          .plain = HoldsPlain(node, incarnation)});
  // A victim's ranks need another holder all the same.
  if (is_preparing()) StartRound();
}

void Coordinator::Charge(const std::string& node, uint64_t agent, const control::Fault& fault) {
  const bool going_on = phase_ == CoordinatorPhase::kRunning ||
                        phase_ == CoordinatorPhase::kSuspect ||
                        phase_ == CoordinatorPhase::kReforming;
  if (!going_on) return;
  if (state_.was_faulted(agent, fault.process)) {  // told again
    if (!is_preparing()) Reform(fault.detail);
    return;
  }
  FaultRecord record{.fault_class = fault.fault_class,
                     .rank = fault.rank,
                     .generation = fault.generation,
                     .step_reached = newest_step_,
                     .step_committed = state_.step_committed,
                     .end = fault.end,
                     .found_by = "agent",
                     .detail = fault.detail,
                     .root = FaultRoot(fault.fault_class, fault.what, fault.phase),
                     .node = node};
  record.victim = is_preparing() && fault.born <= state_.generation();
  const bool replaces = record.victim && state_.cause == control::Evidence::kPeer &&
                        fault.evidence == control::Evidence::kSelf && !fault.end.by_us;
  if (replaces) record.victim = false;
  const bool charged = !record.victim && !fault.end.by_us;
  const bool hardware = fault.fault_class == FaultClass::kHardware;
  if (hardware) Exclude(node, fault.detail);
  const bool takes_the_node = hardware || fault.fault_class == FaultClass::kNodeLost ||
                              fault.fault_class == FaultClass::kLinkCut;
  record.as_crash = takes_the_node && charged && WouldShrink();

  FaultHistory history = state_.history;
  if (replaces) history.TakeBackNewest();
  if (charged) history.Add(record);
  Judgement judgement{.restart = true};
  if (charged) {
    judgement = JudgeFault(history, record, options_.budget, JobTime(), BackOffSeed(state_.run_id));
  } else if (!record.victim &&
             history.restarts_in_last_hour(JobTime()) >= options_.budget.restarts_per_hour_limit) {
    judgement = {.exit_code = ExitCodeOf(JobOutcome::kRestartsUsedUp),
                 .reason = "the restarts of an hour are used up"};
  }
  Append(FaultedRecord{.fault = record,
                       .agent = agent,
                       .process = fault.process,
                       .evidence = fault.evidence,
                       .charged = charged,
                       .replaces = replaces,
                       .restarts = judgement.restart && !record.victim && !replaces,
                       .at = JobTime()});
  const bool as_crash = record.as_crash || CountsAsCrash(record.fault_class);
  Emit(RecordFault{record, as_crash ? history.crashes : history.others,
                   as_crash ? options_.budget.max_restarts : options_.budget.other_class_limit});
  if (record.victim) {
    if (hardware) StartRound();
    return;
  }
  if (!judgement.restart) {
    return End(JobOutcome::kWorkerFailed, judgement.exit_code,
               fmt::format("{}; {}", fault.detail, judgement.reason));
  }
  const PlaceJudgement place = charged ? JudgePlace(history) : PlaceJudgement::kStay;
  if (place == PlaceJudgement::kDeterministic) {
    return End(JobOutcome::kNeedsHuman, 0,
               fault.detail + "; the same at the same step on another node");
  }
  if (place == PlaceJudgement::kSwapNode && fault.fault_class != FaultClass::kNodeLost) {
    AssignRequest request = Request();
    std::erase_if(request.live, [&](const LiveAgent& live) { return live.node == node; });
    const auto map = Assign(request, options_.membership);
    if (map.ok() && map->world >= state_.commit.map.world)
      Exclude(node, "the same fault again on this node: " + fault.detail);
  }
  no_spawn_before_ = std::max(no_spawn_before_, now_ + judgement.delay);
  end_plain_ = end_plain_ || fault.plain;
  if (fault.fault_class == FaultClass::kHang) {
    for (const auto& [name, member] : agents_) {
      if (member.holds_ranks) Send(member, control::Collect{fault.detail});
    }
  }
  Reform(fault.detail);
}

bool Coordinator::HoldsPlain(const std::string& node, uint64_t incarnation) const {
  for (const RankRun& run : state_.commit.map.runs) {
    if (run.node != node || run.incarnation != incarnation) continue;
    for (int rank = run.first_rank; rank < run.first_rank + run.count; ++rank) {
      if (plain_[static_cast<size_t>(rank)] && !state_.is_finished(rank)) return true;
    }
  }
  return false;
}

bool Coordinator::WouldShrink() const {
  AssignRequest request = Request();
  request.trusts_link = true;
  const auto map = Assign(request, options_.membership);
  return !map.ok() || map->world < state_.commit.map.world;
}

void Coordinator::Refund(int64_t step_committed) {
  Append(RefundedRecord{step_committed, newest_step_});
}

// --- Rounds ---

void Coordinator::Reform(const std::string& reason) {
  if (phase_ != CoordinatorPhase::kForming && phase_ != CoordinatorPhase::kRunning &&
      phase_ != CoordinatorPhase::kSuspect && phase_ != CoordinatorPhase::kReforming) {
    return;
  }
  if (save_) {
    Emit(Announce{fmt::format("{}: no save is waited for any more: {}", save_->why, reason)});
    save_.reset();
  }
  reform_reason_ = reason;
  early_exits_.clear();
  if (!is_preparing()) {
    Append(FormingRecord{state_.generation() + 1, reason});
    phase_ = CoordinatorPhase::kReforming;
    trusts_link_ = false;
    wait_due_ = restore_due_ = absl::InfiniteDuration();
  }
  StartRound();
}

void Coordinator::StartRound() {
  ++round_;
  auto map = Assign(Request(), options_.membership);
  if (map.ok()) {
    stage_ = Stage::kPreparing;
    provisional_ = *std::move(map);
    wait_due_ = absl::InfiniteDuration();
  } else {
    // Those who are there unwind meanwhile.
    stage_ = Stage::kWaiting;
    provisional_ = state_.commit.map;
    const bool doubts_link = map.status().code() == absl::StatusCode::kUnavailable;
    if (wait_due_ == absl::InfiniteDuration())
      wait_due_ = now_ + (doubts_link ? options_.coordinator_grace : options_.join);
  }
  staged_due_ = std::max(now_, no_spawn_before_) + options_.prepare + options_.budget.respawn;
  for (auto& [node, agent] : agents_) {
    agent.concerned = agent.holds_ranks || provisional_.Has(node, agent.incarnation);
    agent.staged = false;
    agent.prepare_due = agent.ack_due = absl::InfiniteDuration();
    if (agent.concerned) SendPrepare(agent);
  }
}

void Coordinator::SendPrepare(Agent& agent) {
  if (agent.stream == 0) return;
  agent.prepare_due = now_ + options_.prepare;
  Send(agent, control::Prepare{
                  .generation = state_.target,
                  .round = round_,
                  .map = provisional_,
                  .plain = PlainRanks(provisional_),
                  .finished = DoneRanks(provisional_),
                  .spawn_delay = std::max(absl::ZeroDuration(), no_spawn_before_ - now_),
                  .end_plain = end_plain_,
                  .reason = reform_reason_,
              });
}

void Coordinator::Hear(Agent& agent, const control::Prepared& prepared) {
  if (!is_preparing() || prepared.generation != state_.target || prepared.round != round_) {
    ++ignored_;
    return;
  }
  newest_step_ = std::max(newest_step_, prepared.last_step);
  agent.prepared_round = round_;
  agent.prepare_due = absl::InfiniteDuration();
  agent.staged = agent.staged || prepared.staged;
  agent.snapshots = prepared.snapshots;
  agent.bootstrap = prepared.bootstrap;
}

void Coordinator::TryForm() {
  if (phase_ != CoordinatorPhase::kForming) return;
  const bool measures = std::any_of(agents_.begin(), agents_.end(), [this](const auto& agent) {
    return IsBeingMeasured(agent.first, agent.second);
  });
  if (measures) return;
  int slots = 0;
  for (const auto& [node, agent] : agents_) slots += agent.capacity;
  if (slots < options_.membership.min_world) {  // no need to ask for a map at each hello
    last_call_due_ = absl::InfiniteDuration();
    return;
  }
  const auto map = Assign(Request(), options_.membership);
  if (!map.ok()) {
    last_call_due_ = absl::InfiniteDuration();
    return;
  }
  if (last_call_due_ == absl::InfiniteDuration()) last_call_due_ = now_ + options_.last_call;
  const int max_world = options_.membership.max_world;
  const bool all_came = map->world == max_world && slots >= max_world + options_.spare_slots;
  if (!all_came && now_ < last_call_due_) return;
  if (const std::string links = rates_.Summary(); !links.empty())
    Emit(Announce{"peer bandwidth: " + links});
  for (const std::string& odd : rates_.OddLinks())
    Emit(Announce{"peer bandwidth: slower than others: " + odd});
  Reform("the first generation");
}

void Coordinator::TryCommit() {
  if (phase_ != CoordinatorPhase::kReforming || stage_ != Stage::kPreparing) return;
  for (const auto& [node, agent] : agents_) {
    if (!agent.concerned) continue;
    const bool answered = agent.prepared_round == round_;
    const bool may_come_back = agent.lost_due != absl::InfiniteDuration() && !agent.leaving &&
                               (HasWork(agent) || provisional_.Has(node, agent.incarnation));
    if (agent.stream != 0 ? !answered : may_come_back) return;
    if (agent.stream != 0 && !agent.staged && provisional_.Has(node, agent.incarnation)) return;
  }
  std::vector<control::HeldSnapshot> held;
  control::Commit commit{.generation = state_.target,
                         .map = provisional_,
                         .plain = PlainRanks(provisional_),
                         .finished = DoneRanks(provisional_)};
  const RankRun& lead = provisional_.runs.front();
  const std::vector<RankRun>& last = state_.commit.map.runs;
  // It has not said hello to this coordinator yet if its work is done.
  if (!last.empty() && last.front().node == lead.node &&
      last.front().incarnation == lead.incarnation)
    commit.lead_address = state_.commit.lead_address;
  for (const auto& [node, agent] : agents_) {
    held.insert(held.end(), agent.snapshots.begin(), agent.snapshots.end());
    if (node != lead.node) continue;
    commit.bootstrap = agent.bootstrap;
    if (!agent.peer_address.empty()) commit.lead_address = agent.peer_address;
  }
  commit.resume = ChooseCandidates(held, state_.step_committed);
  plain_.assign(static_cast<size_t>(commit.map.world), false);
  for (const int rank : commit.plain) plain_[static_cast<size_t>(rank)] = true;
  Append(CommittedRecord{std::move(commit)});
  stage_ = Stage::kCommitting;
  end_plain_ = false;
  for (auto& [node, agent] : agents_) {
    agent.holds_ranks = state_.commit.map.Has(node, agent.incarnation);
    agent.concerned = false;
    agent.restored = -1;
    agent.snapshots.clear();
    if (HasWork(agent)) agent.bye = false;
    SendCommit(agent);
  }
}

void Coordinator::SendCommit(Agent& agent) {
  if (agent.stream == 0) return;
  control::Commit commit = state_.commit;
  commit.links = LinksToWatch(agent);
  Send(agent, std::move(commit));
  const bool owes = !is_preparing() && HasWork(agent) && agent.committed < state_.generation();
  if (owes) agent.ack_due = now_ + options_.commit_ack;
}

void Coordinator::Hear(Agent& agent, const control::Committed& committed) {
  if (committed.generation != state_.generation()) {
    ++ignored_;
    return;
  }
  agent.committed = committed.generation;
  agent.ack_due = absl::InfiniteDuration();
}

void Coordinator::TryRun() {
  const bool forms = phase_ == CoordinatorPhase::kReforming && !is_preparing();
  if (!forms && phase_ != CoordinatorPhase::kSuspect) return;
  bool restored = true;
  for (const auto& [node, agent] : agents_) {
    const bool is_here = agent.stream != 0 && agent.committed == state_.generation();
    const bool has_restored = agent.restored >= state_.commit.candidate;
    // Of a thousand agents nearly all need no look at the map.
    if ((is_here && has_restored) || !HasWork(agent)) continue;
    if (!is_here) return;
    restored = restored && has_restored;
  }
  if (forms && !restored && !state_.commit.resume.empty()) {
    if (stage_ != Stage::kRestoring) restore_due_ = now_ + options_.restore;
    stage_ = Stage::kRestoring;
    return;
  }
  phase_ = CoordinatorPhase::kRunning;
  no_spawn_before_ = -absl::InfiniteDuration();
  restore_due_ = absl::InfiniteDuration();
}

void Coordinator::Hear(Agent& agent, const control::Restored& restored) {
  const bool open = phase_ == CoordinatorPhase::kRunning || phase_ == CoordinatorPhase::kSuspect ||
                    (phase_ == CoordinatorPhase::kReforming && !is_preparing());
  if (!open || restored.generation != state_.generation() ||
      restored.candidate != state_.commit.candidate) {
    ++ignored_;
    return;
  }
  if (!restored.ok) return TryNext(restored.detail);
  agent.restored = restored.candidate;
}

void Coordinator::TryNext(const std::string& why) {
  const int next = state_.commit.candidate + 1;
  if (next >= static_cast<int>(state_.commit.resume.size()))
    return End(JobOutcome::kNeedsHuman, 0, "no candidate restores: " + why);
  Append(NextRecord{next});
  for (const auto& [node, agent] : agents_) {
    if (agent.holds_ranks) Send(agent, control::Next{state_.generation(), next});
  }
  phase_ = CoordinatorPhase::kReforming;
  stage_ = Stage::kRestoring;
  restore_due_ = now_ + options_.restore;
}

void Coordinator::TryGrow() {
  if (phase_ != CoordinatorPhase::kRunning || !options_.may_grow) return;
  const auto map = Assign(Request(), options_.membership);
  if (!map.ok() || map->world <= state_.commit.map.world) return;
  no_growth_before_ = now_ + options_.grow_pause;
  Reform(fmt::format("grows from {} to {} ranks", state_.commit.map.world, map->world));
}

// A rank is known by its place; who took over a dead one's has its number, unless the world shrank.
std::vector<int> Coordinator::PlainRanks(const RankMap& map) const {
  const RankMap& last = state_.commit.map;
  const bool nobody_joined = std::find(plain_.begin(), plain_.end(), false) == plain_.end();
  std::vector<int> plain;
  for (const RankRun& run : map.runs) {
    for (int i = 0; i < run.count; ++i) {
      const int rank = run.first_rank + i;
      int former = last.RankOf(run.node, run.first_slot + i);
      if (former < 0 && map.world >= last.world && rank < last.world) former = rank;
      if (former < 0 ? nobody_joined : plain_[static_cast<size_t>(former)]) plain.push_back(rank);
    }
  }
  return plain;
}

std::vector<int> Coordinator::DoneRanks(const RankMap& map) const {
  std::vector<int> done;
  for (const int rank : state_.plain_done) {
    const RankRun& run = *state_.commit.map.Find(rank);
    const int now = map.RankOf(run.node, run.first_slot + rank - run.first_rank);
    if (now >= 0) done.push_back(now);
  }
  std::sort(done.begin(), done.end());
  return done;
}

std::vector<control::ResumeCandidate> ChooseCandidates(
    const std::vector<control::HeldSnapshot>& held, int64_t step_committed) {
  constexpr size_t kMost = 8;
  std::vector<control::HeldSnapshot> sorted = held;
  // Newest step first; of one step the newest generation.
  std::sort(sorted.begin(), sorted.end(), [](const auto& one, const auto& other) {
    return std::tie(other.id.step, other.id.generation, one.rank) <
           std::tie(one.id.step, one.id.generation, other.rank);
  });
  std::vector<control::ResumeCandidate> candidates;
  for (size_t i = 0; i < sorted.size() && candidates.size() < kMost;) {
    const control::SnapshotId id = sorted[i].id;
    const int world = sorted[i].world;
    int ranks = 0, last = -1;
    for (; i < sorted.size() && sorted[i].id == id; ++i) {
      if (sorted[i].rank != last) ++ranks;
      last = sorted[i].rank;
    }
    if (ranks == world) candidates.push_back({id.generation, id.step});
  }
  if (step_committed > 0) candidates.push_back({0, step_committed});
  return candidates;
}

}  // namespace outlast
