// A data-parallel trainer with a state of a given size, and no arithmetic but the optimizer's. One
// step is an all-reduce of 64 KiB and an update of the whole state; a snapshot of all of it is
// sealed each step, so that without a pause nothing hides the copy. A pause stands for forward and
// backward on a device; a generation's first step has none: it would be timed.
//   outlast_restart_trainer PAGE STATE_BYTES CHECKPOINTS STEPS_A_SAVE STEP_MILLISECONDS
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "figures/restart_page.h"
#include "outlast/base/clock.h"
#include "outlast/base/memory.h"
#include "outlast/outlast.h"
#include "outlast/run/template.h"

namespace outlast::bench {
namespace {

constexpr size_t kGradients = 16 << 10;
constexpr std::string_view kNames[] = {"weights", "momentum", "average", "master"};

struct Options {
  const char* page;
  size_t bytes;
  std::string checkpoints;
  int64_t steps_a_save;
  int64_t step_ms;
};

float* FloatsOf(const StateView& state, size_t region) {
  return reinterpret_cast<float*>(state.regions[region].bytes.data());
}

StateView StateOf(const Mapping& memory) {
  StateView state;
  const size_t part = memory.size() / std::size(kNames) / sizeof(float) * sizeof(float);
  const Shape shape{static_cast<int64_t>(part / sizeof(float))};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    state.regions.push_back(
        {kNames[i], DType::kF32, shape, {}, shape, memory.bytes().subspan(i * part, part)});
  }
  return state;
}

// One step of SGD with momentum and a moving average of the weights: every float of the state is
// read and written. The gradients repeat over it.
void Update(const StateView& state, std::span<const float> gradients) {
  constexpr float kMomentum = 0.9f, kRate = 1e-3f, kAverage = 0.999f;
  const size_t count = state.regions[0].bytes.size() / sizeof(float);
  for (size_t begin = 0; begin < count; begin += gradients.size()) {
    float* __restrict weights = FloatsOf(state, 0) + begin;
    float* __restrict momentum = FloatsOf(state, 1) + begin;
    float* __restrict average = FloatsOf(state, 2) + begin;
    float* __restrict master = FloatsOf(state, 3) + begin;
    const size_t length = std::min(gradients.size(), count - begin);
    for (size_t i = 0; i < length; ++i) {
      momentum[i] = kMomentum * momentum[i] + gradients[i];
      master[i] -= kRate * momentum[i];
      weights[i] = master[i];
      average[i] = kAverage * average[i] + (1 - kAverage) * weights[i];
    }
  }
}

absl::Status Train(const Options& options) {
  OUTLAST_ASSIGN_OR_RETURN(const auto run, Run::Join());
  if (run->world() > kRestartRanks)
    return MakeStatus(absl::StatusCode::kInvalidArgument, "at most 4 ranks");
  const UniqueFd file(open(options.page, O_RDWR | O_CLOEXEC));
  OUTLAST_ASSIGN_OR_RETURN(const Mapping shared, Mapping::Shared(file.get(), sizeof(RestartPage)));
  auto& page = *reinterpret_cast<RestartPage*>(shared.data());
  RestartCell& cell = page.cells[run->rank()];
  cell.pid.store(getpid());
  OUTLAST_ASSIGN_OR_RETURN(const Mapping memory, run->SlotMemory("state", options.bytes));
  const StateView state = StateOf(memory);
  OUTLAST_ASSIGN_OR_RETURN(const auto checkpoints,
                           Checkpointer::Open(*run, {.uri = options.checkpoints,
                                                     .every = Every::Steps(options.steps_a_save),
                                                     .snapshot_every = Every::Steps(1),
                                                     .keep_last = 2,
                                                     .restore_ahead = true}));
  std::vector<float> gradients(kGradients);
  return run->ForEachGeneration([&](Generation& generation) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(
        auto group, Group::Make(generation, *run, "gradients", kGradients * sizeof(float)));
    OUTLAST_ASSIGN_OR_RETURN(int64_t step, checkpoints->Restore(state));
    if (step == 0) std::ranges::fill(memory.bytes(), std::byte{0});
    cell.step_before.store(cell.step.load());
    cell.restored.store(step);
    for (bool is_first = true;; is_first = false) {
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      if (kill(page.driver, 0) != 0) return absl::CancelledError("nobody measures any more");
      if (!is_first) Clock::Real().SleepFor(absl::Milliseconds(options.step_ms));
      gradients.assign(kGradients, static_cast<float>(generation.rank()));
      OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(gradients));
      OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
      Update(state, gradients);
      OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(++step, state));
      cell.step.store(step);
      cell.durable.store(checkpoints->stats().durable_step);
      if (!is_first) continue;
      cell.first_step_ns.store(MonotonicNanos());
      cell.generation.store(generation.number());
    }
  });
}

}  // namespace
}  // namespace outlast::bench

int main(int argc, char** argv) {
  outlast::Template::ServeIfAsked(argc, argv);
  if (argc == 1) return 0;  // what starting a process of this program costs
  if (argc != 6) return 2;
  const absl::Status status =
      outlast::bench::Train({argv[1], std::strtoull(argv[2], nullptr, 10), argv[3],
                             std::atoll(argv[4]), std::atoll(argv[5])});
  if (!status.ok()) std::fprintf(stderr, "restart trainer: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
