// A small job of several nodes in one process: real agents' parts, peers over loopback TCP, and one
// folder that all see.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/replica_store.h"
#include "outlast/base/mutex.h"
#include "outlast/testing/time_factor.h"
#include "testing/local_cluster.h"
#include "tests/checkpoint/job_fixture.h"

namespace outlast {

using testing::LocalCluster;
using testing::LocalClusterOptions;
using testing::LocalNodeResult;
using testing::TimeFactor;

inline const auto kEndsWithZero = ::testing::Each(::testing::Field(&LocalNodeResult::exit_code, 0));

struct ClusterSpec {
  int nodes = 2, slots = 2;
  int64_t steps = 30;
  int min_world = 0;  // 0: all
  int world = 0;      // 0: all slots
  // Goes past a step that this divides only when it is durable, or its generation has ended; 0: as
  // fast as it can.
  int64_t waits_at = 0;
  CheckpointerOptions checkpoints;
  std::map<int, std::string> other_uri;  // by node: it opens this root
  absl::Duration claim_patience = absl::Seconds(10);
  absl::Duration auto_interval = absl::Seconds(5);
  absl::Duration last_patience = absl::Seconds(10);
  PeerTierOptions peers;
  // By node; null: the embedded stores.
  std::function<std::shared_ptr<const Plugins>(int node)> plugins;
  size_t floats = 20'000;  // of the state that all ranks hold
  int64_t sharded = 4000;  // floats of the one that they share out
  // Of every agent; asked by the lead.
  std::function<void(LocalCluster&, int64_t step)> at_hook;
  // Called by each rank before the update of each step.
  std::function<void(LocalCluster&, Generation&, int node, int64_t step)> at_step =
      [](LocalCluster&, Generation&, int, int64_t) {};
  // Called on the loop, of the node that says it.
  std::function<void(LocalCluster&, const std::string& line)> on_note = [](LocalCluster&,
                                                                           const std::string&) {};
  std::function<void(LocalCluster&, int node, int64_t step)> on_durable = [](LocalCluster&, int,
                                                                             int64_t) {};
};

// What the ranks and the agents saw.
struct Saw {
  std::vector<LocalNodeResult> results;
  std::atomic<int> wrong_states{0}, finished{0};
  std::atomic<int> finishing{0}, failed{0};  // ranks at their end; saves, by node
  std::atomic<int64_t> newest_durable{0};
  std::atomic<bool> is_ended{false};
  std::function<void()> persist;  // has all agents persist what is common; returns at once
  // Has the agents of these nodes persist what memory holds after the trainers' end.
  std::function<void(const std::vector<int>& nodes)> persist_last;
  std::function<int64_t(int node)> copied;  // SaveService::copied_step
  std::function<void(int node)> flip;       // one bit of each copy that the node has, once
  std::function<int64_t(int node)> common;  // what the node knows all ranks to have in memory
  Mutex mutex;
  struct Restored {
    uint64_t generation = 0;
    int rank = 0;
    int64_t step = 0;
    std::string from;
    bool operator==(const Restored&) const = default;
  };
  std::map<int, absl::Status> last ABSL_GUARDED_BY(mutex);  // by node: how persist_last ended
  std::vector<Restored> restored ABSL_GUARDED_BY(mutex);
  std::map<int, std::vector<int64_t>> durable;       // by node; the loop's thread
  std::map<int, std::vector<std::string>> notes;     // the loop's thread
  std::map<int, std::vector<std::string>> failures;  // the loop's thread

  std::vector<Restored> OfGeneration(uint64_t generation) {
    MutexLock lock(mutex);
    std::vector<Restored> of;
    for (const Restored& one : restored) {
      if (one.generation == generation) of.push_back(one);
    }
    std::ranges::sort(of, {}, &Restored::rank);
    return of;
  }
};

inline LocalClusterOptions Quick(int nodes, int slots) {
  LocalClusterOptions options{.nodes = nodes, .slots = slots};
  options.elastic.rejoin_grace = absl::Milliseconds(200) * TimeFactor();
  options.elastic.last_call = absl::Milliseconds(100) * TimeFactor();
  return options;
}

// A rank that was killed stays where it was.
inline void WaitForEnd(const Generation& generation) {
  while (generation.Check().ok()) usleep(500);
}

// A trainer whose replicated state lies on every rank, and one box of a sharded tensor.
class RankState {
 public:
  RankState(int rank, int world, size_t floats, int64_t sharded)
      : toy_(floats), shard_(static_cast<size_t>(sharded / world), 0) {
    offset_.set(0, rank * (sharded / world));
    global_.set(0, sharded);
  }
  StateView View() {
    StateView view = toy_.State();
    Shape extent = Shape::Zeros(1);
    extent.set(0, static_cast<int64_t>(shard_.size()));
    view.regions.push_back({"shard", DType::kF32, global_, offset_, extent,
                            std::as_writable_bytes(std::span(shard_))});
    return view;
  }
  void Update(int64_t step) {
    toy_.Update(step);
    for (size_t i = 0; i < shard_.size(); ++i)
      shard_[i] = static_cast<float>(step + 1 + offset_[0] + static_cast<int64_t>(i));
  }
  bool IsOf(int64_t step) const {
    for (size_t i = 0; i < shard_.size() && step > 0; ++i) {
      if (shard_[i] != static_cast<float>(step + offset_[0] + static_cast<int64_t>(i)))
        return false;
    }
    return toy_.IsStateOf(step);
  }

 private:
  Toy toy_;
  Shape offset_ = Shape::Zeros(1), global_ = Shape::Zeros(1);
  std::vector<float> shard_;
};

class CallHook final : public CommitHook {
 public:
  explicit CallHook(std::function<void(int64_t step)> call) : call_(std::move(call)) {}
  std::string_view name() const override { return "call"; }
  absl::Duration deadline() const override { return absl::Minutes(1); }
  HookVerdict Check(const HookView& view, const std::function<bool()>&) override {
    call_(view.step);
    return {};
  }

 private:
  const std::function<void(int64_t step)> call_;
};

inline void RunCluster(const ClusterSpec& spec, Saw& saw) {
  std::map<int, std::unique_ptr<SaveService>> services;
  LocalCluster* self = nullptr;
  LocalClusterOptions options = Quick(spec.nodes, spec.slots);
  options.timeout = absl::Seconds(20) * TimeFactor();
  options.elastic.membership.min_world = spec.min_world;
  options.elastic.membership.max_world = spec.world;
  options.prepare = [&](Keeper& keeper, int node) {
    SaveServiceOptions service;
    service.job_name = "job";
    service.shortest_auto = service.longest_auto = spec.auto_interval;
    service.claim_patience = spec.claim_patience;
    service.last_patience = spec.last_patience;
    service.peers = spec.peers;
    if (spec.plugins) service.plugins = spec.plugins(node);
    service.committer = "n" + std::to_string(node);
    service.observer.on_durable = [&, node](int64_t step, const PersistResult&) {
      saw.durable[node].push_back(step);
      saw.newest_durable = std::max<int64_t>(saw.newest_durable, step);
      spec.on_durable(*self, node, step);
    };
    service.observer.on_failed = [&, node](int64_t, const absl::Status& error) {
      saw.failures[node].emplace_back(MessageOf(error));
      ++saw.failed;
    };
    service.observer.on_note = [&, node](const std::string& line) {
      saw.notes[node].push_back(line);
      spec.on_note(*self, line);
    };
    if (spec.at_hook)
      service.own_hooks = {
          std::make_shared<CallHook>([&](int64_t step) { spec.at_hook(*self, step); })};
    services[node] = std::make_unique<SaveService>(keeper, std::move(service));
    keeper.Attach(services[node].get());
  };
  options.finish = [&](Keeper& keeper, int node) {
    keeper.Detach(services[node].get());
    services[node].reset();
  };
  LocalCluster cluster(options);
  self = &cluster;
  saw.persist = [&] {
    for (int node = 0; node < spec.nodes; ++node) {
      cluster.OnKeeper(node, [&](Keeper*) { services[node]->OnPersistCommon("a test"); });
    }
  };
  saw.persist_last = [&](const std::vector<int>& nodes) {
    for (const int node : nodes) {
      cluster.OnKeeper(node, [&](Keeper*) {
        services[node]->PersistLast([&saw, node](const absl::Status& status) {
          MutexLock lock(saw.mutex);
          saw.last[node] = status;
        });
      });
    }
  };
  saw.common = [&](int node) {
    int64_t step = kNoStep;
    cluster.OnKeeper(node, [&](Keeper* keeper) {
      if (keeper != nullptr) step = services[node]->common_step();
    });
    return step;
  };
  saw.copied = [&](int node) {
    int64_t step = kNoStep;
    cluster.OnKeeper(node, [&](Keeper* keeper) {
      if (keeper != nullptr) step = services[node]->copied_step();
    });
    return step;
  };
  std::set<ReplicaName> flipped;
  saw.flip = [&](int node) {
    cluster.OnKeeper(node, [&](Keeper* keeper) {
      if (keeper == nullptr) return;
      ReplicaStore& store = *services[node]->copies();
      for (const ReplicaName& name : store.Names()) {
        const auto copy = store.Find(name);
        if (copy && flipped.insert(name).second) copy->chunk(0)[100] ^= std::byte{16};
      }
    });
  };
  saw.results = cluster.Run([&](outlast::Run& run, int node) -> absl::Status {
    CheckpointerOptions opens = spec.checkpoints;
    if (const auto other = spec.other_uri.find(node); other != spec.other_uri.end())
      opens.uri = other->second;
    // All that there were: a snapshot of one may still be being copied when its generation ends.
    std::vector<std::unique_ptr<RankState>> states;
    OUTLAST_ASSIGN_OR_RETURN(const auto checkpoints, Checkpointer::Open(run, opens));
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      states.push_back(std::make_unique<RankState>(generation.rank(), generation.world(),
                                                   spec.floats, spec.sharded));
      RankState* const state = states.back().get();
      OUTLAST_ASSIGN_OR_RETURN(auto group, Group::Make(generation, run, "grads", 4096));
      OUTLAST_ASSIGN_OR_RETURN(int64_t step, checkpoints->Restore(state->View()));
      if (!state->IsOf(step)) ++saw.wrong_states;
      {
        MutexLock lock(saw.mutex);
        saw.restored.push_back({generation.number(), generation.rank(), step,
                                step == 0 ? "" : checkpoints->stats().restored_from});
      }
      for (; step < spec.steps; ++step) {
        OUTLAST_RETURN_IF_ERROR(generation.Check());
        spec.at_step(cluster, generation, node, step);
        OUTLAST_RETURN_IF_ERROR(group.Barrier());
        OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
        state->Update(step);
        OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(step + 1, state->View()));
        if (spec.waits_at == 0 || (step + 1) % spec.waits_at != 0) continue;
        while (saw.newest_durable < step + 1 && generation.Check().ok()) usleep(500);
      }
      ++saw.finishing;
      OUTLAST_RETURN_IF_ERROR(checkpoints->Finish(spec.steps, state->View()));
      ++saw.finished;
      return absl::OkStatus();
    });
  });
}

// For people, when a test fails.
inline std::string TextOf(const Saw& saw) {
  std::string text;
  for (size_t node = 0; node < saw.results.size(); ++node) {
    const LocalNodeResult& result = saw.results[node];
    text += "\nn" + std::to_string(node) + " exit " + std::to_string(result.exit_code) + ": " +
            result.reason;
    for (const FaultRecord& fault : result.faults)
      text += "\n  fault of rank " + std::to_string(fault.rank) + ": " + fault.detail;
    for (const std::string& line : result.lines) text += "\n  " + line;
    const auto add = [&](const char* what, const auto& lines) {
      const auto found = lines.find(static_cast<int>(node));
      if (found == lines.end()) return;
      for (const std::string& line : found->second) text += std::string("\n  ") + what + line;
    };
    add("note: ", saw.notes);
    add("failed: ", saw.failures);
  }
  return text;
}

inline Manifest NewestManifest(const std::string& root) {
  const Listing listing =
      Root::Open(root, {.access = Access::kRead}).value()->List(Root::Look::kWhole).value();
  const Chain chain = ResolveChain(listing.checkpoints);
  if (chain.members.empty()) return {};
  return *listing.checkpoints[chain.members.front()].manifest;
}

}  // namespace outlast
