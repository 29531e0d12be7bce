// What metering and the black box cost the step path.
#include <memory>

#include "figures/figures.h"
#include "outlast/base/clock.h"
#include "outlast/blackbox/flight_log.h"
#include "outlast/blackbox/progress.h"
#include "outlast/blackbox/segment.h"
#include "outlast/meter/meter.h"

namespace outlast::bench {
namespace {

// Nanoseconds a call, one sample a batch.
template <typename Call>
std::vector<double> TimeBatches(const Settings& settings, Call call) {
  const int batches = settings.smoke ? 3 : 31, calls = settings.smoke ? 1'000 : 300'000;
  for (int i = 0; i < calls; ++i) call();
  std::vector<double> samples;
  for (int batch = 0; batch < batches; ++batch) {
    const int64_t started = MonotonicNanos();
    for (int i = 0; i < calls; ++i) call();
    samples.push_back(static_cast<double>(MonotonicNanos() - started) / calls);
  }
  return samples;
}

Reference ClockRead(const Settings& settings) {
  int64_t sum = 0;
  const std::vector<double> samples = TimeBatches(settings, [&] { sum += MonotonicNanos(); });
  volatile int64_t kept = sum;
  (void)kept;
  return {"one read of the clock", Quantile(samples, 0.5)};
}

}  // namespace

void MeasureMeter(const Settings& settings, Report& report) {
  Segment segment = Segment::Create({.generation = 1}).value();
  ProgressWriter progress{segment};
  const std::unique_ptr<Meter> meter =
      Meter::Start(segment, progress, {.flops = FlopCount{.model = 10}}).value();
  auto scope = meter->Step(1);
  bool forward = false;
  Figure figure{.name = "meter.mark", .unit = "ns", .goal = 1'000};
  figure.samples = TimeBatches(settings, [&] {
    forward = !forward;
    scope.Enter(forward ? Phase::kForward : Phase::kBackward);
  });
  figure.limit = ClockRead(settings);
  report.Add(figure);
}

void MeasureBlackBox(const Settings& settings, Report& report) {
  Segment segment = Segment::Create({.generation = 1, .rank = 3, .world = 8}).value();
  FlightLog log = FlightLog::ForThisThread(segment);
  FlightEvent event = {
      .kind = FlightKind::kEntered, .comm = 1, .signature = 7, .bytes = 4096, .call_site = 12};
  Figure figure{.name = "flight.record", .unit = "ns", .goal = 30};
  figure.samples = TimeBatches(settings, [&] {
    ++event.op_seq;
    ++event.t_ns;
    log.Record(event);
  });
  figure.limit = ClockRead(settings);
  report.Add(figure);
}

}  // namespace outlast::bench
