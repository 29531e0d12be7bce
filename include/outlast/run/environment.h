// What a worker finds in its environment: rank and world by the names of whoever launched it, and
// OUTLAST_* for what only Outlast knows.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace outlast {

// - RANK, WORLD_SIZE, LOCAL_RANK: integers, rank < world; from `outlast run`, torchrun, or by hand.
//   Without them those of Open MPI (OMPI_COMM_WORLD_RANK, ...), MPICH (PMI_RANK, ...) or a Slurm
//   step (SLURM_PROCID, SLURM_STEP_NUM_TASKS, ...). `outlast env` shows what is found, and why.
// - OUTLAST_SOCKET_FD: the SOCK_SEQPACKET descriptor to the agent.
// - OUTLAST_BLACKBOX_FD: the memfd of this rank's black box.
// - OUTLAST_RUN_DIR: RUN_DIR. OUTLAST_RUN_ID: its run id, 32 hex digits.
// - OUTLAST_INCARNATION: decimal, from 1.
// - OUTLAST_ADDRESS: the host, a name or a number, that ranks of other nodes reach this node by
//   (127.0.0.1).
// - OUTLAST_MICRO_BATCHES: those of a step over all ranks (`outlast run --micro-batches`).
// - OUTLAST_RANKS_PER_REPLICA: ranks that hold one replica of the model between them (1).
struct WorkerEnvironment {
  int rank = 0;
  int world = 1;
  int local_rank = 0;
  int socket_fd = -1;  // -1: no agent
  int black_box_fd = -1;
  uint64_t incarnation = 1;
  std::string run_id;  // hex, empty without an agent
  std::string run_dir;
  std::string address = "127.0.0.1";
  int micro_batches = 0;  // 0: not said
  int ranks_per_replica = 1;

  // kInvalidArgument: a variable that is no number, a rank outside the world, ranks by hand that
  // contradict the launcher's, a socket without a black box; named.
  static absl::StatusOr<WorkerEnvironment> FromProcess();
};

}  // namespace outlast
