// Jobs of several nodes that save and restore: real agents' parts, peers over loopback TCP, and one
// folder that all see.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/save_council.h"
#include "outlast/base/mutex.h"
#include "outlast/elastic/messages.h"
#include "outlast/testing/time_factor.h"
#include "testing/local_cluster.h"
#include "tests/checkpoint/disk_fixture.h"
#include "tests/checkpoint/job_fixture.h"

namespace outlast {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::LocalCluster;
using testing::LocalClusterOptions;
using testing::LocalNodeResult;
using testing::TimeFactor;

const auto kEndsWithZero = Each(Field(&LocalNodeResult::exit_code, 0));

struct ClusterSpec {
  int nodes = 2, slots = 2;
  int64_t steps = 30;
  int min_world = 0;  // 0: all
  CheckpointerOptions checkpoints;
  // Called by each rank before the update of each step.
  std::function<void(LocalCluster&, outlast::Run&, int node, int64_t step)> at_step =
      [](LocalCluster&, outlast::Run&, int, int64_t) {};
  // Called on the loop, of the node that says it.
  std::function<void(LocalCluster&, int node, int64_t step)> on_durable =
      [](LocalCluster&, int, int64_t) {};
};

// What the ranks and the agents saw.
struct Saw {
  std::vector<LocalNodeResult> results;
  std::atomic<int> wrong_states{0}, finished{0};
  Mutex mutex;
  struct Restored {
    uint64_t generation = 0;
    int rank = 0;
    int64_t step = 0;
    std::string from;
    bool operator==(const Restored&) const = default;
  };
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

LocalClusterOptions Quick(int nodes, int slots) {
  LocalClusterOptions options{.nodes = nodes, .slots = slots};
  options.elastic.rejoin_grace = absl::Milliseconds(200) * TimeFactor();
  options.elastic.last_call = absl::Milliseconds(100) * TimeFactor();
  return options;
}

// A trainer whose replicated state lies on every rank, and one box of a sharded tensor.
class RankState {
 public:
  RankState(int rank, int world) : shard_(static_cast<size_t>(kShard), 0) {
    offset_.set(0, rank * kShard);
    global_.set(0, world * kShard);
  }
  StateView View() {
    StateView view = toy_.State();
    Shape extent = Shape::Zeros(1);
    extent.set(0, kShard);
    view.regions.push_back({"shard", DType::kF32, global_, offset_, extent,
                            std::as_writable_bytes(std::span(shard_))});
    return view;
  }
  void Update(int64_t step) {
    toy_.Update(step);
    for (float& value : shard_) value = static_cast<float>(step + 1 + offset_[0]);
  }
  bool IsOf(int64_t step) const {
    const float wanted = step == 0 ? 0.0F : static_cast<float>(step + offset_[0]);
    return toy_.IsStateOf(step) &&
           std::ranges::all_of(shard_, [&](float value) { return value == wanted; });
  }

 private:
  static constexpr int64_t kShard = 1000;
  Toy toy_{20'000};
  Shape offset_ = Shape::Zeros(1), global_ = Shape::Zeros(1);
  std::vector<float> shard_;
};

void RunCluster(const ClusterSpec& spec, Saw& saw) {
  std::map<int, std::unique_ptr<SaveService>> services;
  LocalCluster* self = nullptr;
  LocalClusterOptions options = Quick(spec.nodes, spec.slots);
  options.timeout = absl::Seconds(5);
  options.elastic.membership.min_world = spec.min_world;
  options.prepare = [&](Keeper& keeper, int node) {
    SaveServiceOptions service;
    service.job_name = "job";
    service.committer = "n" + std::to_string(node);
    service.observer.on_durable = [&, node](int64_t step, const PersistResult&) {
      saw.durable[node].push_back(step);
      spec.on_durable(*self, node, step);
    };
    service.observer.on_failed = [&, node](int64_t, const absl::Status& error) {
      saw.failures[node].emplace_back(MessageOf(error));
    };
    service.observer.on_note = [&, node](const std::string& line) {
      saw.notes[node].push_back(line);
    };
    services[node] = std::make_unique<SaveService>(keeper, std::move(service));
    keeper.Attach(services[node].get());
  };
  options.finish = [&](Keeper& keeper, int node) {
    keeper.Detach(services[node].get());
    services[node].reset();
  };
  LocalCluster cluster(options);
  self = &cluster;
  saw.results = cluster.Run([&](outlast::Run& run, int node) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(const auto checkpoints, Checkpointer::Open(run, spec.checkpoints));
    std::unique_ptr<RankState> state;
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      state = std::make_unique<RankState>(generation.rank(), generation.world());
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
        spec.at_step(cluster, run, node, step);
        OUTLAST_RETURN_IF_ERROR(group.Barrier());
        OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
        state->Update(step);
        OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(step + 1, state->View()));
      }
      OUTLAST_RETURN_IF_ERROR(checkpoints->Finish(spec.steps, state->View()));
      ++saw.finished;
      return absl::OkStatus();
    });
  });
}

// For people, when a test fails.
std::string TextOf(const Saw& saw) {
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

Manifest NewestManifest(const std::string& root) {
  const Listing listing =
      Root::Open(root, {.access = Access::kRead}).value()->List(Root::Look::kWhole).value();
  const Chain chain = ResolveChain(listing.checkpoints);
  if (chain.members.empty()) return {};
  return *listing.checkpoints[chain.members.front()].manifest;
}

TEST(SaveNodes, TwoAgentsCommitOneCheckpointOfAllRanks) {
  const TempFolder folder;
  Saw saw;

  RunCluster({.steps = 20, .checkpoints = {.uri = folder.path(), .every = Every::Steps(10)}}, saw);

  ASSERT_THAT(saw.results, kEndsWithZero) << TextOf(saw);
  EXPECT_EQ(saw.finished, 4);
  EXPECT_EQ(saw.wrong_states, 0);
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(20, 10));
  const Manifest manifest = NewestManifest(folder.path());
  EXPECT_EQ(manifest.world, 4u);
  EXPECT_EQ(manifest.receipts.size(), 4u);
  EXPECT_EQ(manifest.committed_by.agent, "n0");
  EXPECT_THAT(saw.durable[0], ElementsAre(10, 20));
  EXPECT_THAT(saw.durable[1], ElementsAre(10, 20));
}

}  // namespace
}  // namespace outlast
