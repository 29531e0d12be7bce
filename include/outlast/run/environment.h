// What a worker finds in its environment: torchrun's names, and OUTLAST_* for what only Outlast
// knows.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace outlast {

//   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE     integers; rank < world
//   OUTLAST_SOCKET_FD     the SOCK_SEQPACKET descriptor to the agent
//   OUTLAST_BLACKBOX_FD   the memfd of this rank's black box
//   OUTLAST_RUN_DIR       RUN_DIR, OUTLAST_RUN_ID its run id (32 hex digits), OUTLAST_INCARNATION
//   (decimal, from 1)
struct WorkerEnvironment {
  int rank = 0;
  int world = 1;
  int local_rank = 0;
  int socket_fd = -1;  // -1: no agent
  int black_box_fd = -1;
  uint64_t incarnation = 1;
  std::string run_id;  // hex, empty without an agent
  std::string run_dir;

  // kInvalidArgument: a variable that is no number, a rank outside the world, a socket without a
  // black box; named.
  static absl::StatusOr<WorkerEnvironment> FromProcess();
};

}  // namespace outlast
