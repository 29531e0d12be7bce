#include "watch/monitor.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "watch/evidence.h"

namespace outlast {
namespace {

constexpr char kWatchKey[] = "watch";

}  // namespace

Monitor::Monitor(Keeper& keeper, WorkerHost& host, MonitorListener listener,
                 const JobDeadlines& deadlines)
    : keeper_(keeper), host_(host), listener_(std::move(listener)), deadlines_(deadlines) {
  ListenToPeers();
}

// --- What the keeper tells ---

// Every rank asks; the first one's options hold.
bool Monitor::OnMessage(int slot, Message& message) {
  if (message.kind != MessageKind::kWatch) return false;
  PayloadReader payload(message.payload);
  const std::string text(payload.Text());
  auto options = payload.ok() ? DecodeWatchOptions(text)
                              : Error(absl::StatusCode::kInvalidArgument,
                                      "slot {}: a watch request without options", slot);
  if (options.ok()) {
    if (absl::Status nests = CheckNesting(*options, deadlines_); !nests.ok())
      options = std::move(nests);
  }
  if (options.ok() && state_ == nullptr) {
    encoded_options_ = text;
    if (keeper_.options().vault != nullptr) keeper_.options().vault->Keep(kWatchKey, text, {});
    Begin(*options);
  } else if (options.ok() && text != encoded_options_ && !has_told_of_difference_) {
    has_told_of_difference_ = true;
    PrintToStderr(
        "outlast: slot {} asks for other watchdog options than the first rank; the first "
        "ones hold\n",
        slot);
  }
  if (message.request != 0) keeper_.Answer(slot, message.request, options.status());
  return true;
}

absl::Status Monitor::GoOn(Kept& kept) {
  const auto watch = kept.extract(kWatchKey);
  if (watch.empty()) return absl::OkStatus();
  OUTLAST_ASSIGN_OR_RETURN(const WatchdogOptions options, DecodeWatchOptions(watch.mapped().bytes));
  encoded_options_ = std::move(watch.mapped().bytes);
  Begin(options);
  return absl::OkStatus();
}

void Monitor::Begin(const WatchdogOptions& options) {
  options_ = options;
  state_ = std::make_unique<MonitorState>(options, keeper_.world());
  due_ = Clock::Real().Uptime();
  if (commit_) ArmFor(*commit_);
}

void Monitor::OnCommit(const CommitGeneration& commit) {
  commit_ = commit;
  ended_.assign(static_cast<size_t>(keeper_.slots()), 0);
  ArmJoint();
  if (state_ != nullptr) ArmFor(commit);
}

void Monitor::ArmFor(const CommitGeneration& commit) {
  std::vector<bool> elsewhere;
  if (commit.job != nullptr) {
    elsewhere.assign(static_cast<size_t>(commit.job->map.world), true);
    for (const int rank : commit.ranks) {
      if (rank >= 0) elsewhere[static_cast<size_t>(rank)] = false;
    }
  }
  const int world = commit.job != nullptr ? commit.job->map.world : keeper_.world();
  state_->Arm(commit.generation, world, std::move(elsewhere));
  frozen_ = FreezeReason::kNone;
  if (is_scheduled_) return;
  due_ = Clock::Real().Uptime();
  Schedule();
}

void Monitor::OnAbort(uint64_t generation) {
  if (!commit_ || commit_->generation > generation) return;
  commit_.reset();
  joint_.Disarm();
  told_.reset();
  if (state_ != nullptr) state_->Disarm();
}

void Monitor::OnWorkerEnded(int slot) {
  if (slot >= 0 && static_cast<size_t>(slot) < ended_.size()) ended_[static_cast<size_t>(slot)] = 1;
}

// --- Polling ---

void Monitor::Schedule() {
  // At a steady pace, so that a poll's own cost does not stretch it; after a delay from now on.
  due_ = std::max(due_ + options_.poll, Clock::Real().Uptime());
  is_scheduled_ = true;
  keeper_.loop().RunAt(due_, [this, alive = std::weak_ptr<const bool>(alive_)] {
    if (alive.expired()) return;
    is_scheduled_ = false;
    PollNow();
    if (state_->is_armed()) Schedule();
  });
}

LookReader* Monitor::ReaderOf(int slot) {
  const auto at = static_cast<size_t>(slot);
  if (readers_.size() <= at) readers_.resize(at + 1);
  if (!readers_[at]) {
    auto reader = LookReader::Open(keeper_.black_box(slot).fd(), slot);
    if (!reader.ok()) return nullptr;  // unknown, not hung
    readers_[at].emplace(std::move(*reader));
  }
  return &*readers_[at];
}

RankLook Monitor::LookAt(int rank, int slot, int64_t now_ns) {
  LookReader* reader = ReaderOf(slot);
  RankLook unknown;
  unknown.rank = rank;
  unknown.slot = slot;
  const bool has_finished = keeper_.is_finished(slot);
  const bool has_ended = ended_[static_cast<size_t>(slot)] != 0;
  if (reader == nullptr || (!keeper_.is_joined(slot) && !has_finished && !has_ended))
    return unknown;
  RankLook look = reader->Look(rank, now_ns);
  look.has_finished = has_finished;
  if (has_ended) look.process = ProcessState::kDead;
  // Done and gone: that is no death.
  if (has_finished && look.process == ProcessState::kDead) look.process = ProcessState::kUnknown;
  return look;
}

RankLook Monitor::Peek(int slot) {
  RankLook look;
  look.rank = keeper_.rank(slot);
  look.slot = slot;
  LookReader* reader = ReaderOf(slot);
  if (reader == nullptr) return look;
  const int64_t now_ns = MonotonicNanos();
  look = reader->Look(look.rank, now_ns);
  if (state_ != nullptr && state_->is_armed()) look.pace = state_->Peek(look, now_ns);
  return look;
}

void Monitor::PollNow() {
  if (!state_->is_armed() || !commit_ || is_capturing_) return;
  PollInput input;
  input.monotonic_ns = MonotonicNanos();
  input.boottime_ns = BoottimeNanos();
  for (const int slot : commit_->members) {
    const int rank = commit_->RankOf(slot);
    input.looks.push_back(LookAt(rank, slot, input.monotonic_ns));
    LookReader* reader = ReaderOf(slot);
    if (reader == nullptr) continue;
    for (const StepRecord& step : reader->NewSteps()) input.steps.push_back({rank, step});
  }
  const int64_t started_ns = input.monotonic_ns;
  const PollResult result = state_->Poll(std::move(input));
  if (result.frozen != frozen_ && result.frozen != FreezeReason::kNone) {
    PrintToStderr("outlast: watch: {}; deadlines start again\n", FreezeReasonName(result.frozen));
  }
  frozen_ = result.frozen;
  if (result.recovered && listener_.on_recovered) listener_.on_recovered(*result.recovered);
  if (result.judged.needs_others) TellStall();
  if (result.finding) OnFinding(*result.finding, absl::Nanoseconds(MonotonicNanos() - started_ns));
}

// --- Findings ---

int Monitor::SlotOf(int rank) const {
  const auto holds = [&](int slot) { return commit_->RankOf(slot) == rank; };
  const auto found = std::find_if(commit_->members.begin(), commit_->members.end(), holds);
  return found == commit_->members.end() ? -1 : *found;
}

// The culprits, and two of those that wait for them.
std::vector<int> Monitor::SlotsForStacks(const Verdict& verdict) const {
  std::vector<int> slots;
  const auto add = [&](int slot) {
    const bool is_new = std::find(slots.begin(), slots.end(), slot) == slots.end();
    if (slot >= 0 && is_new && keeper_.is_joined(slot)) slots.push_back(slot);
  };
  for (const Culprit& culprit : verdict.culprits) add(SlotOf(culprit.rank));
  const size_t roots = slots.size();
  for (const int rank : verdict.waiting) {
    if (slots.size() < roots + 2) add(SlotOf(rank));
  }
  return slots;
}

// Evidence first, then stacks, and only then does anything happen to a process.
void Monitor::OnFinding(const Verdict& verdict, absl::Duration took, std::vector<RankLook> then) {
  ++findings_;
  const std::vector<int> slots = SlotsForStacks(verdict);
  const std::string& run_dir = keeper_.options().run_dir;
  std::string folder;
  if (!run_dir.empty()) {
    std::vector<BoxOfRank> boxes;
    for (const int slot : commit_->members)
      boxes.push_back({commit_->RankOf(slot), keeper_.black_box(slot).fd()});
    const auto written = WriteEvidence(run_dir, findings_, verdict, boxes, slots, took);
    if (written.ok()) folder = *written;
    if (!written.ok())
      PrintToStderr("outlast: watch: evidence not written: {}\n", MessageOf(written.status()));
  }
  if (listener_.on_finding) listener_.on_finding(verdict, folder);
  const std::string reason =
      fmt::format("{}: {}", VerdictClassName(verdict.verdict_class), verdict.reason);
  if (slots.empty()) return Act(verdict);
  for (const Culprit& culprit : verdict.culprits) {
    const int slot = SlotOf(culprit.rank);
    const auto is_known = [&](const RankLook& look) { return look.rank == culprit.rank; };
    if (slot >= 0 && std::none_of(then.begin(), then.end(), is_known))
      then.push_back(LookAt(culprit.rank, slot, MonotonicNanos()));
  }
  is_capturing_ = true;
  host_.CaptureStacks({slots, reason}, [this, verdict, then = std::move(then),
                                        alive = std::weak_ptr<const bool>(alive_)] {
    if (alive.expired()) return;
    is_capturing_ = false;
    state_->Resume();
    if (StillHolds(verdict, then)) Act(verdict);
  });
}

// Stacks may take seconds. Who moved meanwhile is not killed for what was.
bool Monitor::StillHolds(const Verdict& verdict, const std::vector<RankLook>& then) {
  if (!commit_ || commit_->generation != verdict.generation) return false;
  for (const RankLook& earlier : then) {
    const int slot = SlotOf(earlier.rank);
    if (slot < 0) return false;
    const RankLook now = LookAt(earlier.rank, slot, MonotonicNanos());
    if (earlier.process == ProcessState::kStopped && now.process == ProcessState::kRunning)
      return false;
    if (now.MovedSince(earlier)) return false;
  }
  return true;
}

void Monitor::Act(const Verdict& verdict) {
  const bool stands = commit_ && commit_->generation == verdict.generation && state_->is_armed();
  if (options_.mode != WatchMode::kAct || !stands) return;
  if (verdict.culprits.empty() && verdict.waiting.empty()) return;
  VerdictGiven given{};
  given.verdict_class = VerdictClassName(verdict.verdict_class);
  given.detail = verdict.reason;
  given.stopped = verdict.verdict_class == VerdictClass::kStopped;
  if (!verdict.culprits.empty()) {
    given.phase = static_cast<uint32_t>(verdict.culprits.front().phase);
  }
  // Each stopped rank has to be killed; of other verdicts the first culprit ends the generation for
  // all. Where nobody is to blame the generation ends by one of those that wait. What other nodes
  // hold is theirs to do.
  std::vector<int> slots;
  for (const Culprit& culprit : verdict.culprits) slots.push_back(SlotOf(culprit.rank));
  if (slots.empty()) slots.push_back(SlotOf(verdict.waiting.front()));
  if (!given.stopped) slots.resize(1);
  for (const int slot : slots) {
    if (slot < 0) continue;
    given.culprit = slot;
    keeper_.Dispatch(given);
  }
}

}  // namespace outlast
