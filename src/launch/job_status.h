// What is known of a run at one moment: what `outlast status` shows and /status answers.
//
// JSON, version 1, one object:
//   version, job, run_id, run_dir, host, node, command [words], phase, agent {pid, state},
//   started_at, seconds, generation, world, workers_started,
//   ranks [{rank, slot, node, pid, state, step, phase, section, age_seconds, limit_seconds,
//           limit_source, end}]            those of this agent alone
//   faults, last_fault {class, rank, node, generation, detail, at} or null, budget {used, of}
//   or null (of several nodes the coordinator counts, and tells the leading agent of each fault),
//   saves {durable, failed, last_error}, checkpoint {step, name, bytes, seconds, at} or null,
//   verdict, stop_signals [numbers], exit_code, reason, metrics, mfu,
//   goodput {ratio, wall_seconds, states {name: seconds}} or null
// null: not known, or not so. `goodput` is computed by `outlast status` from the run's ledger; the
// agent answers null.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace outlast {

// A place for a process of this agent, and who is in it.
struct RankStatus {
  int rank = -1;  // -1: holds none
  int slot = 0;
  std::string node;  // empty in a job of one node
  int pid = 0;       // 0: no process
  uint64_t incarnation = 0;
  // "starting" (not joined), "running", "stopped" (SIGSTOP), "traced", "uninterruptible",
  // "finished" (its body returned), "ended", "unknown".
  std::string state = "unknown";
  std::optional<int64_t> step;          // that it is in
  std::string phase;                    // of the innermost section; empty: outside any
  std::string section;                  // its name
  std::optional<double> age_seconds;    // since it was last seen to move
  std::optional<double> limit_seconds;  // which age the watch suspects; none: nobody watches
  std::string limit_source;             // "learned", "configured", "declared"; empty: none
  std::string end;                      // of the last process: "exit code 3", "signal 9"
  bool operator==(const RankStatus&) const = default;
};

struct FaultStatus {
  std::string fault_class;
  int rank = -1;
  std::string node;
  uint64_t generation = 0;
  std::string detail;
  std::string at;  // UTC
  bool operator==(const FaultStatus&) const = default;
};

struct CheckpointStatus {
  int64_t step = 0;
  std::string name;
  uint64_t bytes = 0;
  double seconds = 0;  // that the write took
  std::string at;      // UTC
  bool operator==(const CheckpointStatus&) const = default;
};

// The first request to stop that this agent got, and what came of it.
struct StopStatus {
  double asked_seconds = 0;  // since the start of the run
  // Of the newest checkpoint that became durable since; none: no request is served yet, or another
  // node's agent writes.
  std::optional<int64_t> saved_step;
  std::optional<double> service_seconds;  // from the request until then
  bool operator==(const StopStatus&) const = default;
};

struct GoodputStatus {
  std::optional<double> ratio;  // productive / (wall - queue)
  double wall_seconds = 0;
  std::vector<std::pair<std::string, double>> states;  // those that took any time; sum: wall
  bool operator==(const GoodputStatus&) const = default;
};

struct JobStatus {
  std::string job, run_id, run_dir, host, node;
  std::vector<std::string> command;
  // "forming", "running", "re-forming", "stopping", "ending" (no answer any more, no report yet),
  // "ended", "killed" (the agent is gone and left no end), "waiting" (it is gone, and its workers
  // are kept for another one).
  std::string phase = "forming";
  int agent_pid = 0;
  uint64_t agent_start_ticks = 0;  // with agent_pid: that very process
  std::string boot_id;             // of the agent's machine
  // "answers", "ended", "silent" (lives, gives no answer), "denied" (lives, and is not this user's
  // to ask), "gone", "awaited" (gone, and a guardian waits for the next one), "elsewhere" (on
  // another machine, so nobody can tell).
  std::string agent_state;
  std::string agent_owner;  // of one that is "denied"; not in JSON
  std::string started_at;   // UTC
  double seconds = 0;       // since then; of a run that is over, its length
  uint64_t generation = 0;
  int world = 0;
  int workers_started = 0;
  std::vector<RankStatus> ranks;
  int faults = 0;  // those that count: no victims
  std::map<std::string, int> faults_by_class;
  std::optional<FaultStatus> last_fault;
  int budget_used = 0;  // restarts since the last committed step
  int budget = 0;
  // Of several nodes the coordinator counts, and tells the leading agent of each fault.
  bool budget_is_known = true;
  int saves = 0, failed_saves = 0;
  uint64_t saved_bytes = 0;
  std::string save_error;                      // of the last save, if it failed
  std::optional<CheckpointStatus> checkpoint;  // the newest durable one
  std::string verdict;                         // of the watch, the last one
  std::vector<int> stop_signals;
  std::optional<StopStatus> stop;
  std::optional<int> exit_code;
  std::string reason;
  std::string metrics;  // HOST:PORT
  std::optional<double> mfu;
  std::optional<GoodputStatus> goodput;

  bool is_over() const { return exit_code.has_value(); }
};

// One object without a line end.
std::string StatusJson(const JobStatus& status);
// What StatusJson wrote; what is missing or of another type is left at its default. kDataLoss: no
// object, or of a newer version.
absl::StatusOr<JobStatus> ParseStatusJson(std::string_view text);

}  // namespace outlast
