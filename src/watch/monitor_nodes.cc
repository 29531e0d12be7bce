// The watch in a job of several nodes: looks of all of them, put together by the lead.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "watch/monitor.h"

namespace outlast {

void Monitor::ListenToPeers() {
  if (keeper_.peers() == nullptr) return;
  Peers::Ears ears;
  ears.on_message = [this, alive = std::weak_ptr<const bool>(alive_)](const std::string& node,
                                                                      const std::string& bytes) {
    if (!alive.expired()) Hear(node, bytes);
  };
  keeper_.peers()->Listen(kPeerWatch, std::move(ears));
}

bool Monitor::is_lead() const {
  return commit_ && commit_->job != nullptr &&
         commit_->job->map.runs.front().node == keeper_.node();
}

void Monitor::ArmJoint() {
  joint_.Disarm();
  told_.reset();
  if (!is_lead()) return;
  const RankMap& map = commit_->job->map;
  std::vector<std::string> node_of_rank(static_cast<size_t>(map.world));
  for (const RankRun& run : map.runs) {
    for (int rank = run.first_rank; rank < run.first_rank + run.count; ++rank)
      node_of_rank[static_cast<size_t>(rank)] = run.node;
  }
  joint_.Arm(commit_->generation, std::move(node_of_rank));
}

// Said at each poll for as long as it is so.
void Monitor::TellStall() {
  const StallTold told{commit_->generation};
  if (is_lead()) {
    Hear(keeper_.node(), told);
  } else if (commit_->job != nullptr) {
    Tell(commit_->job->map.runs.front().node, told);
  }
}

void Monitor::Tell(const std::string& node, const WatchMessage& message) {
  // Where it cannot be sent nothing is known of who would have heard it, and nobody is blamed.
  keeper_.peers()->Send(node, kPeerWatch, EncodeWatchMessage(message)).IgnoreError();
}

void Monitor::Hear(const std::string& node, const std::string& bytes) {
  absl::StatusOr<WatchMessage> message = DecodeWatchMessage(bytes);
  if (!message.ok()) {
    PrintToStderr("outlast: watch: node '{}': {}\n", node, MessageOf(message.status()));
    return;
  }
  std::visit([&](auto& typed) { Hear(node, std::move(typed)); }, *message);
}

// --- The lead ---

void Monitor::Hear(const std::string&, const StallTold& told) {
  if (!is_lead() || told.generation != commit_->generation) return;
  joint_.Begin(Clock::Real().Uptime(), options_.looks_apart);
  StepJoint();
}

void Monitor::Hear(const std::string& node, LooksTold told) {
  joint_.Take(node, std::move(told));
  StepJoint();
}

void Monitor::StepJoint() {
  const JointLook::Next next = joint_.Step(Clock::Real().Uptime());
  const int64_t started_ns = MonotonicNanos();
  if (next.ask) {
    for (const std::string& node : joint_.nodes()) {
      if (node != keeper_.node()) Tell(node, *next.ask);
    }
    if (auto here = LooksHere(*next.ask)) joint_.Take(keeper_.node(), *std::move(here));
  }
  if (next.verdict && next.verdict->is_finding()) {
    const VerdictFound found{next.number, absl::Nanoseconds(MonotonicNanos() - started_ns),
                             *next.verdict};
    for (const std::string& node : joint_.Concerned(found.verdict)) {
      if (node != keeper_.node()) Tell(node, found);
    }
    FindJointly(found);
  }
  if (joint_.due() == absl::InfiniteDuration()) return;
  keeper_.loop().RunAt(joint_.due(), [this, alive = std::weak_ptr<const bool>(alive_)] {
    if (!alive.expired()) StepJoint();
  });
}

// --- Every node ---

void Monitor::Hear(const std::string& node, const LookAsked& asked) {
  if (auto here = LooksHere(asked)) Tell(node, *here);
}

// None while they would say nothing of the ranks: our own tracer is attached, or time was odd.
std::optional<LooksTold> Monitor::LooksHere(const LookAsked& asked) {
  if (!commit_ || commit_->generation != asked.generation || is_capturing_ ||
      frozen_ != FreezeReason::kNone)
    return std::nullopt;
  LooksTold told{asked, {}};
  const int64_t now_ns = MonotonicNanos();
  for (const int slot : commit_->members) {
    RankLook look = LookAt(commit_->RankOf(slot), slot, now_ns);
    const bool is_paced = state_ != nullptr && state_->is_armed() && look.has_data &&
                          look.progress.generation == commit_->generation;
    if (is_paced) look.pace = state_->Peek(look, now_ns);
    told.looks.push_back(std::move(look));
  }
  told_ = told;
  return told;
}

void Monitor::Hear(const std::string&, const VerdictFound& found) { FindJointly(found); }

void Monitor::FindJointly(const VerdictFound& found) {
  const Verdict& verdict = found.verdict;
  const bool is_present = commit_ && verdict.generation == commit_->generation && told_ &&
                          told_->asked.number == found.number && told_->asked.look == 2 &&
                          state_ != nullptr;
  if (!is_present || !verdict.is_finding()) return;
  // What must not have moved since: the culprits here, or, without any, who waits.
  std::vector<RankLook> then;
  bool concerns = false;
  for (const RankLook& look : told_->looks) {
    const bool is_blamed = std::any_of(verdict.culprits.begin(), verdict.culprits.end(),
                                       [&](const Culprit& one) { return one.rank == look.rank; });
    const bool waits = std::find(verdict.waiting.begin(), verdict.waiting.end(), look.rank) !=
                       verdict.waiting.end();
    concerns = concerns || is_blamed || waits;
    if (is_blamed || (verdict.culprits.empty() && waits)) then.push_back(look);
  }
  if (!concerns) return;
  if (!state_->Adopt(verdict, told_->looks)) return;
  OnFinding(verdict, found.took, std::move(then));
}

}  // namespace outlast
