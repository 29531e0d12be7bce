// What is sent to Slurm: a batch script that holds the whole request.
//
//   batch script, on the first node          step (srun), one task a node
//     outlast coordinator  <---------------- outlast run --node $SLURMD_NODENAME ...
//     warnings (USR1), scancel's TERM -> the coordinator -> all agree on a step, save, end with 80
//     80, 81, 84 -> scontrol requeue         87 -> the node is given back, and a hint to drain it
//
// A job of one node has no coordinator and no step: the script starts its agent.
//
// The job's id stays the same in all attempts, for it owns the root of checkpoints. What must not
// be mixed between attempts is made anew by each: the coordinator with its port and journal, and
// the token, which goes to the agents through srun's environment and to the tool by a descriptor.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "control/node_flags.h"

namespace outlast {

struct SlurmJob {
  std::string job;  // id of the job, and its name in Slurm
  NodeCount nodes;
  int ranks_per_node = 1;
  std::string partition, account, time;  // as sbatch takes them; empty: Slurm's own defaults
  int cpus_per_node = 0;                 // 0: whole nodes
  int notice = 120;                      // seconds from Slurm's warning to the end
  int max_restarts = 3;
  int max_requeues = 200;
  absl::Duration last_call = absl::Seconds(5);  // for nodes besides MIN
  int port = 0;                                 // of the coordinator; 0: any that is free
  bool drain_excluded = false;  // by scontrol, which operators alone may do; else only said
  std::vector<std::string> sbatch_options;  // more of them, each "--name" or "--name=value"
  std::vector<std::string> run_flags;       // of each agent
  std::vector<std::string> terms;           // those among them that the coordinator must know too
  std::vector<std::string> command;
  std::string tool;    // where nodes find the tool
  std::string folder;  // where the job runs, on all nodes
  std::string key;     // empty: from all of the above
};

// Whatever is sent, in words; it is not changed afterwards.
struct SlurmRequest {
  std::string job, folder, key;
  std::vector<std::string> options;  // of sbatch; the script has them too
  std::string script;
};

// kInvalidArgument: a value that Slurm's option lines cannot carry, or an option that is the
// request's own. Sends nothing, reads nothing.
absl::StatusOr<SlurmRequest> RenderSlurm(const SlurmJob& job);

// How long a stop may take where Slurm warns `notice` seconds before the end, and how much of that
// the trainers have to reach the step.
int StopWithin(int notice);
int StopGrace(int notice);

// `word` as bash reads it back, on one line.
std::string ShellWord(std::string_view word);

}  // namespace outlast
