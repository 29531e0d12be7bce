// The job's state machine for one node: a pure function from (state, event, now) to (state,
// actions).
//
//   FORMING ── start: all slots spawned ──> RUNNING ── fault, verdict ──> REFORMING ── all staged
//   ──> RUNNING ... RUNNING ── stop asked ──> STOPPING ── all ended ──> DONE            any ──
//   budget used up ──> ENDING ──> DONE
//
// A *slot* is the place that a rank holds: on one node slot and rank are the same number. Nothing
// here sleeps, reads a clock or touches a process: the keeper does what the actions say.
//
// Several nodes are Coordinator and NodeAgent (coordinator.h). This is their one-node case in one
// machine, with the same events and actions of workers, the same fault policy and stop agreement: a
// keeper that drives the pair through an in-process transport would do what this one does.
//
// Joined and plain. A worker is *plain* until it joins, and so is a slot whose last process never
// joined. A joined worker whose peer fails survives: it is told to abort, unwinds, is staged and
// enters the next generation. A dead slot that had joined is refilled at once, and the generation
// waits until the new process is staged. Plain workers can't unwind: when one fails, all plain ones
// are killed, and only when they are gone and the next generation is committed they are spawned
// again; nobody waits for them to be staged. The fault of a joined worker leaves plain ones alone:
// they may be peers that are slow to start, and enter whatever generation is open when they join. A
// plain program that ended with 0 is done, and is not run again when another one fails.
//
// A generation forms in two phases: AbortGeneration(g) and refills, then one CommitGeneration(g+1)
// when everybody whom it waits for is staged (see CommitGeneration for those who come later). A
// fault while re-forming does not change the target. Everything that is waited for has a deadline,
// and the machine arms one timer for the nearest.
//
// Finished ranks. A generation is made of processes that are all there: whoever enters it may wait
// for any rank of the world (a collective of all of them, a restore). So when a fault comes after
// some joined ranks have finished, their slots are filled again too: the new processes restore the
// newest step, find little or nothing to do, and end with 0 once more. That is always right, and
// costs a start; that a rank is needed for nothing any more cannot be known here. It is charged to
// nobody. A finished process that still lives (kLeaving) has the soft abort to end by itself. Where
// all who had to unwind have finished instead, no generation forms.
//
// First failure. A member of the aborted generation that dies by itself before the next commit
// failed after a peer: it is recorded as a victim, refilled and not charged. Each process can be
// one once, so nothing loops uncharged: a replacement that dies, or is not staged in time, is
// charged like a first fault. What ends after we sent it a signal is never a cause.
//
// Stops. StopAsked names S = newest step + 2 (AskStop); late answers double the margin; all on
// time: GoStop(S). When all sealed S and ended, and the save's end is known (StopPersisted), the
// job is over. A worker that dies instead, or S that does not come early enough before `grace`:
// AbortGeneration, PersistCommon, SIGTERM, SIGKILL at `grace`. Plain workers get the signal itself.
// A stop never restarts anybody.
//
// A killed agent. Memo is what its successor needs; a Job that is made of one goes on at its
// StartEvent: the memo's generation is aborted, its living workers are the survivors, and what they
// had been asked to do has new deadlines.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "outlast/elastic/actions.h"
#include "outlast/elastic/events.h"
#include "outlast/elastic/exit_code.h"
#include "outlast/elastic/fault.h"
#include "outlast/elastic/job_memo.h"
#include "outlast/elastic/job_options.h"
#include "outlast/elastic/policy.h"
#include "outlast/elastic/stop_agreement.h"

namespace outlast {

enum class JobPhase : uint8_t { kForming, kRunning, kReforming, kStopping, kEnding, kDone };

// Not safe for concurrent use. Copyable: a test may fork a state and try two futures.
class Job {
 public:
  // `seed`: of the back-off (BackOffSeed).
  explicit Job(JobOptions options, uint64_t seed = 0);
  // Goes on with the workers of an agent that is gone. `memo` has a slot for each of
  // options.world. What of its processes has ended meanwhile is told after the StartEvent.
  Job(JobOptions options, const JobMemo& memo, uint64_t seed = 0);

  // Consumes one event. Events of an incarnation that is not the slot's present one are dropped.
  // The keeper gives what a worker had sent (WorkerFinished, WorkerStopped) before its WorkerEnded.
  std::vector<JobAction> Step(const JobEvent& event, const JobView& view);

  JobPhase phase() const { return phase_; }
  uint64_t generation() const {
    return generation_;
  }  // the newest that was committed, 0 before the first
  const JobOptions& options() const { return options_; }
  const std::vector<FaultRecord>& faults() const { return faults_; }
  const FaultHistory& history() const { return history_; }
  // Every slot's work is under way in an open generation, or done.
  bool is_whole() const;
  JobMemo Memo() const;

 private:
  static constexpr uint32_t kInBody = 1;  // the phase of a fault whose worker had joined

  enum class State : uint8_t {
    kNone,         // no process; due: not spawned before
    kStarting,     // runs, not staged; plain ones stay here. due (while re-forming): replaced
    kStaged,       // waits for a generation. due (while running): it left the body by itself
    kActive,       // in the body of the committed generation
    kUnwinding,    // was told to abort. due: replaced
    kStopped,      // sealed the stop's step, and leaves
    kLeaving,      // its body returned OK; it may live on. due (while re-forming): replaced
    kTerminating,  // we sent SIGTERM. due: SIGKILL
    kKilled,       // we sent SIGKILL, or it is dying by itself. due: given up
    kExited,       // joined, and ended with 0 without a word. due: a fault if others still run
    kDone,         // its work is done, no process
    kAbandoned,    // SIGKILL did not end it
  };
  struct Slot {
    State state = State::kNone;
    uint64_t incarnation = 0;
    uint64_t born = 0;      // the generation that it was spawned for
    bool joined = false;    // the present process has
    bool plain = true;      // the last process never joined
    bool finished = false;  // its body returned OK
    bool sealed = false;    // the stop's step
    bool adopted = false;   // of another agent, and not heard of since: it may be behind the memo
    absl::Duration spawned_at;
    absl::Duration due = absl::InfiniteDuration();
  };

  // Events (job.cc).
  void On(const StartEvent&);
  void On(const WorkerJoined& event);
  void On(const WorkerStaged& event);
  void On(const WorkerFinished& event);
  void On(const WorkerStopped& event);
  void On(const WorkerDying& event);
  void On(const WorkerEnded& event);
  void On(const VerdictGiven& event);
  void On(const StopAsked& event);
  void On(const StopAnswered& event);
  void On(const StopPersisted& event);
  void On(const WantedSaveEnded&) {}  // of several nodes alone
  void On(const CheckpointCommitted& event);
  void On(const RestoreFailed& event);
  void On(const RootRefused& event);
  void On(const RootLost& event);
  void On(const FinalSaveFailed& event);
  void On(const TimerFired& event);

  // A former agent's workers (job_adopt.cc).
  void GoOn();
  void GoOnWith(Slot& slot);
  std::vector<int> LateForAdoption() const;
  void BlameLateForAdoption(const std::vector<int>& late);

  // Faults and re-forming (job_reform.cc).
  void EndedWhileRunning(int index, State before, bool joined, const ProcessEnd& end);
  FaultRecord MakeRecord(FaultClass fault_class, int index, const ProcessEnd& end,
                         std::string_view what, uint32_t phase) const;
  // Records and judges; the job is re-forming or ending afterwards.
  void Fault(int index, FaultRecord fault);
  // A victim's costs nothing.
  void Charge(int index, const FaultRecord& fault);
  void Reform(const std::string& reason);
  void TerminatePlain(const std::string& reason);
  void TryCommit();
  void FillTheFinishedAgain();
  void Refill();
  void Spawn(int index, uint64_t generation);
  void Vacate(Slot& slot);
  void Refund();

  // Stops and ends (job_stop.cc).
  void BeginStop(int signal, const std::string& reason);
  void Ask(int64_t newest_step, const std::string& reason);
  void TryGo();
  void GiveUpStop(const std::string& reason);
  void EndStop();
  void Hurry();
  void End(JobOutcome outcome, int exit_code, const std::string& reason);
  void Persist(const std::string& reason, absl::Duration due);
  void FinishWhenAllEnded();
  void FinishAs(int exit_code, std::string reason, std::optional<int> code_if_saved = {});
  int StopCode() const;
  std::string StopReason() const;

  // Deadlines and processes (job.cc).
  void LookAtDeadlines();
  void SlotIsDue(int index);
  void ArmNearest();
  absl::Duration Nearest() const;
  void Abort(const std::string& reason);
  void Terminate(int index, absl::Duration kill_at, const std::string& reason);
  void Kill(int index, const std::string& reason);
  void Abandon(int index);
  Slot* Present(int slot, uint64_t incarnation);
  static bool IsAlive(const Slot& slot);
  static bool IsDying(const Slot& slot);
  // A process that has not joined, in a slot that need not.
  static bool IsPlain(const Slot& slot) { return slot.plain && !slot.joined; }
  bool OthersRun(int index) const;
  absl::Duration patience(const Slot& slot) const;
  template <typename Action>
  void Emit(Action action) {
    actions_.emplace_back(std::move(action));
  }

  JobOptions options_;
  uint64_t seed_;
  JobPhase phase_ = JobPhase::kForming;
  uint64_t generation_ = 0;
  uint64_t aborted_ = 0;  // the newest generation that was aborted
  uint64_t last_incarnation_ = 0;
  std::vector<Slot> slots_;
  std::vector<int> attempts_;  // spawns of each slot so far
  bool any_joined_ = false;    // ever
  std::vector<FaultRecord> faults_;
  FaultHistory history_;
  absl::Duration no_spawn_before_ = -absl::InfiniteDuration();
  int64_t newest_step_ = 0;
  int64_t step_committed_ = 0;
  int64_t progress_base_ = 0;        // the newest step at the last progress
  std::optional<int> late_failure_;  // exit code of a worker that failed after its work was done
  std::string abandoned_;            // who did not end, for people

  // Of a stop.
  int stop_signal_ = 0;
  std::string stop_reason_;
  int interrupts_ = 0;
  StopAgreement stop_;
  bool plain_was_signalled_ = false;
  absl::Duration seal_due_ = absl::InfiniteDuration();
  absl::Duration kill_due_ = absl::InfiniteDuration();
  absl::Duration stop_due_ = absl::InfiniteDuration();
  absl::Duration persist_due_ = absl::InfiniteDuration();  // finite: StopPersisted is awaited
  bool durable_ = false;
  std::optional<std::string> root_lost_;          // to whom; for ever
  std::optional<std::string> final_save_failed_;  // why; a later commit mends it
  // Why the last state is not in the root; none: it is.
  const std::optional<std::string>& not_in_root() const {
    return root_lost_ ? root_lost_ : final_save_failed_;
  }
  int end_code_ = 1;
  std::string end_reason_;

  std::optional<absl::Duration> armed_;
  absl::Duration now_;  // of the present Step
  std::vector<JobAction> actions_;
};

}  // namespace outlast
