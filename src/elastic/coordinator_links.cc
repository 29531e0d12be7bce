// Who measures its link with whom, and what becomes of slow ones.
#include <fmt/format.h>

#include <algorithm>

#include "base/plain_number.h"
#include "outlast/base/id.h"
#include "outlast/elastic/coordinator.h"

namespace outlast {

// Ascending.
std::vector<std::string> Coordinator::Measurable() const {
  std::vector<std::string> nodes;
  for (const auto& [node, agent] : agents_) {
    if (agent.stream != 0 && !agent.measure_address.empty() && !agent.leaving && !IsExcluded(node))
      nodes.push_back(node);
  }
  return nodes;
}

bool Coordinator::IsBeingMeasured(const std::string& node, const Agent& agent) const {
  if (now_ >= agent.measured_due || agent.stream == 0) return false;
  if (rates_.FitnessOf(node) != LinkRates::Fitness::kUnknown) return IsMeasuring(node);
  return IsMeasuring(node) || !rates_.IsSettled(node, Measurable());
}

void Coordinator::TryMeasure() {
  const bool going_on =
      phase_ == CoordinatorPhase::kForming || phase_ == CoordinatorPhase::kRunning ||
      phase_ == CoordinatorPhase::kSuspect || phase_ == CoordinatorPhase::kReforming;
  if (!going_on || now_ >= measuring_until_) return;
  while (true) {
    // Those who train are disturbed where there is nobody else.
    std::vector<std::string> newcomers, idle, free;
    for (const std::string& node : Measurable()) {
      const Agent& agent = agents_.at(node);
      if (IsMeasuring(node)) continue;
      free.push_back(node);
      if (!agent.holds_ranks) idle.push_back(node);
      if (IsBeingJudged(node)) newcomers.push_back(node);
    }
    auto pair = rates_.NextPair(newcomers, idle);
    if (!pair) pair = rates_.NextPair(newcomers, free);
    if (!pair) return;
    StartMeasurement(pair->first, pair->second);
  }
}

bool Coordinator::IsMeasuring(const std::string& node) const {
  return std::any_of(measurements_.begin(), measurements_.end(),
                     [&](const Measurement& one) { return one.one == node || one.other == node; });
}

void Coordinator::StartMeasurement(const std::string& one, const std::string& other) {
  measurements_.push_back({++last_measurement_, one, other, now_ + options_.measure});
  control::Measure measure{
      .number = last_measurement_,
      .ticket = Id128::FromName(fmt::format("measurement {} of {} by {}", last_measurement_,
                                            state_.run_id.hex(), state_.incarnation))};
  Send(agents_.at(other), measure);
  measure.address = agents_.at(other).measure_address;
  Send(agents_.at(one), measure);
}

void Coordinator::Hear(Agent& agent, const control::Measured& measured) {
  for (size_t i = 0; i < measurements_.size(); ++i) {
    if (measurements_[i].number == measured.number && measurements_[i].one == agent.node)
      return EndMeasurement(i, measured.megabytes_per_second, measured.detail);
  }
  ++ignored_;
}

void Coordinator::EndMeasurement(size_t index, double megabytes_per_second,
                                 const std::string& detail) {
  const Measurement ended = measurements_[index];
  measurements_.erase(measurements_.begin() + static_cast<std::ptrdiff_t>(index));
  rates_.Note(ended.one, ended.other, megabytes_per_second);
  const double wanted = rates_.Wanted(ended.one, ended.other);
  const bool is_slow = megabytes_per_second < wanted;
  if (is_slow || megabytes_per_second == 0 || phase_ != CoordinatorPhase::kForming) {
    Emit(Announce{
        fmt::format("peer bandwidth: {} and {}: {}{}", ended.one, ended.other, detail,
                    is_slow ? fmt::format("; at least {} MB/s wanted", PlainNumber(wanted)) : "")});
  }
  for (const std::string& node : Measurable()) {
    if (rates_.FitnessOf(node) != LinkRates::Fitness::kUnfit || !IsBeingJudged(node)) continue;
    Exclude(node, fmt::format("preflight: peer bandwidth: {}, at least {} MB/s wanted",
                              rates_.Describe(node), PlainNumber(rates_.LeastWanted(node))));
  }
  // Who was waited for may be taken now.
  MayGrow();
  if (phase_ == CoordinatorPhase::kReforming && stage_ == Stage::kWaiting) StartRound();
}

// Whoever holds ranks was judged before it got them.
bool Coordinator::IsBeingJudged(const std::string& node) const {
  const Agent& agent = agents_.at(node);
  return !agent.holds_ranks && now_ < agent.measured_due;
}

void Coordinator::LookAtMeasurements() {
  for (size_t i = 0; i < measurements_.size();) {
    const Measurement& one = measurements_[i];
    const bool both_are_here = agents_.contains(one.one) && agents_.contains(one.other) &&
                               agents_.at(one.one).stream != 0 && agents_.at(one.other).stream != 0;
    if (both_are_here && now_ < one.due) {
      ++i;
      continue;
    }
    if (both_are_here) {
      EndMeasurement(i, 0, "not measured in time");
      i = 0;
    } else {
      measurements_.erase(measurements_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  bool is_over = false;
  for (auto& [node, agent] : agents_) {
    if (now_ < agent.measured_due || agent.measured_due == -absl::InfiniteDuration()) continue;
    agent.measured_due = -absl::InfiniteDuration();
    is_over = true;
  }
  if (is_over) MayGrow();
  if (is_over && phase_ == CoordinatorPhase::kReforming && stage_ == Stage::kWaiting) StartRound();
}

absl::Duration Coordinator::NearestMeasurement() const {
  absl::Duration nearest = absl::InfiniteDuration();
  for (const Measurement& one : measurements_) nearest = std::min(nearest, one.due);
  for (const auto& [node, agent] : agents_) {
    if (now_ < agent.measured_due && agent.stream != 0)
      nearest = std::min(nearest, agent.measured_due);
  }
  return nearest;
}

}  // namespace outlast
