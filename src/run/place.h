// Which rank of which world a process is, by the variables that its launcher set. Pure.
//
// The innermost launcher counts: `outlast run`, then torchrun, since a step of a batch system may
// well start those; then RANK and WORLD_SIZE set by hand, which must not contradict the launcher
// below them; then MPI; then a Slurm step. What a mere allocation or batch script has (SLURM_PROCID
// of no step) says nothing. Names and meanings: srun(1), Open MPI's and MPICH's documentation, and
// torch/distributed/run.py. A pod of a Kubernetes Job has a number, but no rank (pod.h).
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace outlast {

enum class Launcher { kNone, kOutlast, kTorchrun, kByHand, kOpenMpi, kMpich, kSlurm };
std::string_view NameOf(Launcher launcher);

struct Variable {
  std::string name, value;
};

// What one launcher's variables say.
struct PlaceClaim {
  Launcher launcher = Launcher::kNone;
  int rank = 0, world = 1, local_rank = 0;
  std::vector<Variable> variables;  // that say so

  // "RANK=1 WORLD_SIZE=4"
  std::string Text() const;
};

// The value of a variable; null where it is unset. As std::getenv.
using Variables = std::function<const char*(const char* name)>;

// Every launcher's claim, the one that counts first. Empty: none, which is a world of one.
// kInvalidArgument: a variable that is no number, half of a pair, a rank outside its world, two
// claims that contradict each other, or a launcher that does not tell its world's size; each named.
absl::StatusOr<std::vector<PlaceClaim>> FindPlace(const Variables& variables);

}  // namespace outlast
