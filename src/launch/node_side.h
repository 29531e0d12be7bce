// An agent's side of a job of several nodes: its address, its stream to the coordinator, its
// connections to other agents, and the coordinator itself where this agent leads the job.
//
// Who leads: the agents whose own address the coordinator's is, by number, never by name, try to
// listen there; the first one leads, the others find the address taken and join. So does the agent
// where `outlast coordinator` listens already. The journal is in the leading agent's RUN_DIR, and
// ends with it: a leader that was killed takes the job's control with it, which the others feel
// when their grace is over (84); `outlast coordinator` on a journal of its own can be started
// again. Where the address is etcd's, no agent leads: each asks there for the present coordinator
// before it connects.
//
// A leader that is told to stop stops the whole job, since nobody could take the journal over.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "control/coordinator_host.h"
#include "launch/link_meter.h"
#include "launch/options.h"
#include "launch/worker_environment.h"
#include "outlast/base/id.h"
#include "outlast/elastic/messages.h"
#include "run/coordinator_link.h"
#include "run/job_machine.h"
#include "run/peers.h"

namespace outlast {

// The address that other nodes reach this one by, a number: what --advertise says, else the one
// from which the coordinator is reached. kInvalidArgument, kUnavailable: --advertise is none of
// this machine's, or there is no way to the coordinator. May wait for a name server.
absl::StatusOr<std::string> OwnAddress(const NodesOptions& nodes);

// Belongs to its loop's thread.
class NodeSide {
 public:
  struct Ears {
    std::function<void(const std::string& line)> say;
    // Any node's, as the coordinator judges it, where this agent leads.
    std::function<void(const RecordFault& fault)> on_job_fault;
  };
  // `address`: OwnAddress. `agent` is this agent's own id, `run_dir` its RUN_DIR. Threads are
  // started, so the guardian was forked before. The rest outlives it. kInvalidArgument,
  // kFailedPrecondition: deadlines that contradict each other, an address beyond loopback without a
  // token. kNotFound: there is no transport.
  static absl::StatusOr<std::unique_ptr<NodeSide>> Start(EventLoop& loop,
                                                         const LaunchOptions& options,
                                                         const std::string& address,
                                                         const Id128& agent,
                                                         const std::string& run_dir, Ears ears);

  // For the keeper, which must be gone before Leave. `ports` gives rank 0's.
  std::unique_ptr<JobMachine> MakeMachine(MasterPorts& ports);
  bool leads() const { return host_ != nullptr; }
  // Stops the job, where this agent leads; else nothing.
  void StopJob(int signal);
  // Ends the streams; what was said still leaves.
  void Leave();
  // Runs the loop until the job has ended and all agents know it, where this agent leads; else
  // returns at once. A second signal (StopJob) in this time ends it.
  void ServeOthers();

 private:
  NodeSide(EventLoop& loop, const LaunchOptions& options, std::string address, const Id128& agent,
           Ears ears);
  absl::Status Lead(const std::string& run_dir);
  absl::Status TryToListen(const std::string& run_dir);
  absl::Status Join();
  void Measure(const control::Measure& measure, const std::function<void(control::Measured)>& done);

  EventLoop& loop_;
  const LaunchOptions& options_;
  const NodesOptions& nodes_;
  const std::string address_;
  const Id128 agent_;
  const Ears ears_;
  control::Transport* transport_ = nullptr;
  std::unique_ptr<CoordinatorHost> host_;
  bool job_has_ended_ = false;
  bool may_leave_ = false;  // nobody needs the coordinator any more
  bool is_serving_ = false;
  int stops_ = 0;
  std::unique_ptr<CoordinatorLink> link_;
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<LinkMeter> meter_;  // null: no preflight
};

}  // namespace outlast
