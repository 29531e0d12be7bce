// A job of several nodes in one process: a coordinator, an agent of each node with its keeper and
// its peers over loopback TCP (127.0.0.1, 127.0.0.2, ...), and ranks as threads. All agents share
// one loop.
#pragma once

#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "outlast/elastic/elastic_options.h"
#include "outlast/elastic/fault.h"
#include "outlast/run/run.h"

namespace outlast {
class Coordinator;
class Keeper;
}  // namespace outlast

namespace outlast::testing {

struct LocalClusterOptions {
  int nodes = 2;
  int slots = 2;  // of each node
  // Of the job; a max_world of 0: all slots, and no fewer.
  ElasticOptions elastic{.membership = {.min_world = 0, .max_world = 0}};
  std::string run_dir;
  // Called on the loop before a node's agent starts: attach extensions here; and before its keeper
  // goes, also when the node is killed: detach them here.
  std::function<void(Keeper&, int node)> prepare, finish;
  // A job that is not done by then is ended: all ranks are killed.
  absl::Duration timeout = absl::Seconds(60);
};

struct LocalNodeResult {
  int exit_code = -1;  // -1: killed, or not done in time
  std::string reason;
  std::vector<FaultRecord> faults;  // that this node has recorded
  uint64_t generation = 0;          // the last that it was committed to
  int spawns = 0;
  uint64_t refused = 0;            // Keeper::refused()
  std::vector<std::string> lines;  // for people
};

class LocalCluster {
 public:
  using Body = std::function<absl::Status(outlast::Run&, int node)>;

  explicit LocalCluster(LocalClusterOptions options = {});
  ~LocalCluster();

  // Runs the job to its end, once. Blocks; all threads are joined when it returns.
  std::vector<LocalNodeResult> Run(const Body& body);

  // The next ones are for the bodies and for other threads, while Run runs. They return at once.
  void KillRank(int node, int slot, int signal = SIGKILL);
  // Its agent and its ranks are gone at once.
  void KillNode(int node);
  void CrashCoordinator();
  void RestartCoordinator();
  // As if the agent of `node` had got `signal`.
  void AskStop(int node, int signal = SIGTERM);
  // Runs `work` on the loop and waits for it. Not from the loop. Null: the node was killed, the
  // coordinator is down.
  void OnKeeper(int node, const std::function<void(Keeper*)>& work);
  void OnCoordinator(const std::function<void(const Coordinator*)>& work);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace outlast::testing
