// What the agent puts into a worker's environment: torchrun's names, so that its programs run
// unchanged, and OUTLAST_* (outlast/run/environment.h). No name is ever resolved: addresses are
// numbers.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/socket.h"
#include "outlast/base/fd.h"

namespace outlast {

struct WorkerPlace {
  int rank = 0, world = 1;
  int local_rank = 0, local_world = 1;  // among the ranks of this node
  int group_rank = 0, group_world = 1;  // this node among the nodes that hold ranks
  uint64_t incarnation = 1;
  int attempt = 0;  // 0, 1, ...
  int max_restarts = 0;
  int micro_batches = 0;      // of all ranks; 0: not said, and left out
  int ranks_per_replica = 1;  // 1: left out
  // Where rank 0 may listen. Empty: not known, and left out: a process that is spawned while its
  // generation forms again has joined before, and takes keys from outlast::Generation.
  std::optional<HostPort> master;
  std::string address;  // that other nodes reach this one by; empty: there are none
  std::string job, run_id, run_dir;
};

// NAME=value each. Variables that are defaults only (OMP_NUM_THREADS) are left out where our own
// environment has them.
std::vector<std::string> EnvironmentOf(const WorkerPlace& place);

// Of a template whose node has `slots` workers: the defaults among the above; and for
// `python3 -m outlast_template` a PYTHONPATH where that is found, with the true one in
// OUTLAST_TEMPLATE_PYTHONPATH, and `program` in OUTLAST_TEMPLATE_PROGRAM.
std::vector<std::string> TemplateEnvironment(int slots, const std::string& program,
                                             const std::vector<std::string>& arguments);

// One TCP port of this node's address a generation. It is held as a socket that is bound with
// SO_REUSEADDR and does not listen: while it is, a stranger can neither bind nor reach the port,
// but the worker's own server, which sets SO_REUSEADDR too, can.
class MasterPorts {
 public:
  // `address`: a number of this machine.
  explicit MasterPorts(std::string address) : address_(std::move(address)) {}
  const std::string& address() const { return address_; }
  // The port of `generation`; the same at each call. Ports of generations before the one before are
  // let go.
  absl::StatusOr<int> Of(uint64_t generation);

 private:
  const std::string address_;
  struct Held {
    UniqueFd socket;
    int port;
  };
  std::map<uint64_t, Held> held_;
};

}  // namespace outlast
