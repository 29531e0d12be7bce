// A node's part in a job of several, behind the keeper: the pure NodeAgent machine, its stream to
// the coordinator, and its connections to the other agents.
//
// Translates both ways. What the coordinator says becomes a NodeEvent; OpenGeneration becomes the
// CommitGeneration that the keeper knows, and the group of Peers is entered before the keeper hears
// of it. The group is left only for the next one, or when this node has no part in it: what an
// aborted generation has in memory is still saved together, at a stop above all. What the keeper's
// extensions dispatch of saves (CheckpointCommitted, RestoreFailed, RootRefused, RootLost,
// FinalSaveFailed) goes to the coordinator as a report, for it decides. Faults that this node
// reports are recorded here too (RecordFault), with the budget left to the coordinator.
//
// Whom of its generation's peers it has not reached for as long as a silent agent is waited for
// (the beat loss) is told to the coordinator with each beat: the lead or the followers that it
// should have a connection to, and of the followers whose links COMMIT tells it to watch those that
// it had reached before; one that it never has is told apart. That a link is cut ends nothing; when
// the ranks fail for it, the coordinator knows whom to go on without.
//
// Resume candidates: all ranks of a generation agree among themselves (save service) on what they
// restore, and end the job by RestoreFailed when nothing does. So the machine tells the coordinator
// at once that a candidate is restored, and the keeper never hears of one.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/elastic/node_agent.h"
#include "run/coordinator_link.h"
#include "run/job_machine.h"
#include "run/peers.h"

namespace outlast {

struct NodeMachineOptions {
  NodeOptions node;
  // HOST:PORT that this node holds for a process of rank 0 to listen on (MASTER_ADDR and
  // MASTER_PORT), fresh for each generation.
  std::function<absl::StatusOr<std::string>(uint64_t generation)> bootstrap;
  // What the buffers here hold, for Prepared. Null: nothing.
  std::function<std::vector<control::HeldSnapshot>()> snapshots;
  // Measures this node's link, as the coordinator asks; `done` where this node calls, on the loop.
  // Null: it never asks.
  std::function<void(const control::Measure& measure, std::function<void(control::Measured)> done)>
      measure;
  // One line for people: the link's ups and downs, refusals, exclusion.
  std::function<void(const std::string& line)> say;
};

class NodeMachine final : public JobMachine {
 public:
  // `link` and `peers` are borrowed; options.node.peer_address is the peers' to say.
  NodeMachine(NodeMachineOptions options, CoordinatorLink& link, Peers& peers);
  ~NodeMachine() override;

  void Listen(Tell tell) override;
  std::vector<JobAction> Step(const JobEvent& event, const JobView& view) override;
  int slots() const override;
  int rank(int slot) const override;
  int world() const override;
  Id128 run_id() const override;
  Peers* peers() override;
  std::string node() const override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace outlast
