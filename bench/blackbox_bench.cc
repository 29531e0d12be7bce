// What the black box costs the step path. Targets: a flight record with its CRC 30 ns, a step record 30 ns, the clock
// apart.
#include <benchmark/benchmark.h>

#include <memory>
#include <vector>

#include "outlast/base/clock.h"
#include "outlast/blackbox/buffer.h"
#include "outlast/blackbox/flight_log.h"
#include "outlast/blackbox/progress.h"
#include "outlast/blackbox/segment.h"
#include "outlast/blackbox/step_log.h"

namespace outlast {
namespace {

Segment MakeSegment() { return Segment::Create({.generation = 1, .rank = 3, .world = 8}).value(); }

void BM_Clock(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(MonotonicNanos());
}
BENCHMARK(BM_Clock);

void BM_CreateSegment(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(MakeSegment());
}
BENCHMARK(BM_CreateSegment);

void BM_FlightRecord(benchmark::State& state) {
  Segment segment = MakeSegment();
  FlightLog log = FlightLog::ForThisThread(segment);
  FlightEvent event = {.kind = FlightKind::kEntered, .comm = 1, .signature = 7, .bytes = 4096, .call_site = 12};
  for (auto _ : state) {
    ++event.op_seq;
    ++event.t_ns;
    log.Record(event);
  }
}
BENCHMARK(BM_FlightRecord);

void BM_StepAppend(benchmark::State& state) {
  Segment segment = MakeSegment();
  StepLogWriter log(segment);
  StepRecord record = {.step = 1, .start_ns = 2, .end_ns = 3, .data_ns = 4, .tokens_real = 8192, .generation = 1};
  for (auto _ : state) {
    ++record.step;
    benchmark::DoNotOptimize(log.Append(record));
  }
}
BENCHMARK(BM_StepAppend);

void BM_SectionOpenAndClose(benchmark::State& state) {
  Segment segment = MakeSegment();
  ProgressWriter progress(segment);
  const uint16_t name = progress.Intern("forward");
  uint64_t now = 0;
  for (auto _ : state) {
    progress.OpenSection(name, Phase::kForward, 0, ++now);
    progress.CloseSection();
  }
}
BENCHMARK(BM_SectionOpenAndClose);

void BM_EnterOperation(benchmark::State& state) {
  Segment segment = MakeSegment();
  const std::vector<uint32_t> members = {0, 1, 2, 3};
  CommCell comm = CommCell::Open(segment, {.id_hash = 5, .members = members, .kind = CommKind::kWorld}).value();
  OperationSignature operation = {.function = 4, .datatype = 7, .known = 31, .count = 1};
  uint64_t now = 0;
  for (auto _ : state) {
    ++operation.count;
    benchmark::DoNotOptimize(comm.Enter(operation, ++now));
  }
}
BENCHMARK(BM_EnterOperation);

void BM_ReadProgress(benchmark::State& state) {
  Segment segment = MakeSegment();
  ProgressWriter progress(segment);
  progress.OpenSection(progress.Intern("step"), Phase::kUser, 0, 1);
  progress.OpenSection(progress.Intern("forward"), Phase::kForward, 0, 2);
  const SegmentView view = SegmentView::Open(segment.fd()).value();
  for (auto _ : state) benchmark::DoNotOptimize(ReadProgress(view, 100));
}
BENCHMARK(BM_ReadProgress);

void BM_CreateBuffer(benchmark::State& state) {
  const auto bytes = static_cast<uint64_t>(state.range(0)) << 20;
  for (auto _ : state) benchmark::DoNotOptimize(Buffer::Create({.image_bytes = bytes}, {}).value());
  state.SetBytesProcessed(static_cast<int64_t>(bytes) * static_cast<int64_t>(state.iterations()));
}
BENCHMARK(BM_CreateBuffer)->Arg(64)->ArgName("MiB")->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace outlast
