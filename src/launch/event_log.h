// The event log of a run, RUN_DIR/events.jsonl: append-only, one JSON object a line.
//
// Each has `t` (seconds since the start, steady clock), `at` (UTC) and `event`, and then:
//   start           version (1), run_id, job, world, max_restarts, command, pid and start_ticks of
//                   the agent, host, boot_id; of several nodes node and slots, neither run_id nor
//                   world
//   joined          run_id: a coordinator has told it
//   agent_adopted   pid and start_ticks of the agent that took a killed one's place, host, boot_id,
//                   generation (that ends with it), workers that live
//   worker_started  rank, slot, incarnation, generation, attempt, pid, from ("template": forked
//   from
//                   it; else left out)
//   template_ready  pid: ranks that die are forked from it
//   worker_ended    rank, slot, incarnation, code or signal, by_us, error
//   commit          generation, members (slots); of several nodes world, ranks (by slot), nodes
//                   [{node, rank, ranks}]
//   fault           class, rank, node (of several), generation, step_reached, step_committed, end,
//                   found_by, detail, root, victim, budget ("1 of 3"), last_lines
//   job_fault       the same, of any node, as the coordinator judges it; where this agent leads
//   restored        generation, source, step
//   saved           step, checkpoint, bytes, seconds
//   save_failed     step, error
//   uploaded        step, checkpoint, bytes, seconds
//   upload_failed   step, error
//   verdict         verdict, folder
//   recovered       verdict: whom the watch had found moves again
//   stacks          folder, reason
//   stop_asked      signal; a checkpoint that is saved after it serves it
//   metrics         address: /metrics and /status are served there
//   note            line
//   finish          exit_code, reason
// A newer version adds events and fields: readers skip what they do not know. A `start` with a
// greater version may have changed their meaning: it is refused. A slot is a place for a process of
// this node; in a job of one node its number is the rank.
//
// A line is written by one write(2), so that a kill leaves whole lines and at most one that is cut,
// the last. Lines that are cut, or whatever a full disk left of them, are skipped.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "launch/job_status.h"

namespace outlast {

inline constexpr int kEventLogVersion = 1;

// What `event` adds to what is known. Any object is taken; fields of another type count as missing.
void Fold(const nlohmann::ordered_json& event, JobStatus& status);

struct EventLogRead {
  JobStatus status;      // as of the last event
  uint64_t events = 0;   // that were read
  uint64_t skipped = 0;  // lines that are no event
};

// Reads `run_dir`/events.jsonl. kNotFound: there is none. kDataLoss: it holds no event, or is of a
// newer version.
absl::StatusOr<EventLogRead> ReadEventLog(const std::string& run_dir);

}  // namespace outlast
