#include "watch/deadline.h"

#include <algorithm>
#include <cstdlib>

namespace outlast {
namespace {

// The nearest-rank quantile of sorted values.
int64_t Quantile(const std::vector<int64_t>& sorted, double quantile) {
  const auto rank = static_cast<size_t>(quantile * static_cast<double>(sorted.size()) + 0.999999);
  return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

int64_t MedianDeviation(const std::vector<int64_t>& values, int64_t median) {
  std::vector<int64_t> deviations;
  deviations.reserve(values.size());
  for (const int64_t value : values) deviations.push_back(std::abs(value - median));
  std::sort(deviations.begin(), deviations.end());
  return Quantile(deviations, 0.5);
}

// Limits of these are never learned: they happen too rarely, and differ too much.
bool IsOnlyConfigured(Phase phase) {
  return phase == Phase::kInit || phase == Phase::kRebuild || phase == Phase::kCompile;
}

}  // namespace

bool IsStepPhase(Phase phase) {
  return phase == Phase::kData || phase == Phase::kForward || phase == Phase::kBackward ||
         phase == Phase::kCommWait || phase == Phase::kOptimizer;
}

bool IsPlainStepPhase(const OpenSection& section) {
  return IsStepPhase(section.phase) && section.name == PhaseName(section.phase);
}

// --- LearnedLimit ---

absl::Duration LearnedLimit::Target(absl::Duration floor, absl::Duration ceiling) const {
  std::vector<int64_t> sorted(nanos_.begin(), nanos_.begin() + std::min<int64_t>(count_, kKept));
  std::sort(sorted.begin(), sorted.end());
  const int factor = count_ < kWindow ? 5 : 3;
  const int64_t median = Quantile(sorted, 0.5);
  const absl::Duration by_tail = factor * absl::Nanoseconds(Quantile(sorted, 0.99));
  const absl::Duration by_spread =
      absl::Nanoseconds(median) + 10 * absl::Nanoseconds(MedianDeviation(sorted, median));
  return std::clamp(std::max(by_tail, by_spread), floor, ceiling);
}

void LearnedLimit::Add(absl::Duration sample, absl::Duration floor, absl::Duration ceiling) {
  const int64_t nanos = std::max<int64_t>(absl::ToInt64Nanoseconds(sample), 0);
  nanos_[static_cast<size_t>(count_ % kKept)] = nanos;
  ++count_;
  const bool is_longest = nanos > longest_;
  if (is_longest) longest_ = nanos;
  if (count_ < kMinSamples) return;
  const bool is_window_end = count_ % kWindow == 0;
  if (!is_longest && !is_window_end && count_ != kMinSamples) return;

  const absl::Duration target = Target(floor, ceiling);
  if (count_ == kMinSamples || target > limit_) {
    limit_ = target;
  } else if (is_window_end) {
    limit_ -= (limit_ - target) / 2;
  }
  if (is_window_end)
    longest_ = *std::max_element(nanos_.begin(), nanos_.begin() + std::min<int64_t>(count_, kKept));
}

std::optional<absl::Duration> LearnedLimit::limit() const {
  if (count_ < kMinSamples) return std::nullopt;
  return limit_;
}

// --- DeadlineBook ---

void DeadlineBook::Observe(int rank, const WorkKey& key, absl::Duration took) {
  if (rank < 0) return;
  std::vector<LearnedLimit>& ranks = learned_[key];
  if (ranks.size() <= static_cast<size_t>(rank))
    ranks.resize(static_cast<size_t>(std::max(rank + 1, world_)));
  ranks[static_cast<size_t>(rank)].Add(took, options_.floor, options_.ceiling);
}

std::optional<absl::Duration> DeadlineBook::Learned(const WorkKey& key) const {
  const auto found = learned_.find(key);
  if (found == learned_.end()) return std::nullopt;
  std::optional<absl::Duration> longest;
  for (const LearnedLimit& rank : found->second) {
    if (const auto limit = rank.limit()) longest = std::max(longest.value_or(*limit), *limit);
  }
  return longest;
}

absl::Duration DeadlineBook::Configured(Phase phase) const {
  const FirstLimits& first = options_.first_limits;
  switch (phase) {
    case Phase::kNone:
      return first.outside;
    case Phase::kInit:
      return first.init + world_ * absl::Milliseconds(10);
    case Phase::kRebuild:
      return first.rebuild + world_ * absl::Milliseconds(10);
    case Phase::kCompile:
      return first.compile;
    case Phase::kCheckpointSnapshot:
    case Phase::kCheckpointWrite:
    case Phase::kRestore:
      return first.checkpoint;
    default:
      return first.step;
  }
}

WorkLimit DeadlineBook::For(const OpenSection* section, uint8_t comm_kind, bool may_learn,
                            const OpenSection* outer) const {
  const Phase phase = section == nullptr ? Phase::kNone : section->phase;
  const WorkLimit configured{Configured(phase), false};
  // Switched off is switched off: nothing learned switches it on.
  if (!may_learn || IsOnlyConfigured(phase) || configured.limit == absl::InfiniteDuration())
    return configured;
  if (section == nullptr) {
    // Outside any section only the wait in an operation is bounded by a step; what else happens
    // there is anybody's guess.
    const auto of_step = comm_kind == 0 ? std::nullopt : Learned(WorkKey::Step());
    return of_step ? WorkLimit{*of_step, true} : configured;
  }
  if (const auto own = Learned({section->id, phase, comm_kind})) return {*own, true};
  // A collective inside a phase of the step is bounded by the step too. Polls see too little of one
  // that takes milliseconds to learn it soon.
  const bool is_wait_in_step =
      phase == Phase::kCommWait && comm_kind != 0 && outer != nullptr && IsPlainStepPhase(*outer);
  if (!IsPlainStepPhase(*section) && !is_wait_in_step) return configured;
  if (const auto of_phase = Learned(WorkKey::PhaseOfStep(phase))) return {*of_phase, true};
  if (const auto of_step = Learned(WorkKey::Step())) return {*of_step, true};
  return configured;
}

}  // namespace outlast
