// Which pod of a Kubernetes Job or JobSet a process is in. Pure.
//
// The Job controller gives the pods of an Indexed Job JOB_COMPLETION_INDEX and the host name
// <job>-<index>; how many pods there are it does not tell, so an index is a place in the order of
// nodes, and never a rank. What else is known comes through the downward API, under the names that
// JobSet's examples use:
//
//   JOBSET_NAME            annotation jobset.sigs.k8s.io/jobset-name
//   REPLICATED_JOB_NAME    ../replicatedjob-name: which of the JobSet's templates
//   JOB_INDEX              ../job-index: which Job of that template
//   PROCESSES_IN_JOB       a Job's completions, as its author writes them
//   JOB_NAME               label batch.kubernetes.io/job-name
//
// A pod of a JobSet has the host name <jobset>-<replicated job>-<job index>-<index>. With
// hostNetwork it is the node's, which says nothing.
// Sources: kubernetes.io/docs/tasks/job (Indexed Job), jobset.sigs.k8s.io/docs/concepts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "run/place.h"

namespace outlast {

struct PodClaim {
  int index = 0;                    // among its Job's
  std::optional<int> node;          // among all of the JobSet's template's, where that is known
  std::string host;                 // name; empty: it is not told
  std::vector<Variable> variables;  // that say so

  // "JOB_COMPLETION_INDEX=2 HOSTNAME=gpt-2"
  std::string Text() const;
};

// None: in no pod of an Indexed Job. kInvalidArgument: a variable that is no number, or two that
// contradict each other; both named.
absl::StatusOr<std::optional<PodClaim>> FindPod(const Variables& variables);

}  // namespace outlast
