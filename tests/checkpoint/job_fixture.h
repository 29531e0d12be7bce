// A small data-parallel job in one process, over the keeper that the agent uses.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/root.h"
#include "checkpoint/save_service.h"
#include "outlast/base/status.h"
#include "outlast/checkpoint/checkpointer.h"
#include "outlast/run/collectives.h"
#include "outlast/run/run.h"
#include "outlast/testing/local_world.h"

namespace outlast {

using testing::LocalWorld;
using testing::LocalWorldOptions;
using testing::LocalWorldResult;

// A data-parallel trainer whose state is a pure function of the step: weights[i] = sum over steps s
// < step of (s + i).
class Toy {
 public:
  explicit Toy(size_t size = 50'000) : weights_(size, 0) {}

  StateView State() {
    StateView state;
    const Shape shape{static_cast<int64_t>(weights_.size())};
    state.regions.push_back(
        {"weights", DType::kF32, shape, {}, shape, std::as_writable_bytes(std::span(weights_))});
    const Shape scalar;
    state.regions.push_back({"step",
                             DType::kI64,
                             scalar,
                             {},
                             scalar,
                             std::as_writable_bytes(std::span(&step_, 1)),
                             RegionKind::kEager});
    state.extras["cursor"] = "{\"step\":" + std::to_string(step_) + "}";
    return state;
  }
  void Update(int64_t step) {
    for (size_t i = 0; i < weights_.size(); ++i)
      weights_[i] += static_cast<float>((step + static_cast<int64_t>(i)) % 7);
    step_ = step + 1;
  }
  bool IsStateOf(int64_t step) const {
    Toy fresh(weights_.size());
    for (int64_t s = 0; s < step; ++s) fresh.Update(s);
    return fresh.weights_ == weights_ && step_ == step;
  }

 private:
  std::vector<float> weights_;
  int64_t step_ = 0;
};

struct JobSpec {
  int ranks = 2;
  int64_t steps = 30;
  size_t floats = 50'000;  // of the state
  CheckpointerOptions checkpoints;
  SaveServiceOptions service;
  // Called by each rank before the update of each step.
  std::function<void(LocalWorld&, Run&, int64_t step)> at_step = [](LocalWorld&, Run&, int64_t) {};
  // A step of a rank that changes nothing, and announces nothing: what is still being copied of the
  // one before is given up.
  std::function<bool(Run&, int64_t step)> is_idle = [](Run&, int64_t) { return false; };
  // Called by each rank before it restores in a generation.
  std::function<void(LocalWorld&, Run&)> at_restore = [](LocalWorld&, Run&) {};
  // All ranks restore once more when they first come to that step of a generation.
  int64_t restore_at = -1;
  JobOptions job;
};

struct Seen {
  LocalWorldResult result;
  std::atomic<int> wrong_states{0};
  std::atomic<int> finished{0};
  std::vector<std::string> restored_from;  // by restore of rank 0
  std::vector<int64_t> restored_steps;
  std::atomic<int64_t> restore_read{0};  // bytes, by all ranks
  std::vector<std::string> notes;
  std::vector<std::string> failures;
  std::vector<int64_t> durable;
  std::function<void(int64_t step)> on_durable = [](int64_t) {};
  std::function<void()> on_failed = [] {};
  std::atomic<int64_t> skipped{0};
  std::atomic<int64_t> reached{0};
  std::atomic<int64_t> sealed{0};  // by one rank
};

inline void RunJob(JobSpec spec, Seen& seen) {
  std::unique_ptr<SaveService> service;
  LocalWorldOptions options;
  options.job = spec.job;
  options.prepare = [&](Keeper& keeper) {
    spec.service.observer.on_note = [&](const std::string& line) { seen.notes.push_back(line); };
    spec.service.observer.on_failed = [&](int64_t, const absl::Status& error) {
      seen.failures.emplace_back(MessageOf(error));
      seen.on_failed();
    };
    spec.service.observer.on_durable = [&](int64_t step, const PersistResult&) {
      seen.durable.push_back(step);
      seen.on_durable(step);
    };
    service = std::make_unique<SaveService>(keeper, spec.service);
    keeper.Attach(service.get());
  };
  options.finish = [&](Keeper& keeper) {
    keeper.Detach(service.get());
    service.reset();
  };
  LocalWorld world(spec.ranks, options);
  seen.result = world.Run([&](Run& run) -> absl::Status {
    Toy toy(spec.floats);
    OUTLAST_ASSIGN_OR_RETURN(const auto checkpoints, Checkpointer::Open(run, spec.checkpoints));
    const absl::Status status = run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(auto group, Group::Make(generation, run, "grads", 4096));
      spec.at_restore(world, run);
      OUTLAST_ASSIGN_OR_RETURN(int64_t step, checkpoints->Restore(toy.State()));
      seen.restore_read += checkpoints->stats().restore_read_bytes;
      if (step == 0) toy = Toy(spec.floats);
      if (!toy.IsStateOf(step)) ++seen.wrong_states;
      if (run.rank() == 0) {
        seen.restored_from.push_back(checkpoints->stats().restored_from);
        seen.restored_steps.push_back(step);
      }
      if (step > 0 &&
          checkpoints->restored_extras().at("cursor") != "{\"step\":" + std::to_string(step) + "}")
        ++seen.wrong_states;
      bool restored_again = false;
      for (; step < spec.steps; ++step) {
        OUTLAST_RETURN_IF_ERROR(generation.Check());
        spec.at_step(world, run, step);
        if (step == spec.restore_at && !std::exchange(restored_again, true)) {
          OUTLAST_ASSIGN_OR_RETURN(step, checkpoints->Restore(toy.State()));
          if (!toy.IsStateOf(step)) ++seen.wrong_states;
          if (run.rank() == 0) seen.restored_steps.push_back(step);
        }
        OUTLAST_RETURN_IF_ERROR(group.Barrier());
        if (!spec.is_idle(run, step)) {
          OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
          toy.Update(step);
        }
        OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(step + 1, toy.State()));
      }
      OUTLAST_RETURN_IF_ERROR(checkpoints->Finish(spec.steps, toy.State()));
      ++seen.finished;
      return absl::OkStatus();
    });
    seen.skipped += checkpoints->stats().skipped;
    seen.sealed = std::max<int64_t>(seen.sealed, checkpoints->stats().sealed);
    return status;
  });
}

inline std::vector<int64_t> CommittedSteps(const std::string& root) {
  RootOptions options;
  options.access = Access::kRead;
  const Listing listing = Root::Open(root, options).value()->List().value();
  std::vector<int64_t> steps;
  for (const size_t index : ResolveChain(listing.checkpoints).members)
    steps.push_back(listing.checkpoints[index].step);
  return steps;
}

}  // namespace outlast
