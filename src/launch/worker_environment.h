// What the agent puts into a worker's environment: torchrun's names, so that its programs run
// unchanged, and OUTLAST_* (outlast/run/environment.h). No name is ever resolved: addresses are
// numbers.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/base/fd.h"

namespace outlast {

struct WorkerPlace {
  int rank = 0, world = 1;
  uint64_t incarnation = 1;
  int attempt = 0;  // 0, 1, ...
  int max_restarts = 0;
  int master_port = 0;
  std::string job, run_id, run_dir;
};

// NAME=value each. Variables that are defaults only (OMP_NUM_THREADS) are left out where our own
// environment has them.
std::vector<std::string> EnvironmentOf(const WorkerPlace& place);

// One TCP port of 127.0.0.1 a generation. It is held as a socket that is bound with SO_REUSEADDR
// and does not listen: while it is, a stranger can neither bind nor reach the port, but the
// worker's own server, which sets SO_REUSEADDR too, can.
class MasterPorts {
 public:
  // The port of `generation`; the same at each call. Ports of generations before the one before are
  // let go.
  absl::StatusOr<int> Of(uint64_t generation);

 private:
  struct Held {
    UniqueFd socket;
    int port;
  };
  std::map<uint64_t, Held> held_;
};

}  // namespace outlast
