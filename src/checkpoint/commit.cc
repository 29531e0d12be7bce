#include "checkpoint/commit.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr double kSlowestBytesPerSecond = 50e6;
constexpr size_t kMostNamed = 8;  // ranks in a message

}  // namespace

std::string_view NameOf(CommitPhase phase) {
  constexpr std::string_view kNames[] = {"announced", "writing",   "collected",
                                         "checked",   "committed", "aborted"};
  return kNames[static_cast<size_t>(phase)];
}

CommitLimits CommitLimits::WithBytes(uint64_t largest_part, absl::Duration hooks) {
  CommitLimits limits;
  limits.write += absl::Seconds(static_cast<double>(largest_part) / kSlowestBytesPerSecond);
  limits.hooks += hooks;
  return limits;
}

absl::Status CommitLimits::Check() const {
  if (stall < write) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "deadlines of a save: {} without progress, less than the write's {} wanted",
               absl::FormatDuration(stall), absl::FormatDuration(write));
}

Commit::Commit(uint64_t generation, int64_t step, std::vector<CommitPart> parts,
               CommitLimits limits)
    : generation_(generation), step_(step), parts_(std::move(parts)), limits_(limits) {
  for (size_t i = 0; i < parts_.size(); ++i) {
    for (const uint32_t rank : parts_[i].ranks) node_of_[rank] = i;
  }
  moved_.resize(parts_.size());
}

std::vector<CommitAction> Commit::Start(absl::Duration now) {
  now_ = now;
  due_ = now + limits_.announce;
  Emit(MakeSaveFolder{});
  return std::exchange(actions_, {});
}

std::vector<CommitAction> Commit::Step(const CommitEvent& event, absl::Duration now) {
  now_ = std::max(now_, now);
  std::visit([this](const auto& one) { On(one); }, event);
  if (!std::holds_alternative<TimePassed>(event)) On(TimePassed{});
  return std::exchange(actions_, {});
}

absl::Duration Commit::deadline() const {
  if (is_over()) return absl::InfiniteDuration();
  absl::Duration due = due_;
  if (phase_ == CommitPhase::kWriting) {
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (IsMissing(parts_[i])) due = std::min(due, moved_[i] + limits_.stall);
    }
  }
  return due;
}

bool Commit::IsMissing(const CommitPart& part) const {
  return std::ranges::any_of(part.ranks, [&](uint32_t rank) { return !written_.contains(rank); });
}

// "rank 3 on node b, rank 4 on node b and 7 more".
std::string Commit::MissingText(const std::string& only_node) const {
  std::string text;
  size_t named = 0, more = 0;
  for (const auto& [rank, part] : node_of_) {
    const std::string& node = parts_[part].node;
    if (written_.contains(rank) || (!only_node.empty() && node != only_node)) continue;
    if (named == kMostNamed) {
      ++more;
      continue;
    }
    text += fmt::format("{}rank {} on node '{}'", named++ == 0 ? "" : ", ", rank, node);
  }
  return more == 0 ? text : fmt::format("{} and {} more", text, more);
}

void Commit::On(const FolderMade& event) {
  if (phase_ == CommitPhase::kAborted && save_.checkpoint.empty()) {
    // It came after its deadline: nobody was told of it.
    save_ = {generation_, event.checkpoint};
    return Emit(RemoveSaveFolder{});
  }
  if (phase_ != CommitPhase::kAnnounced || !save_.checkpoint.empty()) return void(++ignored_);
  save_ = {generation_, event.checkpoint};
  phase_ = CommitPhase::kWriting;
  due_ = now_ + limits_.write + limits_.receipts + limits_.collect;
  std::ranges::fill(moved_, now_);
  Emit(AnnounceSave{save_});
}

void Commit::On(const FolderRefused& event) {
  if (phase_ != CommitPhase::kAnnounced) return void(++ignored_);
  Abort(event.why);
}

bool Commit::Concerns(const std::string& node, const SaveKey& save) {
  const bool concerns = phase_ == CommitPhase::kWriting && save == save_ &&
                        std::ranges::find(parts_, node, &CommitPart::node) != parts_.end();
  if (!concerns) ++ignored_;
  return concerns;
}

void Commit::On(const RankWritten& event) {
  if (!Concerns(event.node, event.save)) return;
  const auto part = node_of_.find(event.written.rank);
  if (part == node_of_.end() || parts_[part->second].node != event.node) return void(++ignored_);
  moved_[part->second] = now_;
  written_.emplace(event.written.rank, event.written.receipt);
  if (written_.size() == node_of_.size()) Collected();
}

void Commit::Collected() {
  phase_ = CommitPhase::kCollected;
  due_ = now_ + limits_.hooks;
  Emit(AskSaveHooks{});
}

void Commit::On(const PartProgressed& event) {
  if (!Concerns(event.node, event.save)) return;
  const auto part = std::ranges::find(parts_, event.node, &CommitPart::node);
  moved_[static_cast<size_t>(part - parts_.begin())] = now_;
}

void Commit::On(const PartFailed& event) {
  if (!Concerns(event.node, event.save)) return;
  const std::string who = event.rank < 0
                              ? fmt::format("node '{}'", event.node)
                              : fmt::format("rank {} on node '{}'", event.rank, event.node);
  Abort(Annotate(event.why, who));
}

void Commit::On(const PartLost& event) {
  const auto part = std::ranges::find(parts_, event.node, &CommitPart::node);
  if (part == parts_.end() || phase_ > CommitPhase::kWriting || !IsMissing(*part))
    return void(++ignored_);
  Abort(Error(absl::StatusCode::kUnavailable, "{}: its agent is lost: {}", MissingText(event.node),
              event.why));
}

void Commit::On(const HooksAnswered& event) {
  if (phase_ != CommitPhase::kCollected) return void(++ignored_);
  if (!event.verdict.ok()) return Abort(event.verdict);
  phase_ = CommitPhase::kChecked;
  due_ = now_ + limits_.link;
  link_asked_ = true;
  Emit(LinkManifest{});
}

void Commit::On(const ManifestLinked& event) {
  const bool was_late = phase_ == CommitPhase::kAborted && link_asked_;
  if (phase_ != CommitPhase::kChecked && !was_late) return void(++ignored_);
  link_asked_ = false;
  if (event.status.ok()) {
    phase_ = CommitPhase::kCommitted;
    reason_ = absl::OkStatus();
    return Emit(TellOutcome{save_, absl::OkStatus()});
  }
  // kAborted: another committer's manifest stands there, or another owner of the root decides.
  manifest_may_stand_ = absl::IsAborted(event.status);
  if (!was_late) return Abort(event.status);
  if (!manifest_may_stand_) Emit(RemoveSaveFolder{});
}

void Commit::On(const SaveGenerationEnded& event) {
  if (event.generation < generation_ || is_over() || link_asked_) return;
  Abort(Error(absl::StatusCode::kAborted, "generation {} ended: {}", generation_, event.reason));
}

absl::Status Commit::Late(std::string_view what, absl::Duration limit) const {
  return Error(absl::StatusCode::kDeadlineExceeded, "{} within {}", what,
               absl::FormatDuration(limit));
}

void Commit::On(const TimePassed&) {
  if (now_ < deadline()) return;
  switch (phase_) {
    case CommitPhase::kAnnounced:
      return Abort(Late("its folder was not made", limits_.announce));
    case CommitPhase::kWriting:
      for (size_t i = 0; i < parts_.size() && now_ < due_; ++i) {
        if (!IsMissing(parts_[i]) || now_ < moved_[i] + limits_.stall) continue;
        return Abort(Late(fmt::format("{}: no progress, {} of {} parts are written",
                                      MissingText(parts_[i].node), written_.size(), world()),
                          limits_.stall));
      }
      return Abort(Late(fmt::format("{}: not written, {} of {} parts are", MissingText(),
                                    written_.size(), world()),
                        limits_.write + limits_.receipts + limits_.collect));
    case CommitPhase::kCollected:
      return Abort(Late("its hooks did not answer", limits_.hooks));
    case CommitPhase::kChecked:
      return Abort(Late("its manifest was not linked; the disk hangs", limits_.link));
    case CommitPhase::kCommitted:
    case CommitPhase::kAborted:
      return;
  }
}

void Commit::Abort(const absl::Status& why) {
  phase_ = CommitPhase::kAborted;
  reason_ = Annotate(why, fmt::format("save of step {}", step_));
  Emit(TellOutcome{save_, reason_});
  // While the link may still come, nobody knows whether a manifest stands there.
  if (!link_asked_ && !manifest_may_stand_ && !save_.checkpoint.empty()) Emit(RemoveSaveFolder{});
}

// --- The fence ---

bool WriteFence::Begin(const SaveKey& save) {
  MutexLock lock(mutex_);
  if (save.generation <= aborted_ || save.generation < newest_) return false;
  newest_ = save.generation;
  current_ = save;
  return true;
}

void WriteFence::End(const SaveKey& save) {
  MutexLock lock(mutex_);
  if (current_ == save) current_ = {};
}

bool WriteFence::Abort(uint64_t generation, absl::Duration patience) {
  const absl::Duration until = Clock::Real().Uptime() + patience;
  MutexLock lock(mutex_);
  aborted_ = std::max(aborted_, generation);
  while (inside_ > 0) {
    const absl::Duration left = until - Clock::Real().Uptime();
    if (left <= absl::ZeroDuration()) return false;
    changed_.WaitFor(mutex_, left);
  }
  return true;
}

bool WriteFence::IsCurrent(const SaveKey& save) const {
  return current_ == save && save.generation > aborted_;
}

bool WriteFence::IsOpen(const SaveKey& save) const {
  MutexLock lock(mutex_);
  return IsCurrent(save);
}

WriteFence::Permit WriteFence::Enter(const SaveKey& save) {
  MutexLock lock(mutex_);
  if (!IsCurrent(save)) return {};
  ++inside_;
  return Permit(this);
}

WriteFence::Permit::~Permit() {
  if (fence_ == nullptr) return;
  MutexLock lock(fence_->mutex_);
  --fence_->inside_;
  fence_->changed_.NotifyAll();
}

}  // namespace outlast
