#include "watch/monitor_state.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace outlast {
namespace {

constexpr uint64_t kNoLimitNs =
    std::numeric_limits<int64_t>::max();  // a declared limit of this or more is none

// The operation that the rank entered last and has not finished, as far as its source can tell.
const CommLook* PendingComm(const RankLook& look) {
  const CommLook* newest = nullptr;
  for (const CommLook& comm : look.comms) {
    const CommSnapshot& row = comm.row;
    const bool in_init = row.state == CommState::kInit;
    const bool in_operation =
        row.state == CommState::kReady && row.done_seq != kUnknownSeq && row.api_seq > row.done_seq;
    if (!in_init && !in_operation) continue;
    if (newest == nullptr || row.changed_ns > newest->row.changed_ns) newest = &comm;
  }
  return newest;
}

int64_t NewestCommChange(const RankLook& look) {
  uint64_t newest = 0;
  for (const CommLook& comm : look.comms) newest = std::max(newest, comm.row.changed_ns);
  return static_cast<int64_t>(newest);
}

bool IsWarm(uint64_t step, uint64_t first_step, int warm_up_steps) {
  return first_step != 0 && step >= first_step + static_cast<uint64_t>(warm_up_steps);
}

uint8_t KindOf(const CommLook* comm) {
  return comm == nullptr ? 0 : static_cast<uint8_t>(comm->row.kind);
}

// Phases in which nothing is pending unless an operation is.
bool IsIdle(Phase phase) { return phase == Phase::kIdle || phase == Phase::kTeardown; }

}  // namespace

std::string_view FreezeReasonName(FreezeReason reason) {
  switch (reason) {
    case FreezeReason::kNone:
      return "none";
    case FreezeReason::kAllStopped:
      return "all ranks are stopped";
    case FreezeReason::kDebugger:
      return "a debugger is attached";
    case FreezeReason::kSuspended:
      return "the machine was suspended";
    case FreezeReason::kLateLoop:
      return "the watch itself was held up";
  }
  return "unknown";
}

void MonitorState::Arm(uint64_t generation, int world, std::vector<bool> elsewhere) {
  armed_ = true;
  generation_ = generation;
  world_ = world;
  elsewhere_ = std::move(elsewhere);
  book_.Reset(world);
  tracks_.clear();
  rounds_.clear();
  has_polled_ = false;
  reported_.reset();
  reported_looks_.clear();
}

MonitorState::Track& MonitorState::TrackOf(int rank) {
  const auto at = static_cast<size_t>(rank);
  if (at >= tracks_.size()) tracks_.resize(at + 1);
  return tracks_[at];
}

// --- Frozen ---

FreezeReason MonitorState::Frozen(const PollInput& input) const {
  int alive = 0, stopped = 0;
  for (const RankLook& look : input.looks) {
    if (look.process == ProcessState::kTraced) return FreezeReason::kDebugger;
    if (look.process == ProcessState::kUnknown || look.process == ProcessState::kDead) continue;
    ++alive;
    if (look.process == ProcessState::kStopped) ++stopped;
  }
  // Somebody may stop a whole job, and go on with it later. Those that are stopped here alone hold
  // up their peers elsewhere.
  const bool has_peers = std::find(elsewhere_.begin(), elsewhere_.end(), true) != elsewhere_.end();
  if (alive > 0 && stopped == alive && !has_peers) return FreezeReason::kAllStopped;
  if (!has_polled_) return FreezeReason::kNone;
  const int64_t poll_ns = absl::ToInt64Nanoseconds(options_.poll);
  const int64_t gap_ns = input.monotonic_ns - last_poll_ns_;
  const int64_t asleep_ns = input.boottime_ns - last_boottime_ns_ - gap_ns;
  if (asleep_ns > std::min<int64_t>(poll_ns, 500'000'000)) return FreezeReason::kSuspended;
  return gap_ns >= 4 * poll_ns ? FreezeReason::kLateLoop : FreezeReason::kNone;
}

void MonitorState::StartAgain(int64_t now_ns) {
  started_again_ns_ = now_ns;
  rounds_.clear();
  for (Track& track : tracks_) {
    track.is_known = false;
    track.ticks.clear();
    track.working_opened = 0;
  }
}

// --- Ages ---

// Notes what only a reader of several looks can know: when progress ticked, since when a rank is
// outside.
void MonitorState::Follow(const RankLook& look, Track& track, int64_t now_ns) {
  const ProgressSnapshot& progress = look.progress;
  if (!track.is_known) {
    track.is_known = true;
    track.outside_since_ns = now_ns;
    track.step_changed_ns = now_ns;
    track.step = progress.step;
  }
  if (track.first_step == 0) track.first_step = progress.step;
  if (!progress.sections.empty()) track.outside_since_ns = now_ns;
  track.ticks.resize(progress.sections.size());
  for (size_t depth = 0; depth < progress.sections.size(); ++depth) {
    const OpenSection& section = progress.sections[depth];
    Track::Tick& tick = track.ticks[depth];
    if (tick.opened != section.opened) {
      tick = {section.opened, section.progress, static_cast<int64_t>(section.start_ns)};
    } else if (tick.progress != section.progress) {
      tick.progress = section.progress;
      tick.at_ns = now_ns;
    }
  }
}

// A declared limit is firm, and covers what is open inside it: nothing learned acts there. Else the
// innermost section counts, or, outside any, an operation that is pending.
Pace MonitorState::PaceOf(const RankLook& look, const Track& track, int64_t now_ns) const {
  const auto& sections = look.progress.sections;
  const auto age_since = [&](int64_t since_ns) {
    return absl::Nanoseconds(std::max<int64_t>(now_ns - std::max(since_ns, started_again_ns_), 0));
  };
  Pace governing;
  for (size_t depth = sections.size(); depth-- > 0;) {
    const OpenSection& section = sections[depth];
    if (section.limit_ns == 0) continue;
    const absl::Duration limit = section.limit_ns >= kNoLimitNs
                                     ? absl::InfiniteDuration()
                                     : absl::Nanoseconds(static_cast<int64_t>(section.limit_ns));
    Pace pace{age_since(track.ticks[depth].at_ns), limit, LimitSource::kDeclared, section.name};
    if (pace.is_over()) return pace;
    if (governing.source == LimitSource::kNone) governing = pace;
  }
  if (governing.source != LimitSource::kNone) return governing;

  const CommLook* pending = PendingComm(look);
  const OpenSection* innermost = sections.empty() ? nullptr : &sections.back();
  if (pending == nullptr && (innermost == nullptr || IsIdle(innermost->phase))) {
    // Idle. The limit counts only when somebody waits for this rank.
    const int64_t idle_since_ns =
        innermost == nullptr ? track.outside_since_ns : track.ticks.back().at_ns;
    return {age_since(std::max(idle_since_ns, NewestCommChange(look))),
            options_.first_limits.outside, LimitSource::kNone,
            innermost == nullptr ? "" : innermost->name};
  }
  const int64_t since_ns =
      std::max(innermost == nullptr ? 0 : track.ticks.back().at_ns, NewestCommChange(look));
  const bool may_learn = IsWarm(look.progress.step, track.first_step, options_.warm_up_steps);
  const OpenSection* outer = sections.size() < 2 ? nullptr : &sections[sections.size() - 2];
  const WorkLimit limit = book_.For(innermost, KindOf(pending), may_learn, outer);
  return {age_since(innermost == nullptr ? std::max(since_ns, track.outside_since_ns) : since_ns),
          limit.limit, limit.is_learned ? LimitSource::kLearned : LimitSource::kConfigured,
          innermost == nullptr ? "" : innermost->name};
}

Pace MonitorState::Peek(const RankLook& look, int64_t now_ns) const {
  const auto at = static_cast<size_t>(look.rank);
  Track track = look.rank >= 0 && at < tracks_.size() ? tracks_[at] : Track{};
  Follow(look, track, now_ns);
  return PaceOf(look, track, now_ns);
}

// --- Learning ---

// The step log is exact. What a phase waited inside collectives is counted apart there, but not by
// the section's clock.
void MonitorState::LearnSteps(const PollInput& input) {
  for (const PollInput::EndedStep& ended : input.steps) {
    const StepRecord& step = ended.record;
    if (ended.rank < 0 || step.generation != generation_ || step.end_ns < step.start_ns) continue;
    Track& track = TrackOf(ended.rank);
    track.has_step_log = true;
    if (track.first_step == 0) track.first_step = step.step;
    if (step.flags & kStepAborted) continue;
    if (static_cast<int64_t>(step.start_ns) <= disturbed_until_ns_) continue;
    if (!IsWarm(step.step, track.first_step, options_.warm_up_steps)) continue;
    const auto observe = [&](const WorkKey& key, uint64_t nanos) {
      book_.Observe(ended.rank, key, absl::Nanoseconds(static_cast<int64_t>(nanos)));
    };
    observe(WorkKey::Step(), step.end_ns - step.start_ns);
    observe(WorkKey::PhaseOfStep(Phase::kData), step.data_ns + step.collective_wait_ns);
    observe(WorkKey::PhaseOfStep(Phase::kForward), step.forward_ns + step.collective_wait_ns);
    observe(WorkKey::PhaseOfStep(Phase::kBackward), step.backward_ns + step.collective_wait_ns);
    observe(WorkKey::PhaseOfStep(Phase::kOptimizer), step.optimizer_ns + step.collective_wait_ns);
    observe(WorkKey::PhaseOfStep(Phase::kCommWait), step.end_ns - step.start_ns);
  }
}

// What polls alone can tell: a section that is gone lasted until this poll at most; n steps took so
// long together.
void MonitorState::LearnByPolls(const RankLook& look, Track& track, int64_t now_ns) {
  const ProgressSnapshot& progress = look.progress;
  const OpenSection* innermost = progress.sections.empty() ? nullptr : &progress.sections.back();
  const bool is_warm = IsWarm(progress.step, track.first_step, options_.warm_up_steps);

  const WorkKey working = innermost == nullptr
                              ? WorkKey{}
                              : WorkKey{innermost->id, innermost->phase, KindOf(PendingComm(look))};
  const uint64_t opened = innermost == nullptr ? 0 : innermost->opened;
  if (track.working_opened != 0 && (opened != track.working_opened || working != track.working)) {
    if (is_warm && track.working_since_ns > disturbed_until_ns_)
      book_.Observe(look.rank, track.working, absl::Nanoseconds(now_ns - track.working_since_ns));
    track.working_opened = 0;
  }
  const bool is_sampled =
      innermost != nullptr && innermost->limit_ns == 0 && !IsPlainStepPhase(*innermost);
  if (is_sampled && track.working_opened == 0) {
    track.working = working;
    track.working_opened = opened;
    track.working_since_ns = std::max(track.ticks.back().at_ns, NewestCommChange(look));
  }

  const bool is_in_step = innermost == nullptr || IsStepPhase(innermost->phase);
  if (progress.step > track.step) {
    const auto steps = static_cast<int64_t>(progress.step - track.step);
    if (is_warm && !track.has_step_log && is_in_step && track.was_in_step &&
        track.step_changed_ns > disturbed_until_ns_) {
      book_.Observe(look.rank, WorkKey::Step(),
                    absl::Nanoseconds((now_ns - track.step_changed_ns) / steps));
    }
    track.was_in_step = is_in_step;
    track.step_changed_ns = now_ns;
  } else {
    track.was_in_step = track.was_in_step && is_in_step;
  }
  track.step = progress.step;
}

void MonitorState::Learn(const PollInput& input) {
  LearnSteps(input);
  for (const RankLook& look : input.looks) {
    if (!look.has_data || look.progress.generation != generation_ ||
        look.process == ProcessState::kStopped)
      continue;
    Track& track = TrackOf(look.rank);
    Follow(look, track, input.monotonic_ns);
    LearnByPolls(look, track, input.monotonic_ns);
  }
}

// --- Judging ---

// The look to compare with. A stop needs two polls only; everything else some time without a move.
const MonitorState::Round* MonitorState::FirstRound(const Round& last) const {
  if (rounds_.size() < 2) return nullptr;
  const Round& before = rounds_[rounds_.size() - 2];
  for (const RankLook& now : last.looks) {
    if (now.process != ProcessState::kStopped) continue;
    for (const RankLook& then : before.looks) {
      if (then.rank == now.rank && then.process == ProcessState::kStopped) return &before;
    }
  }
  const int64_t apart_ns = absl::ToInt64Nanoseconds(options_.looks_apart);
  for (auto round = rounds_.rbegin() + 1; round != rounds_.rend(); ++round) {
    if (last.at_ns - round->at_ns >= apart_ns) return &*round;
  }
  return nullptr;
}

Verdict MonitorState::JudgeNow() {
  const Round& last = rounds_.back();
  Verdict none;
  none.generation = generation_;
  const bool is_over = std::any_of(last.looks.begin(), last.looks.end(),
                                   [](const RankLook& look) { return look.pace.is_over(); });
  none.reason = "no deadline has passed";
  if (!is_over) return none;
  const Round* first = FirstRound(last);
  none.reason = "there is no second look yet";
  if (first == nullptr) return none;
  std::vector<RankLooks> pairs;
  for (const RankLook& look : last.looks) {
    RankLooks pair{nullptr, &look};
    for (const RankLook& earlier : first->looks) {
      if (earlier.rank == look.rank) pair.first = &earlier;
    }
    pairs.push_back(pair);
  }
  return JudgeRanks(pairs, {.world = world_, .elsewhere = elsewhere_, .generation = generation_});
}

bool MonitorState::HasRecovered(const Round& round) const {
  const auto involved = [this](int rank) {
    const auto is_culprit = [rank](const Culprit& culprit) { return culprit.rank == rank; };
    return std::any_of(reported_->culprits.begin(), reported_->culprits.end(), is_culprit) ||
           (reported_->culprits.empty() &&
            std::count(reported_->waiting.begin(), reported_->waiting.end(), rank) > 0);
  };
  for (const RankLook& look : round.looks) {
    if (!involved(look.rank) || look.process == ProcessState::kStopped) continue;
    for (const RankLook& then : reported_looks_) {
      if (then.rank == look.rank && look.has_data && look.MovedSince(then)) return true;
    }
  }
  return false;
}

// The same thing goes on: ages and evidence lines grow, class and culprits stay.
bool MonitorState::IsReported(const Verdict& verdict) const {
  return reported_ && reported_->verdict_class == verdict.verdict_class &&
         reported_->waiting == verdict.waiting &&
         std::equal(reported_->culprits.begin(), reported_->culprits.end(),
                    verdict.culprits.begin(), verdict.culprits.end(),
                    [](const Culprit& a, const Culprit& b) {
                      return a.rank == b.rank && a.section == b.section;
                    });
}

bool MonitorState::Adopt(const Verdict& verdict, std::vector<RankLook> looks) {
  if (!armed_ || verdict.generation != generation_ || IsReported(verdict)) return false;
  reported_ = verdict;
  reported_looks_ = std::move(looks);
  return true;
}

void MonitorState::Report(Verdict verdict, PollResult* result) {
  const Round& last = rounds_.back();
  if (reported_ && HasRecovered(last)) result->recovered = std::exchange(reported_, std::nullopt);
  result->judged = verdict;
  if (!verdict.is_finding()) return;
  if (IsReported(verdict)) return;
  reported_ = verdict;
  reported_looks_ = last.looks;
  result->finding = std::move(verdict);
}

PollResult MonitorState::Poll(PollInput input) {
  PollResult result;
  if (!armed_) return result;
  const int64_t now_ns = input.monotonic_ns;
  result.frozen = Frozen(input);
  const bool is_first = !has_polled_;
  has_polled_ = true;
  last_poll_ns_ = now_ns;
  last_boottime_ns_ = input.boottime_ns;
  if (is_first || result.frozen != FreezeReason::kNone) StartAgain(now_ns);
  if (result.frozen != FreezeReason::kNone) {
    // A late loop is ours: the work may well have been as slow as it looks.
    if (result.frozen != FreezeReason::kLateLoop) disturbed_until_ns_ = now_ns;
    return result;
  }

  for (const RankLook& look : input.looks) {
    if (look.has_data && look.progress.generation != generation_) ++ignored_looks_;
  }
  Learn(input);
  for (RankLook& look : input.looks) {
    if (!look.has_data || look.progress.generation != generation_) continue;
    Track& track = TrackOf(look.rank);
    if (look.process == ProcessState::kStopped) Follow(look, track, now_ns);
    look.pace = PaceOf(look, track, now_ns);
  }
  rounds_.push_back({now_ns, std::move(input.looks)});
  // Keep one that is old enough, and what is newer.
  const int64_t apart_ns = absl::ToInt64Nanoseconds(options_.looks_apart);
  while (rounds_.size() > 2 && now_ns - rounds_[1].at_ns >= apart_ns) rounds_.pop_front();
  Report(JudgeNow(), &result);
  if (reported_ && reported_->verdict_class == VerdictClass::kStopped) disturbed_until_ns_ = now_ns;
  return result;
}

}  // namespace outlast
