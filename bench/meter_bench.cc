// What metering costs the step path. Goals: a phase mark 1 us, a step 5 us; the clock, which both
// read, is the limit.
#include <benchmark/benchmark.h>

#include <memory>

#include "outlast/base/clock.h"
#include "outlast/meter/meter.h"

namespace outlast {
namespace {

struct Metered {
  Segment segment = Segment::Create({.generation = 1}).value();
  ProgressWriter progress{segment};
  std::unique_ptr<Meter> meter =
      Meter::Start(segment, progress, {.flops = FlopCount{.model = 10}}).value();
};

void BM_MeterClock(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(MonotonicNanos());
}
BENCHMARK(BM_MeterClock);

void BM_MeterMark(benchmark::State& state) {
  Metered metered;
  auto scope = metered.meter->Step(1);
  bool forward = false;
  for (auto _ : state) {
    forward = !forward;
    scope.Enter(forward ? Phase::kForward : Phase::kBackward);
  }
}
BENCHMARK(BM_MeterMark);

// A step as a trainer writes it: four phases, counts, a loss.
void BM_MeterStep(benchmark::State& state) {
  Metered metered;
  int64_t step = 0;
  for (auto _ : state) {
    auto scope = metered.meter->Step(step++);
    scope.Enter(Phase::kData);
    scope.Enter(Phase::kForward);
    scope.Enter(Phase::kBackward);
    scope.Enter(Phase::kOptimizer);
    scope.Count({.real = 8100, .padded = 8192, .loss = 8000, .samples = 4});
    scope.SetLoss(2.5F, 0.5F);
  }
}
BENCHMARK(BM_MeterStep);

}  // namespace
}  // namespace outlast
