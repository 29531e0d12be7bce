// The agent's state machine: the slots of one node under a coordinator (coordinator.h draws the
// split of duties). A pure function from (state, event, view) to (state, actions).
//
//   link      DOWN ── StreamUp: HELLO ──> GREETING ── WELCOME ──> UP ── StreamDown ──> DOWN ...
//   role      SPARE ── named in COMMIT ──> ACTIVE ── not named ──> SPARE; any ── EXCLUDE ──> ended
//   slot      EMPTY -> STARTING -> STAGED -> ACTIVE -> UNWINDING -> STAGED ...; LEAVING -> DONE
//             any ── deadline ──> TERMINATING ──> KILLED ──> EMPTY | ABANDONED
//
// A *slot* is a place for one process on this node, 0 .. capacity-1; the map gives it a rank.
//
// While the coordinator is away the workers train on, and what it must hear is kept: faults, a wish
// to leave, reports of saves. After `coordinator_grace` what all have sealed is persisted, and the
// agent ends with 84. It obeys the highest (incarnation, generation, round) that it has seen.
//
// Workers join, are staged, finish and end as in job.h, with the same deadlines; so do plain ones.
// A joined rank that has finished is filled again for each generation that forms after it (why:
// job.h); a plain one that ended with 0 is done for ever.
// A process that dies while its generation unwinds is replaced at once (the coordinator sees a
// victim); the death of a replacement is answered by the next round only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "outlast/base/id.h"
#include "outlast/elastic/actions.h"
#include "outlast/elastic/elastic_options.h"
#include "outlast/elastic/events.h"
#include "outlast/elastic/exit_code.h"
#include "outlast/elastic/messages.h"
#include "outlast/elastic/stop_agreement.h"

namespace outlast {

// --- Events besides those of workers (events.h; `slot` and `culprit` are slots of this node) ---

struct StreamUp {};
struct StreamDown {};  // or it could not be opened
struct CoordinatorSaid {
  control::CoordinatorMessage message;
};
// All ranks here have restored `candidate` of the present generation, or one could not.
struct RanksRestored {
  uint64_t generation = 0;
  int candidate = 0;
  bool ok = false;
  std::string detail;
};
// For the coordinator, as it is.
struct SaveReported {
  control::SaveReport report;
};

using NodeEvent = std::variant<StartEvent, StreamUp, StreamDown, CoordinatorSaid, WorkerJoined,
                               WorkerStaged, WorkerFinished, WorkerStopped, WorkerDying,
                               WorkerEnded, VerdictGiven, StopAsked, StopAnswered, StopPersisted,
                               WantedSaveEnded, RanksRestored, SaveReported, TimerFired>;

// --- Actions besides those of actions.h ---

struct OpenStream {};  // StreamUp or StreamDown follows
struct DropStream {
  std::string reason;
};
// The driver fills in what it alone sees (control::Prepared).
struct SendToCoordinator {
  control::AgentMessage message;
};
struct SayHello {
  control::Hello hello;
};
// Like CommitGeneration, with the members' ranks: a slot without one has rank -1. The members enter
// on the same conditions.
struct OpenGeneration {
  control::Commit commit;
  std::vector<int> ranks;  // by slot
};
// Try this candidate of the present generation's COMMIT.
struct TryCandidate {
  uint64_t generation = 0;
  int candidate = 0;
};

// RecordFault: what this node reports, for its own records; the coordinator alone counts budgets
// (both are 0 here). FinishJob: the agent ends with this code. Its last action.
using NodeAction =
    std::variant<OpenStream, DropStream, SendToCoordinator, SayHello, SpawnWorker, AbortGeneration,
                 OpenGeneration, TryCandidate, KillWorker, ForwardSignal, CaptureStacks, AskStop,
                 GoStop, PersistCommon, WantSave, ArmTimer, DisarmTimer, RecordFault, FinishJob>;

struct NodeOptions {
  ElasticOptions elastic;  // the same for all nodes
  Terms terms;             // that this agent was started with
  std::string node;
  uint64_t incarnation = 0;  // another one at each start of the agent
  int capacity = 1;
  std::string segment;
  int slot_hint = -1;
  std::vector<std::string> addresses;
  std::string peer_address;
  std::string measure_address;
};

// Not safe for concurrent use. Copyable.
class NodeAgent {
 public:
  explicit NodeAgent(NodeOptions options);

  // The driver gives what a worker had sent before its WorkerEnded.
  std::vector<NodeAction> Step(const NodeEvent& event, const JobView& view);

  uint64_t generation() const { return committed_; }  // newest that it was committed to, 0: none
  uint64_t aborted() const { return aborted_; }       // this one and older ones are unwound
  // It takes part in a stop, or ends.
  bool is_stopping() const { return stopping_; }
  bool is_over() const { return is_over_; }
  // The rank that `slot` holds, or is being prepared for; -1: none.
  int rank(int slot) const { return slots_[static_cast<size_t>(slot)].rank; }
  // Of the newest generation that was committed or is being prepared.
  int world() const { return world_; }
  const Id128& run_id() const { return run_id_; }  // zero before the first welcome
  const NodeOptions& options() const { return options_; }

 private:
  enum class Link : uint8_t { kDown, kOpening, kGreeting, kUp };
  enum class State : uint8_t {
    kEmpty,        // held: not filled before the next round
    kStarting,     // runs, not staged; plain ones stay here
    kStaged,       // waits for a generation. due: it left the body by itself
    kActive,       // in the body of the committed generation
    kUnwinding,    // was told to abort. due: replaced
    kStopped,      // sealed the stop's step, and leaves
    kLeaving,      // its body returned OK. due (while preparing): replaced
    kTerminating,  // SIGTERM was sent. due: SIGKILL
    kKilled,       // SIGKILL was sent, or it is dying by itself. due: given up
    kExited,       // joined, and ended with 0 without a word
    kDone,         // its work is done, no process
    kAbandoned,    // SIGKILL did not end it
  };
  struct Slot {
    State state = State::kEmpty;
    int rank = -1;
    uint64_t incarnation = 0;
    uint64_t born = 0;
    bool joined = false;    // the present process has
    bool plain = true;      // the last process never joined
    bool finished = false;  // its body returned OK
    bool sealed = false;    // the stop's step
    bool held = false;
    bool stopped = false;  // a verdict found it in T state
    absl::Duration spawned_at;
    absl::Duration due = absl::InfiniteDuration();
    int attempts = 0;
  };
  static constexpr uint32_t kInBody = 1;

  // The link (node_link.cc).
  void On(const StartEvent&);
  void On(const StreamUp&);
  void On(const StreamDown&);
  void On(const CoordinatorSaid& event);
  void On(const RanksRestored& event);
  void On(const SaveReported& event);
  void Hear(const control::Welcome& welcome);
  void Hear(const control::Refused& refused);
  void Hear(const control::Prepare& prepare);
  void Hear(const control::Commit& commit);
  void Hear(const control::Next& next);
  void Hear(const control::Stop& stop);
  void Hear(const control::Go& go);
  void Hear(const control::Exclude& exclude);
  void Hear(const control::Collect& collect);
  void Hear(const control::Done& done);
  void Hear(const control::Measure&) {}  // the driver's
  void Hear(const control::Save& save);
  void LinkLost();
  void Drop(const std::string& reason);
  void SendBeat();
  void LookAtLink();
  template <typename Message>
  void Send(Message message) {
    if (link_ == Link::kUp) Emit(SendToCoordinator{std::move(message)});
  }

  // Workers (node_agent.cc).
  void On(const WorkerJoined& event);
  void On(const WorkerStaged& event);
  void On(const WorkerFinished& event);
  void On(const WorkerStopped& event);
  void On(const WorkerDying& event);
  void On(const WorkerEnded& event);
  void On(const VerdictGiven& event);
  void On(const TimerFired& event);
  void EndedInGeneration(int index, State before, bool joined, const ProcessEnd& end);
  void Report(int index, FaultClass fault_class, const ProcessEnd& end, std::string what,
              uint32_t phase, std::string detail);
  void Refill();
  void TryPrepared();
  void TryCommitted();
  void FillAgain(Slot& slot);
  bool IsReady(const Slot& slot) const;
  void Abort(const std::string& reason);
  void Spawn(int index, uint64_t generation);
  void Vacate(Slot& slot);
  void Terminate(int index, absl::Duration kill_at, const std::string& reason);
  void Kill(int index, const std::string& reason);
  void LookAtSlots();
  void SlotIsDue(int index);
  Slot* Present(int slot, uint64_t incarnation);
  static bool IsAlive(const Slot& slot);
  static bool IsDying(const Slot& slot);
  static bool IsPlain(const Slot& slot) { return slot.plain && !slot.joined; }
  absl::Duration patience(const Slot& slot) const;
  bool is_preparing() const { return target_ > committed_; }
  // It holds ranks of the newest generation. A former member has nothing that a save wants.
  bool is_member() const { return commit_.map.Has(options_.node, options_.incarnation); }

  // Stops and ends (node_stop.cc).
  void On(const StopAsked& event);
  void On(const StopAnswered& event);
  void On(const StopPersisted& event);
  void On(const WantedSaveEnded& event);
  void BeginStop(int signal, absl::Duration within);
  void AskWorkers(int64_t step, const std::string& reason);
  void AnswerStop();
  void GiveUpStop(const std::string& reason, bool keep);
  void EndStop();
  void EndAll(int exit_code, const std::string& reason, bool keep);
  void Persist(const std::string& reason);
  void LookAtStop();
  void FinishWhenAllEnded();
  void Finish(int exit_code, const std::string& reason);

  absl::Duration Nearest() const;
  void ArmNearest();
  template <typename Action>
  void Emit(Action action) {
    actions_.emplace_back(std::move(action));
  }

  NodeOptions options_;
  std::vector<Slot> slots_;
  uint64_t last_process_ = 0;
  bool any_joined_ = false;
  int64_t newest_step_ = 0;
  int64_t step_committed_ = 0;  // that this node knows of
  int world_ = 0;

  Link link_ = Link::kDown;
  absl::Duration link_due_ = absl::InfiniteDuration();  // open again, or give up waiting
  absl::Duration back_off_ = absl::ZeroDuration();
  uint64_t link_tries_ = 0;  // that failed
  absl::Duration beat_due_ = absl::InfiniteDuration();
  absl::Duration alone_due_ = absl::InfiniteDuration();  // the coordinator grace
  bool was_welcome_ = false;
  Id128 run_id_;
  uint64_t coordinator_ = 0;  // its highest incarnation
  uint64_t beats_ = 0;
  bool beat_now_ = false;
  std::vector<control::Fault> faults_;  // that the coordinator may not have heard of
  std::vector<control::SaveReport> reports_;
  std::optional<control::Leave> leave_;
  uint64_t wanted_save_ = 0;  // the newest SAVE's number
  std::optional<control::Saved> saved_;

  uint64_t committed_ = 0;
  uint64_t aborted_ = 0;
  control::Commit commit_;
  std::optional<control::Restored> restored_;
  bool said_committed_ = false;
  uint64_t target_ = 0;  // above committed_: is prepared
  uint64_t round_owner_ = 0;
  uint32_t round_ = 0;
  bool said_staged_ = false;
  absl::Duration no_spawn_before_ = -absl::InfiniteDuration();

  bool stopping_ = false;
  int interrupts_ = 0;
  StopAgreement stop_;
  bool gave_up_ = false, answered_ = false, went_ = false, durable_ = false, said_bye_ = false;
  absl::Duration seal_due_ = absl::InfiniteDuration();
  absl::Duration kill_due_ = absl::InfiniteDuration();
  absl::Duration stop_due_ = absl::InfiniteDuration();
  absl::Duration persist_due_ = absl::InfiniteDuration();  // finite: StopPersisted is awaited
  absl::Duration farewell_due_ = absl::InfiniteDuration();
  std::optional<std::pair<int, std::string>> end_;  // known exit code
  bool is_over_ = false;

  std::optional<absl::Duration> armed_;
  absl::Duration now_;
  std::vector<NodeAction> actions_;
};

}  // namespace outlast
