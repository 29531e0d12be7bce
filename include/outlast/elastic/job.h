// The job's state machine for one node: a pure function from (state, event, now) to (state, actions).
//
//   FORMING ── all slots spawned ──> RUNNING ── fault, verdict ──> REFORMING ── all staged ──> RUNNING ...
//   RUNNING ── stop asked ──> STOPPING ── all ended ──> DONE            any ── budget used up ──> ENDING ──> DONE
//
// A *slot* is the place that a rank holds: on one node slot and rank are the same number. A worker is *plain* until it
// joins. A generation forms in two phases: abort everywhere and fill dead slots (PREPARE), then one COMMIT when every
// slot is staged. Nothing here sleeps, reads a clock or touches a process: the keeper does what the actions say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "outlast/elastic/fault.h"

namespace outlast {

struct JobOptions {
  int world = 1;
  int max_restarts = 3;  // crash and hang faults since the last progress; 0 = never restart
  int same_root_limit = 3;
  int other_class_limit = 6;      // records of other classes since progress
  int restarts_per_hour_limit = 20;
  int64_t progress_steps = 200;   // new steps that count as progress where nothing commits
  absl::Duration grace = absl::Seconds(15);            // SIGTERM to SIGKILL in a stop
  absl::Duration stop_within = absl::Seconds(25);      // a stop in all
  absl::Duration early_exit_grace = absl::Seconds(60);
  absl::Duration soft_abort = absl::Seconds(10);       // ABORT to staged
  absl::Duration abort_term = absl::Seconds(2);        // SIGTERM to SIGKILL in an abort
  absl::Duration reap = absl::Seconds(5);              // SIGKILL to the end of the process
  absl::Duration respawn = absl::Seconds(120);         // spawn to staged
  int preempt_exit = 80;
  std::vector<int> no_retry_codes = {82, 93};
  std::vector<int> retry_codes;  // when not empty, only these are tried again
};

// --- Events -----------------------------------------------------------------------------------------------------------
struct StartEvent {};
struct WorkerJoined { int slot; uint64_t incarnation; };
// The worker is in ForEachGeneration and waits for a generation. `left` is the generation whose body it left (0: none).
struct WorkerStaged { int slot; uint64_t incarnation; uint64_t left; };
// The worker's body returned OK: its work is done, and it may leave at any time.
struct WorkerFinished { int slot; uint64_t incarnation; };
// The worker unwound after an agreed stop, having sealed the stop's step.
struct WorkerStopped { int slot; uint64_t incarnation; int64_t step; };
struct WorkerEnded { int slot; uint64_t incarnation; ProcessEnd end; };
// `culprit` does not move while others wait. `stopped`: the process is in T state, so soft means do nothing to it.
struct VerdictGiven { int culprit; std::string verdict_class; std::string detail; uint32_t phase; bool stopped; };
struct StopAsked { int signal; };             // SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP
struct StopAnswered { int slot; uint64_t incarnation; bool on_time; int64_t step; };  // late: `step` is where it is
struct StopPersisted { int64_t step; bool durable; };  // the stop's last save ended
struct CheckpointCommitted { int64_t step; };
// A rank tried a resume candidate. Judged by the save service; kept here for the record only.
struct RestoreFailed { std::string detail; };  // no candidate restores: ends the job with 82
struct RootRefused { std::string detail; };    // first open of a checkpoint root was refused: ends the job with 85
struct RootLost { std::string detail; };       // another run took the root: ends the job with 88 at an agreed step
struct FinalSaveFailed { std::string detail; };
struct TimerFired { uint64_t timer; };

using JobEvent = std::variant<StartEvent, WorkerJoined, WorkerStaged, WorkerFinished, WorkerStopped, WorkerEnded, VerdictGiven, StopAsked,
                              StopAnswered, StopPersisted, CheckpointCommitted, RestoreFailed, RootRefused, RootLost,
                              FinalSaveFailed, TimerFired>;

// What the keeper saw in the black boxes when the event came; the machine never reads memory.
struct JobView {
  absl::Duration now;       // steady
  int64_t newest_step = 0;  // the newest step that any rank has begun
};

// --- Actions ----------------------------------------------------------------------------------------------------------
struct SpawnWorker { int slot; uint64_t incarnation; uint64_t generation; int attempt; };  // attempt: 0, 1, ... (TORCHELASTIC_RESTART_COUNT)
// Raise the abort generation in every black box and tell every live worker.
struct AbortGeneration { uint64_t generation; std::string reason; };
// Every member enters `generation`: the members' `members[i]` = slot. Slots whose body has finished are not members.
struct CommitGeneration { uint64_t generation; std::vector<int> members; };
enum class KillHow : uint8_t { kTerm, kKill };  // of the slot's whole process tree
struct KillWorker { int slot; uint64_t incarnation; KillHow how; std::string reason; };
struct ForwardSignal { int slot; uint64_t incarnation; int signal; };  // to a plain worker: as it is if caught, else TERM
struct CaptureStacks { std::vector<int> slots; std::string reason; };
struct AskStop { int64_t step; std::string reason; };  // STOP(step) to all joined workers
struct GoStop { int64_t step; };
struct PersistCommon { std::string reason; };  // persist the newest snapshot that all ranks have, without the trainer's help
struct ArmTimer { uint64_t timer; absl::Duration at; };  // steady; a timer id armed again replaces the former
struct DisarmTimer { uint64_t timer; };
struct RecordFault { FaultRecord fault; int budget_used; int budget; };  // for report, ledger and console
struct FinishJob { int exit_code; std::string reason; };  // last action; all workers have ended

using JobAction = std::variant<SpawnWorker, AbortGeneration, CommitGeneration, KillWorker, ForwardSignal, CaptureStacks, AskStop,
                               GoStop, PersistCommon, ArmTimer, DisarmTimer, RecordFault, FinishJob>;

enum class JobPhase : uint8_t { kForming, kRunning, kReforming, kStopping, kEnding, kDone };

// Not safe for concurrent use. Copyable: a test may fork a state and try two futures.
class Job {
 public:
  explicit Job(JobOptions options);

  // Consumes one event. Events of an incarnation that is not the slot's present one are dropped.
  std::vector<JobAction> Step(const JobEvent& event, const JobView& view);

  JobPhase phase() const { return phase_; }
  uint64_t generation() const { return generation_; }  // the newest that was committed, 0 before the first
  const JobOptions& options() const { return options_; }
  const std::vector<FaultRecord>& faults() const { return faults_; }

 private:
  JobOptions options_;
  JobPhase phase_ = JobPhase::kForming;
  uint64_t generation_ = 0;
  std::vector<FaultRecord> faults_;
};

}  // namespace outlast
