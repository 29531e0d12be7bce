// What the keeper tells the job's state machine.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "absl/time/time.h"
#include "outlast/elastic/fault.h"

namespace outlast {

struct StartEvent {};
struct WorkerJoined {
  int slot;
  uint64_t incarnation;
};
// The worker is in ForEachGeneration and waits for a generation. `left` is the generation whose
// body it left (0: none).
struct WorkerStaged {
  int slot;
  uint64_t incarnation;
  uint64_t left;
};
// The worker's body returned OK: its work is done, and it may leave at any time.
struct WorkerFinished {
  int slot;
  uint64_t incarnation;
};
// The worker unwound after an agreed stop, having sealed the stop's step.
struct WorkerStopped {
  int slot;
  uint64_t incarnation;
  int64_t step;
};
// The kernel has begun to take the process apart because of `signal`: it computes nothing more, and
// its WorkerEnded follows when nothing of it can write any more.
struct WorkerDying {
  int slot;
  uint64_t incarnation;
  int signal;
  bool out_of_memory = false;  // ProcessEnd::out_of_memory
};
struct WorkerEnded {
  int slot;
  uint64_t incarnation;
  ProcessEnd end;
};
// `culprit` does not move while others wait. `stopped`: the process is in T state, so soft means do
// nothing to it.
struct VerdictGiven {
  int culprit;
  std::string verdict_class;
  std::string detail;
  uint32_t phase;
  bool stopped;
};
struct StopAsked {
  int signal;
};  // SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP
// late: `step` is where it is. `asked` is the stop's step that it answers (AskStop::step); 0: the
// newest asked.
struct StopAnswered {
  int slot;
  uint64_t incarnation;
  bool on_time;
  int64_t step;
  int64_t asked = 0;
};
// The stop's last save ended. Owed after each GoStop and each PersistCommon: without a save service
// the keeper gives it at once (after GoStop: when the last worker stopped), not durable. When it
// does not come, the job ends at its deadline.
struct StopPersisted {
  int64_t step;
  bool durable;
};
// Of a WantSave. `detail`: why nothing is durable; empty: nothing here saves.
struct WantedSaveEnded {
  uint64_t number;
  bool durable;
  int64_t step = 0;
  std::string detail = {};
};
struct CheckpointCommitted {
  int64_t step;
};
// A rank tried a resume candidate. Judged by the save service; kept here for the record only.
struct RestoreFailed {
  std::string detail;
};  // no candidate restores: ends the job with 82
struct RootRefused {
  std::string detail;
};  // first open of a checkpoint root was refused: ends the job with 85
struct RootLost {
  std::string detail;
};  // another run took the root: ends the job with 88 at an agreed step
struct FinalSaveFailed {
  std::string detail;
};
struct TimerFired {
  uint64_t timer;
};

using JobEvent = std::variant<StartEvent, WorkerJoined, WorkerStaged, WorkerFinished, WorkerStopped,
                              WorkerDying, WorkerEnded, VerdictGiven, StopAsked, StopAnswered,
                              StopPersisted, WantedSaveEnded, CheckpointCommitted, RestoreFailed,
                              RootRefused, RootLost, FinalSaveFailed, TimerFired>;

// What the keeper saw in the black boxes when the event came; the machine never reads memory.
struct JobView {
  absl::Duration now;       // steady
  int64_t newest_step = 0;  // the newest step that any rank has begun
};

}  // namespace outlast
