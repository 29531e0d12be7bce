// What the job's state machine has the keeper do, in this order.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "outlast/elastic/fault.h"
#include "outlast/elastic/messages.h"

namespace outlast {

// A new process for the slot; the former one and its tree have ended.
struct SpawnWorker {
  int slot;
  uint64_t incarnation;
  uint64_t generation;
  int attempt;
};  // attempt: 0, 1, ... (TORCHELASTIC_RESTART_COUNT)
// Raise the abort generation in every black box and tell every live worker.
struct AbortGeneration {
  uint64_t generation;
  std::string reason;
};
// `generation` is open from now on: the keeper enters each joined member once *both* hold, that the
// generation is the newest committed one and was not aborted, and that the member is staged with
// `left` below it, in whatever order they come. So members that were staged before enter now; of
// generation 1, and of plain slots, each enters when it joins and is staged (a plain one never
// does). Emitted once a generation. `members[i]` = slot; slots whose work is done are not members.
//
// Of a job of several nodes `job` is the coordinator's COMMIT, and `ranks[slot]` the rank that the
// slot holds, -1: none. Of one node `job` is null, `ranks` empty, and a slot's number its rank.
struct CommitGeneration {
  uint64_t generation;
  std::vector<int> members;
  std::vector<int> ranks = {};
  std::shared_ptr<const control::Commit> job = nullptr;

  int RankOf(int slot) const { return job == nullptr ? slot : ranks[static_cast<size_t>(slot)]; }
};
enum class KillHow : uint8_t { kTerm, kKill };  // of the slot's whole process tree
struct KillWorker {
  int slot;
  uint64_t incarnation;
  KillHow how;
  std::string reason;
};
struct ForwardSignal {
  int slot;
  uint64_t incarnation;
  int signal;
};  // to a plain worker: as it is if caught, else TERM
struct CaptureStacks {
  std::vector<int> slots;
  std::string reason;
};
struct AskStop {
  int64_t step;
  std::string reason;
};  // STOP(step) to all joined workers
struct GoStop {
  int64_t step;
};
struct PersistCommon {
  std::string reason;
};  // persist the newest snapshot that all ranks have, without the trainer's help
// All ranks of the job are to save a step that none of them has reached yet, and train on;
// WantedSaveEnded answers it. Of a job of several nodes, at the agent of rank 0.
struct WantSave {
  uint64_t number;
  std::string reason;
};
// The machine uses one timer, and looks at all its deadlines in each Step: a late, early or
// repeated TimerFired is harmless.
struct ArmTimer {
  uint64_t timer;
  absl::Duration at;
};  // steady; a timer id armed again replaces the former
struct DisarmTimer {
  uint64_t timer;
};
struct RecordFault {
  FaultRecord fault;
  int budget_used;
  int budget;
};  // for report, ledger and console
// Last action; all workers have ended. Where the last state is not in the root: the code that the
// job ends with if it comes there after all, of a stop with at least `last_step`.
struct FinishJob {
  int exit_code;
  std::string reason;
  std::optional<int> code_if_saved = std::nullopt;
  int64_t last_step = 0;
};

using JobAction = std::variant<SpawnWorker, AbortGeneration, CommitGeneration, KillWorker,
                               ForwardSignal, CaptureStacks, AskStop, GoStop, PersistCommon,
                               WantSave, ArmTimer, DisarmTimer, RecordFault, FinishJob>;

}  // namespace outlast
