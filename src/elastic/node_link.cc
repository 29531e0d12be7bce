// What the agent and its coordinator tell each other.
#include <fmt/format.h>

#include <algorithm>

#include "base/split_mix.h"
#include "outlast/elastic/node_agent.h"

namespace outlast {
namespace {

constexpr absl::Duration kFirstBackOff = absl::Milliseconds(100);
constexpr absl::Duration kMostBackOff = absl::Seconds(2);
constexpr size_t kMostReports = 64;  // kept for an absent coordinator; the newest matter

}  // namespace

// --- The stream ---

void NodeAgent::On(const StartEvent&) {
  if (link_ != Link::kDown || link_due_ != absl::InfiniteDuration()) return;
  alone_due_ = now_ + options_.elastic.join;  // until it is welcome for the first time
  link_due_ = now_;
}

void NodeAgent::On(const StreamUp&) {
  if (link_ != Link::kOpening) return;
  link_ = Link::kGreeting;
  link_due_ = now_ + options_.elastic.beat_loss;
  Emit(SayHello{{.job = options_.elastic.job,
                 .node = options_.node,
                 .incarnation = options_.incarnation,
                 .slot_hint = options_.slot_hint,
                 .capacity = options_.capacity,
                 .segment = options_.segment,
                 .addresses = options_.addresses,
                 .peer_address = options_.peer_address,
                 .measure_address = options_.measure_address,
                 .terms = options_.terms,
                 .saves_on_request = true,
                 .watches_links = true,
                 .run_id = run_id_,
                 .coordinator = coordinator_,
                 .generation = committed_}});
}

void NodeAgent::On(const StreamDown&) {
  if (link_ != Link::kDown) LinkLost();
}

void NodeAgent::LinkLost() {
  if (link_ == Link::kUp) alone_due_ = now_ + options_.elastic.coordinator_grace;
  link_ = Link::kDown;
  beat_due_ = absl::InfiniteDuration();
  back_off_ = std::clamp(2 * back_off_, kFirstBackOff, kMostBackOff);
  // Of which between the half and all, so that those who lost one coordinator do not come as one.
  const uint64_t part = Mix(options_.incarnation + kGoldenGamma * ++link_tries_) % 501;
  link_due_ = now_ + back_off_ / 1000 * static_cast<int64_t>(500 + part);
}

void NodeAgent::Drop(const std::string& reason) {
  Emit(DropStream{reason});
  LinkLost();
}

void NodeAgent::LookAtLink() {
  if (is_over_) return;
  if (now_ >= link_due_) {
    if (link_ == Link::kDown) {
      link_ = Link::kOpening;
      link_due_ = now_ + options_.elastic.beat_loss;
      Emit(OpenStream{});
    } else {
      Drop("no answer");
    }
  }
  if (now_ >= alone_due_) {
    alone_due_ = absl::InfiniteDuration();
    EndAll(ExitCodeOf(JobOutcome::kNoQuorum),
           was_welcome_ ? "the coordinator was away for too long"
                        : fmt::format("no coordinator took this node in within {}",
                                      absl::FormatDuration(options_.elastic.join)),
           true);
    FinishWhenAllEnded();
  }
  if (link_ == Link::kUp && (beat_now_ || now_ >= beat_due_)) SendBeat();
}

void NodeAgent::SendBeat() {
  beat_now_ = false;
  beat_due_ = now_ + options_.elastic.beat;
  control::Beat beat{.counter = ++beats_, .newest_step = newest_step_};
  for (const Slot& slot : slots_) {
    if (slot.rank < 0) continue;
    using control::RankPhase;
    const bool done = slot.finished || slot.state == State::kDone;
    const auto phase = slot.plain ? (done ? RankPhase::kPlainDone : RankPhase::kPlain)
                                  : (done ? RankPhase::kFinished : RankPhase::kJoined);
    beat.ranks.push_back({slot.rank, phase});
  }
  Send(std::move(beat));
}

void NodeAgent::On(const CoordinatorSaid& event) {
  const bool answers_hello = std::holds_alternative<control::Welcome>(event.message) ||
                             std::holds_alternative<control::Refused>(event.message);
  if (link_ != (answers_hello ? Link::kGreeting : Link::kUp)) return;
  std::visit([this](const auto& message) { Hear(message); }, event.message);
}

void NodeAgent::Hear(const control::Welcome& welcome) {
  if (was_welcome_ && welcome.run_id != run_id_) {
    return Drop(fmt::format("a coordinator of run {}, this is run {}", welcome.run_id.hex(),
                            run_id_.hex()));
  }
  if (welcome.incarnation < coordinator_) {
    return Drop(fmt::format("coordinator {}, {} was seen", welcome.incarnation, coordinator_));
  }
  was_welcome_ = true;
  run_id_ = welcome.run_id;
  coordinator_ = welcome.incarnation;
  link_ = Link::kUp;
  link_due_ = alone_due_ = absl::InfiniteDuration();
  back_off_ = absl::ZeroDuration();
  said_committed_ = said_staged_ = said_bye_ = answered_ = false;
  beat_now_ = true;
  for (const control::Fault& fault : faults_) Send(fault);
  for (const control::SaveReport& report : reports_) Send(report);
  reports_.clear();
  if (restored_) Send(*restored_);
  if (leave_) {
    const auto rest = [this](absl::Duration due) {
      return std::max(absl::ZeroDuration(), due - now_);
    };
    leave_->within = rest(farewell_due_);
    if (seal_due_ != absl::InfiniteDuration()) leave_->stays = rest(seal_due_);
    Send(*leave_);
  }
}

void NodeAgent::Hear(const control::Refused& refused) {
  using control::Refusal;
  Drop(refused.reason);
  switch (refused.kind) {
    case Refusal::kLater:
      return;
    case Refusal::kNever:
      // Whoever trains already must have met a stranger: the right one may come back.
      if (was_welcome_) return;
      EndAll(ExitCodeOf(JobOutcome::kRefused), refused.reason, false);
      break;
    case Refusal::kExcluded:
      EndAll(ExitCodeOf(JobOutcome::kExcluded), refused.reason, true);
      break;
    case Refusal::kBegunAnew:
      // Its coordinator will not come back. A supervisor starts it again, for the new run.
      EndAll(ExitCodeOf(JobOutcome::kNoQuorum), refused.reason, true);
      break;
  }
  link_due_ = alone_due_ = absl::InfiniteDuration();  // nobody is asked again
}

void NodeAgent::On(const SaveReported& event) {
  if (event.report.outcome == control::SaveOutcome::kCommitted)
    step_committed_ = std::max(step_committed_, event.report.step);
  if (link_ == Link::kUp) return Send(event.report);
  if (reports_.size() == kMostReports) reports_.erase(reports_.begin());
  reports_.push_back(event.report);
}

void NodeAgent::On(const RanksRestored& event) {
  if (event.generation != committed_ || committed_ <= aborted_) return;
  restored_ = control::Restored{event.generation, event.candidate, event.ok, event.detail};
  Send(*restored_);
}

// --- Generations ---

void NodeAgent::Hear(const control::Prepare& prepare) {
  const auto told = std::make_pair(round_owner_, round_);
  const auto asked = std::make_pair(coordinator_, prepare.round);
  if (stopping_ || prepare.generation <= committed_ || asked < told) return;
  if (asked != told) {
    round_owner_ = coordinator_;
    round_ = prepare.round;
    target_ = prepare.generation;
    world_ = prepare.map.world;
    std::erase_if(faults_, [](const control::Fault& fault) { return !fault.finished; });
    Abort(prepare.reason);
    no_spawn_before_ = now_ + prepare.spawn_delay;
    const bool named = prepare.map.Has(options_.node, options_.incarnation);
    for (size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      const int rank = named ? prepare.map.RankOf(options_.node, static_cast<int>(i)) : -1;
      const auto has = [rank](const std::vector<int>& ranks) {
        return std::binary_search(ranks.begin(), ranks.end(), rank);
      };
      slot.held = false;
      const bool again = slot.finished;
      // A slot's own memory is better, unless it was another rank's.
      if (slot.state == State::kDone && slot.rank != rank && !has(prepare.finished))
        slot.state = State::kEmpty;
      if (slot.state == State::kEmpty && rank >= 0) {
        slot.plain = has(prepare.plain) && !again;
        slot.joined = slot.finished = false;
        if (has(prepare.finished)) slot.state = State::kDone;
      }
      slot.rank = rank;
      if (slot.finished) FillAgain(slot);
      if (prepare.end_plain && slot.state == State::kStarting && IsPlain(slot))
        Terminate(static_cast<int>(i), now_ + options_.elastic.budget.grace, prepare.reason);
    }
  }
  said_staged_ = false;
  Refill();
  TryPrepared();
  if (!said_staged_) {
    Send(control::Prepared{
        .generation = target_, .round = round_, .staged = false, .last_step = newest_step_});
  }
}

void NodeAgent::Hear(const control::Commit& commit) {
  if (stopping_ || commit.generation < committed_) return;
  said_bye_ = false;
  if (commit.generation == committed_) {  // told again
    said_committed_ = false;
    return;
  }
  Abort("a newer generation was committed");
  committed_ = commit.generation;
  aborted_ = commit.generation - 1;
  commit_ = commit;
  world_ = commit.map.world;
  restored_.reset();
  said_committed_ = false;
  std::erase_if(faults_, [this](const control::Fault& fault) {
    return !fault.finished && fault.generation < committed_;
  });
  const bool named = commit.map.Has(options_.node, options_.incarnation);
  std::vector<int> ranks;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.rank = named ? commit.map.RankOf(options_.node, static_cast<int>(i)) : -1;
    ranks.push_back(slot.rank);
  }
  if (named) Emit(OpenGeneration{commit_, std::move(ranks)});
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    const int index = static_cast<int>(i);
    if (slot.rank < 0) {
      const bool ends = IsAlive(slot) && !IsDying(slot) && slot.state != State::kLeaving;
      if (ends) Terminate(index, now_ + patience(slot), "released");
      continue;
    }
    if (slot.state == State::kStaged) {
      slot.state = State::kActive;
      slot.due = absl::InfiniteDuration();
    }
    if (slot.state == State::kEmpty && slot.plain && !slot.held) Spawn(index, committed_);
  }
}

void NodeAgent::Hear(const control::Next& next) {
  if (next.generation != committed_ || committed_ <= aborted_ ||
      next.candidate <= commit_.candidate)
    return;
  commit_.candidate = next.candidate;
  restored_.reset();
  Emit(TryCandidate{next.generation, next.candidate});
}

void NodeAgent::Hear(const control::Exclude& exclude) {
  EndAll(ExitCodeOf(JobOutcome::kExcluded), exclude.reason, true);
}

void NodeAgent::Hear(const control::Collect& collect) {
  std::vector<int> alive;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (IsAlive(slots_[i])) alive.push_back(static_cast<int>(i));
  }
  if (!alive.empty()) Emit(CaptureStacks{std::move(alive), collect.reason});
}

void NodeAgent::Hear(const control::Done& done) { EndAll(done.exit_code, done.reason, false); }

}  // namespace outlast
