#include "outlast/elastic/policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/split_mix.h"
#include "outlast/elastic/exit_code.h"

namespace outlast {
namespace {

bool Contains(const std::vector<int>& codes, int code) {
  return std::find(codes.begin(), codes.end(), code) != codes.end();
}

constexpr int kResourceRetries = 1;

Judgement Finish(JobOutcome outcome, std::string reason, int worker_code = 1) {
  return {.exit_code = ExitCodeOf(outcome, 80, worker_code), .reason = std::move(reason)};
}

// Exit codes speak of crashes only: a hang has none, and an early exit always has 0.
bool MayRetryCode(const FaultRecord& fault, const JobOptions& options, int code) {
  if (fault.fault_class != FaultClass::kCrash) return true;
  if (Contains(options.no_retry_codes, code)) return false;
  return options.retry_codes.empty() || Contains(options.retry_codes, code);
}

}  // namespace

absl::Duration BackOff(int restarts_before, uint64_t seed) {
  if (restarts_before == 0) return absl::ZeroDuration();
  const int64_t most = std::min(60, 1 << std::min(restarts_before - 1, 6));
  // Of each attempt another part.
  const uint64_t part = Mix(seed + static_cast<uint64_t>(restarts_before) * kGoldenGamma);
  return absl::Milliseconds(500 * most + static_cast<int64_t>(part >> 32) % (500 * most + 1));
}

uint64_t BackOffSeed(const Id128& run_id) {
  uint64_t seed = 0;
  std::memcpy(&seed, run_id.bytes.data(), sizeof seed);
  return seed;
}

bool CountsAsCrash(FaultClass fault_class) {
  return fault_class == FaultClass::kCrash || fault_class == FaultClass::kHang ||
         fault_class == FaultClass::kEarlyExit;
}

void FaultHistory::Add(const FaultRecord& fault) {
  ++(fault.as_crash || CountsAsCrash(fault.fault_class) ? crashes : others);
  if (fault.fault_class == FaultClass::kResource) ++resources;
  seen_faults.push_back(
      {fault.fault_class, fault.root, fault.step_reached, fault.node, fault.as_crash});
  for (auto& [root, count] : roots) {
    if (root == fault.root) {
      ++count;
      return;
    }
  }
  roots.emplace_back(fault.root, 1);
}

void FaultHistory::TakeBackNewest() {
  if (seen_faults.empty()) return;  // refunded meanwhile
  const SeenFault& newest = seen_faults.back();
  --(newest.as_crash || CountsAsCrash(newest.fault_class) ? crashes : others);
  if (newest.fault_class == FaultClass::kResource) --resources;
  for (auto& [root, count] : roots) count -= root == newest.root ? 1 : 0;
  seen_faults.pop_back();
}

void FaultHistory::AddRestart(absl::Duration now) {
  ++restarts;
  std::erase_if(restart_times, [now](absl::Duration at) { return now - at >= absl::Hours(1); });
  restart_times.push_back(now);
}

void FaultHistory::Refund() {
  crashes = others = restarts = resources = 0;
  roots.clear();
  seen_faults.clear();
}

int FaultHistory::seen(uint64_t root) const {
  for (const auto& [known, count] : roots) {
    if (known == root) return count;
  }
  return 0;
}

int FaultHistory::restarts_in_last_hour(absl::Duration now) const {
  return static_cast<int>(
      std::count_if(restart_times.begin(), restart_times.end(),
                    [now](absl::Duration at) { return now - at < absl::Hours(1); }));
}

Judgement JudgeFault(const FaultHistory& history, const FaultRecord& fault,
                     const JobOptions& options, absl::Duration now, uint64_t seed) {
  const int worker_code = WorkerExitCode(fault.fault_class, fault.end);
  const int raw_code = fault.end.signal != 0 ? 128 + fault.end.signal : fault.end.code;
  if (!MayRetryCode(fault, options, raw_code)) {
    return Finish(JobOutcome::kWorkerFailed,
                  fmt::format("exit code {} is not to be tried again", raw_code), worker_code);
  }
  if (options.max_restarts == 0) {
    return Finish(JobOutcome::kWorkerFailed, "no restart was allowed (--max-restarts 0)",
                  worker_code);
  }
  if (history.crashes > options.max_restarts) {
    return Finish(
        JobOutcome::kRestartsUsedUp,
        fmt::format("{} of {} restarts since the last progress are used up (--max-restarts)",
                    options.max_restarts, options.max_restarts));
  }
  if (history.others > options.other_class_limit) {
    return Finish(JobOutcome::kRestartsUsedUp,
                  fmt::format("{} faults of other classes since the last progress, {} are allowed",
                              history.others, options.other_class_limit));
  }
  if (history.restarts_in_last_hour(now) >= options.restarts_per_hour_limit) {
    return Finish(JobOutcome::kRestartsUsedUp, fmt::format("{} restarts in an hour are used up",
                                                           options.restarts_per_hour_limit));
  }
  if (history.seen(fault.root) >= options.same_root_limit) {
    return Finish(JobOutcome::kNeedsHuman,
                  fmt::format("the same root {} times without progress", history.seen(fault.root)));
  }
  if (fault.fault_class == FaultClass::kResource && history.resources > kResourceRetries) {
    return Finish(JobOutcome::kNeedsHuman,
                  fmt::format("out of memory, disk or the like {} times without progress",
                              history.resources));
  }
  return {.restart = true, .delay = BackOff(history.restarts, seed)};
}

PlaceJudgement JudgePlace(const FaultHistory& history) {
  if (history.seen_faults.empty()) return PlaceJudgement::kStay;
  const SeenFault& newest = history.seen_faults.back();
  if (!CountsAsCrash(newest.fault_class)) return PlaceJudgement::kStay;
  PlaceJudgement judgement = PlaceJudgement::kStay;
  for (size_t i = 0; i + 1 < history.seen_faults.size(); ++i) {
    const SeenFault& former = history.seen_faults[i];
    const bool same = former.root == newest.root && former.step == newest.step;
    if (same && former.node != newest.node) return PlaceJudgement::kDeterministic;
    const bool hangs = former.fault_class == FaultClass::kHang &&
                       newest.fault_class == FaultClass::kHang && former.node == newest.node;
    if (same || hangs) judgement = PlaceJudgement::kSwapNode;
  }
  return judgement;
}

}  // namespace outlast
