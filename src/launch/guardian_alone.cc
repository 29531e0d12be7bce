// The guardian without an agent: whether it may live on, and how the next one finds all in place.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "launch/adoption.h"
#include "launch/guardian_state.h"
#include "outlast/base/clock.h"
#include "outlast/blackbox/progress.h"
#include "outlast/blackbox/segment.h"
#include "outlast/elastic/job_memo.h"

namespace outlast {
namespace {

constexpr int64_t kCandidateNanos = 1'000'000'000;  // from its connection to its first word

std::string VersionText(std::string_view who, uint32_t own, uint32_t agent) {
  return fmt::format(
      "{} of version {}, the agent of version {}: the outlast that began the job wanted", who, own,
      agent);
}

}  // namespace

// The job goes on, and another agent can find us.
bool GuardianProcess::MayOutliveAgent() {
  const auto memo = kept_.find(kJobMemoKey);
  if (!door_.is_open() || !kept_.contains(kGuardianFileKey) || memo == kept_.end()) return false;
  const auto job = DecodeJobMemo(memo->second.bytes);
  return job.ok() && !job->is_ending;
}

void GuardianProcess::LoseAgent() {
  agent_ = Channel();
  agent_pid_ = 0;
  const int64_t now = MonotonicNanos();
  adopt_due_ = now + absl::ToInt64Nanoseconds(command_.adopt_within);
  // Of a candidate that was lost within its welcome the outage goes on.
  if (!kept_.contains(kAgentLostKey)) kept_[kAgentLostKey] = {PayloadWriter().Int(now).bytes(), {}};
  const auto job = DecodeJobMemo(kept_.at(kJobMemoKey).bytes);
  if (job.ok()) EndGenerationOf(job->generation);
}

// As the agent itself would: the word first, for trainers whose reader does not run. They unwind
// and wait; nothing is computed that nobody watches.
void GuardianProcess::EndGenerationOf(uint64_t generation) const {
  const std::string message =
      Encode({.kind = MessageKind::kAbort,
              .generation = generation,
              .payload = PayloadWriter()
                             .Int(generation)
                             .Text("the agent was killed; the next one is awaited")
                             .bytes()});
  for (const auto& [key, item] : kept_) {
    if (item.fds.empty()) continue;
    auto copy = Duplicate(item.fds.front().get());
    if (!copy.ok()) continue;
    if (key.starts_with("box.")) {
      auto box = Segment::Open(*std::move(copy));
      if (box.ok()) AgentWords(*box).SetAbortGeneration(generation);
    } else if (key.starts_with("line.")) {
      Channel(*std::move(copy)).TrySend(message).IgnoreError();  // full: the word has told it
    }
  }
}

void GuardianProcess::Meet() {
  auto candidate = AcceptAgent(door_.get(), &candidate_pid_);
  if (!candidate.ok()) return;  // gone, or another user's
  candidate_ = *std::move(candidate);
  candidate_due_ = MonotonicNanos() + kCandidateNanos;
}

void GuardianProcess::Hear() {
  auto packet = candidate_.TryReceive();
  if (packet.status().code() == absl::StatusCode::kResourceExhausted) return;
  if (!packet.ok() || !packet->has_value()) {
    candidate_ = Channel();
    return;
  }
  PayloadReader order((*packet)->bytes);
  const auto kind = static_cast<GuardianOrder>(order.Int<uint8_t>());
  order.Int<int32_t>();
  order.Int<uint64_t>();
  const auto version = order.Int<uint32_t>();
  const auto workers_version = order.Int<uint32_t>();
  const std::string_view run_id = order.Text();
  const bool is_same = version == kGuardianVersion;  // else what follows may be of another form
  if (kind != GuardianOrder::kAdopt || (is_same && !order.ok())) {
    candidate_ = Channel();
  } else if (!is_same) {
    RefuseCandidate(VersionText("it is", kGuardianVersion, version));
  } else if (workers_version != kWireVersion) {
    RefuseCandidate(VersionText("its workers are", kWireVersion, workers_version));
  } else if (run_id != command_.run_id) {
    RefuseCandidate(fmt::format("it guards run {}, not {}", command_.run_id, run_id));
  } else if (has_agent()) {
    RefuseCandidate(fmt::format("its agent, process {}, lives", agent_pid_));
  } else if (!Welcome()) {
    LoseAgent();
  }
}

void GuardianProcess::RefuseCandidate(const std::string& why) {
  Say(candidate_, GuardianReportKind::kRefused, 0, 0, 0, 0, why);
  candidate_ = Channel();
}

// False: it is gone already.
bool GuardianProcess::Welcome() {
  agent_ = std::exchange(candidate_, Channel());
  agent_pid_ = candidate_pid_;
  was_terminated_ = false;
  for (const auto& [key, item] : kept_) {
    std::vector<int> fds;
    for (const UniqueFd& fd : item.fds) fds.push_back(fd.get());
    if (!Say(agent_, GuardianReportKind::kKept, 0, 0, 0, 0, key, fds, item.bytes)) return false;
  }
  PayloadWriter list;
  list.Int(static_cast<uint32_t>(fates_.size()));
  for (const auto& [slot, fate] : fates_)
    list.Int<int32_t>(slot).Int<uint64_t>(fate.incarnation).Int<int32_t>(fate.pid);
  if (!Say(agent_, GuardianReportKind::kAdopted, 0, 0, 0, 0, list.bytes())) return false;
  if (std::exchange(is_template_untold_, false) && template_->is_ready())
    Report(GuardianReportKind::kTemplateReady, 0, 0, template_->pid(), 0);
  return std::all_of(fates_.begin(), fates_.end(),
                     [this](const auto& one) { return Replay(one.first, one.second); });
}

bool GuardianProcess::Replay(int slot, const Fate& fate) {
  if (fate.pid != 0) {
    // Its zombie is ours until its tree is gone; later the pid may be anybody's.
    UniqueFd pidfd;
    if (auto own = OpenPidFd(fate.pid); own.ok() && !fate.is_gone) pidfd = *std::move(own);
    const int fd = pidfd.get();
    if (!Say(agent_, GuardianReportKind::kStarted, slot, fate.incarnation, fate.pid,
             fate.is_forked ? 1 : 0, {}, fd >= 0 ? std::span(&fd, 1) : std::span<const int>()))
      return false;
  }
  if (fate.has_exited && !Say(agent_, GuardianReportKind::kExited, slot, fate.incarnation,
                              fate.code, fate.signal, fate.error))
    return false;
  return !fate.is_gone || Say(agent_, GuardianReportKind::kGone, slot, fate.incarnation, 0, 0, {});
}

void GuardianProcess::Remember(GuardianReportKind kind, int slot, uint64_t incarnation, int value,
                               int signal, std::string_view error) {
  const auto found = fates_.find(slot);
  if (found == fates_.end() || found->second.incarnation != incarnation) return;
  Fate& fate = found->second;
  if (kind == GuardianReportKind::kStarted) {
    fate.pid = value;
    fate.is_forked = signal != 0;
  } else if (kind == GuardianReportKind::kExited) {
    fate.has_exited = true;
    fate.code = value;
    fate.signal = signal;
    fate.error = error;
  } else if (kind == GuardianReportKind::kGone) {
    fate.is_gone = true;
  }
}

void GuardianProcess::CloseDoor() {
  door_.Reset();
  candidate_ = Channel();
}

void GuardianProcess::RemoveFile() const {
  const auto file = kept_.find(kGuardianFileKey);
  if (file != kept_.end()) unlink(file->second.bytes.c_str());
}

}  // namespace outlast
