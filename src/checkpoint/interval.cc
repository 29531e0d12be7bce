#include "outlast/checkpoint/interval.h"

#include <algorithm>
#include <cmath>

namespace outlast {
namespace {

constexpr double kFleetHours = 8000;  // of rank time between interruptions
constexpr int64_t kFewestSteps = 20;  // in a window, for a rate
constexpr double kLeastCost = 0.01;   // of a write
constexpr double kDeadBand = 0.2;

double Seconds(absl::Duration duration) { return absl::ToDoubleSeconds(duration); }

// 1 / goodput, less the factor that does not depend on the interval; convex in t.
double Waste(double m, double c, double t) { return std::expm1((t + c) / m) / t; }

}  // namespace

absl::Duration YoungInterval(const IntervalModel& model) {
  return absl::Seconds(
      std::sqrt(2 * Seconds(model.cost) * Seconds(model.mean_between_interruptions)));
}

absl::Duration DalyInterval(const IntervalModel& model) {
  const double m = Seconds(model.mean_between_interruptions);
  const double c = Seconds(model.cost);
  if (c >= 2 * m) return model.mean_between_interruptions;
  const double ratio = c / (2 * m);
  return absl::Seconds(std::sqrt(2 * c * m) * (1 + std::sqrt(ratio) / 3 + ratio / 9) - c);
}

double ExpectedGoodput(const IntervalModel& model, absl::Duration interval) {
  const double m = Seconds(model.mean_between_interruptions);
  const double t = Seconds(interval);
  const double again = Seconds(model.restart + model.write);
  if (t <= 0 || m <= 0) return 0;
  return 1 / (m * std::exp(again / m) * Waste(m, Seconds(model.cost), t));
}

absl::Duration OptimalInterval(const IntervalModel& model) {
  const double m = Seconds(model.mean_between_interruptions);
  const double c = Seconds(model.cost);
  const double golden = (std::sqrt(5.0) - 1) / 2;
  // The optimum lies below M for every C, and Young's is within a factor of two of it for C < M.
  double low = 0, high = std::max(m, 2 * Seconds(YoungInterval(model)));
  for (int i = 0; i < 200 && high - low > 1e-9 * high; ++i) {
    const double a = high - golden * (high - low), b = low + golden * (high - low);
    (Waste(m, c, a) < Waste(m, c, b) ? high : low) = Waste(m, c, a) < Waste(m, c, b) ? b : a;
  }
  return std::max(absl::Seconds((low + high) / 2), model.write);
}

absl::Duration MeanBetweenInterruptions(int world, absl::Duration run_time, int64_t interruptions) {
  return (absl::Hours(kFleetHours) / std::max(1, world) + run_time) / (1 + interruptions);
}

absl::Duration IntervalOfLoss(absl::Duration loss, int world) {
  return 2 * loss / std::max(1, world);
}

void SaveCostMeter::SaveBegan(absl::Duration now, int64_t step) {
  began_ = Mark{now, step};
  if (!ended_ || step - ended_->step < kFewestSteps) return;
  idle_rate_ = static_cast<double>(step - ended_->step) / Seconds(now - ended_->at);
}

void SaveCostMeter::SaveEnded(absl::Duration now, int64_t step) {
  ended_ = Mark{now, step};
  if (!began_) return;
  write_ = now - began_->at;
  const int64_t steps = step - began_->step;
  if (idle_rate_ && steps >= kFewestSteps) {
    const double share = 1 - static_cast<double>(steps) / Seconds(write_) / *idle_rate_;
    cost_ = write_ * std::clamp(share, kLeastCost, 1.0);
  }
  began_.reset();
}

void SaveCostMeter::Forget() {
  began_.reset();
  ended_.reset();
}

absl::Duration IntervalTuner::Tune(const IntervalModel& model) {
  const absl::Duration optimum =
      std::max(std::clamp(OptimalInterval(model), bounds_.shortest, bounds_.longest), model.write);
  if (!interval_ || absl::AbsDuration(optimum - *interval_) > *interval_ * kDeadBand)
    interval_ = optimum;
  return *interval_;
}

}  // namespace outlast
