// The coordinator's state machine: a pure function from (state, event, now) to (state, actions).
//
//   who                 | coordinator (one a job)             | node agent (one a node,
//   node_agent.h)
//   --------------------|-------------------------------------|------------------------------------
//   membership          | which agent is there, who may join  | says hello, beats, comes back
//   ranks               | Assign: rank -> slot of a node      | slot -> process
//   a fault             | budgets, cause or victim, what next | sees it, reports it, refills slots
//   a generation        | PREPARE, COMMIT, NEXT               | abort, unwind, stage, enter
//   processes           | -                                   | spawn, soft abort, TERM, KILL, reap
//   a stop              | the step, GO, when to give up       | its ranks' answers, saves, grace
//   the end             | exit code of the job                | ends its workers, exits with it
//
// `Job` (job.h) is both parts for one node in one machine; this pair, joined in one process, says
// the same with messages. They share the fault policy (policy.h) and the stop agreement.
//
//   FORMING ── enough members ──> REFORMING ── all COMMITTED, RESTORED ──> RUNNING
//   RUNNING ── an agent is lost ──> SUSPECT ── back in its grace ──> RUNNING
//   RUNNING, SUSPECT ── fault, grace over, leave, growth ──> REFORMING
//   REFORMING: prepare (rounds of PREPARE, until all are staged) -> commit -> restore
//   any ── stop asked ──> DRAINING ──> DONE         any ── budget used up ──> ENDING ──> DONE
//
// A *round* is one PREPARE to all whom it concerns: a fault, a loss or a newcomer that is needed
// while a generation forms starts another round of the same generation; after its COMMIT the next
// generation forms. A COMMIT names the map of the newest round.
//
// A COMMIT's ranks are all there: who enters a generation may wait for any of them. So a joined
// rank that has finished is no exception once a generation forms after it: its slot is filled
// again, on its node or where the dead's are (job.h says why). Only a plain rank that ended with 0
// is done for ever (Commit::finished). A node that is lost when all its ranks have finished costs
// nothing until then.
//
// What must not be forgotten goes through the journal (coordinator_state.h): AppendJournal stands
// before the messages that follow from it, and the driver executes actions in order, so nothing is
// sent before its record is on disk. When an append fails the driver drops the rest of the actions
// and gives JournalRefused. A journal belongs to one coordinator at a time: the driver refuses the
// append of one whose incarnation is not the newest in it.
//
// The transport closes a stream whose peer is silent (keepalive, within seconds), on both sides:
// agents learn only by that of a coordinator that was stopped or cut off. Beats go one way.
//
// A link between agents that both reach the coordinator may be cut: the lead's to a follower, or
// one of those between followers that COMMIT tells them to watch. Beats say so; it ends nothing by
// itself, since training may have a network of its own. When ranks fail while it is cut, the node
// that is cut off (cut_links.h) is to blame, not those who failed: it is treated as lost, and comes
// back as a spare that is taken last. A link between followers that never stood is not cut, unless
// one of its ends is in doubt for a cut before: a job whose followers are kept apart on purpose
// goes on as if nobody watched.
//
// A world that changes on request (a node leaves, a newcomer lets it grow) has no use for what
// memory holds, so all ranks save a step first (SAVE to the agent of rank 0), and train on until it
// is durable; then the next generation forms, and restores it. That is waited for no longer than a
// leaving node lets its ranks train; a world that would grow stays as it is where nothing was
// saved. A fault ends the wait. Where a spare takes over, the world stays as it is, and nothing is
// saved first. None of this is in the journal: who leaves says so again to a restarted coordinator,
// and newcomers say hello again.
//
// A newcomer that says where its link can be measured measures it with partners that are named here
// (link_rates.h) before it is given ranks: the first generation waits for that, and later ones form
// without it. One that is known to be slow is excluded. Who cannot be measured in time passes.
//
// Time: each host's own steady clock, which no message carries. A restarted coordinator counts all
// deadlines from its own start.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/elastic/actions.h"
#include "outlast/elastic/coordinator_state.h"
#include "outlast/elastic/cut_links.h"
#include "outlast/elastic/elastic_options.h"
#include "outlast/elastic/events.h"
#include "outlast/elastic/exit_code.h"
#include "outlast/elastic/link_rates.h"
#include "outlast/elastic/messages.h"
#include "outlast/elastic/stop_agreement.h"

namespace outlast {

// --- Events ---

// An agent's first words on a new stream. The transport has checked the proof of the token;
// `distrust` says what was wrong with it, empty: nothing.
struct HelloReceived {
  uint64_t stream = 0;  // never used twice
  control::Hello hello;
  std::string address;  // that it connected from
  std::string distrust;
};
struct StreamLost {
  uint64_t stream = 0;
};
struct AgentSaid {
  uint64_t stream = 0;
  control::AgentMessage message;
};
// An append failed, or another coordinator has written to the journal.
struct JournalRefused {
  std::string detail;
};

// StartEvent first. StopAsked: by an operator, for the whole job.
using CoordinatorEvent = std::variant<StartEvent, HelloReceived, StreamLost, AgentSaid, StopAsked,
                                      JournalRefused, TimerFired>;

// --- Actions ---

struct AppendJournal {
  std::string bytes;
};
struct SendToAgent {
  uint64_t stream = 0;
  control::CoordinatorMessage message;
};
struct CloseStream {
  uint64_t stream = 0;
  std::string reason;
};
// One line for people, about the whole job.
struct Announce {
  std::string line;
};
// Another coordinator has the job: say so, and touch nothing any more. The last action.
struct StepDown {
  std::string reason;
};

// After FinishJob the driver should serve hellos for a while: late agents are told the job's end.
using CoordinatorAction = std::variant<AppendJournal, SendToAgent, CloseStream, ArmTimer,
                                       DisarmTimer, RecordFault, FinishJob, Announce, StepDown>;

enum class CoordinatorPhase : uint8_t {
  kForming,
  kRunning,
  kSuspect,
  kReforming,
  kDraining,
  kEnding,
  kDone,
  kSteppedDown,
};

// The candidates that all bytes are there for, best first: snapshots that the agents hold, newest
// first, then the newest checkpoint.
std::vector<control::ResumeCandidate> ChooseCandidates(
    const std::vector<control::HeldSnapshot>& held, int64_t step_committed);

// Not safe for concurrent use. Copyable.
class Coordinator {
 public:
  // `state` is what the journal holds; of a new job it is empty, and `run_id` names the run. Its
  // incarnation is above the journal's newest, and at least `least_incarnation`.
  Coordinator(ElasticOptions options, CoordinatorState state, const Id128& run_id,
              uint64_t least_incarnation = 1);

  std::vector<CoordinatorAction> Step(const CoordinatorEvent& event, absl::Duration now);

  CoordinatorPhase phase() const { return phase_; }
  const CoordinatorState& state() const { return state_; }
  const ElasticOptions& options() const { return options_; }
  // Messages that came too late or out of turn, such as faults of older generations.
  uint64_t ignored() const { return ignored_; }
  // The world is to change on request, once a step is saved.
  bool awaits_save() const { return save_.has_value(); }
  // Agents of the job whose stream is down: they may come back.
  int absent() const;

 private:
  enum class Stage : uint8_t { kPreparing, kWaiting, kCommitting, kRestoring };

  struct Agent {
    int id = 0;  // in the stop agreement
    std::string node;
    uint64_t incarnation = 0;
    uint64_t stream = 0;  // 0: lost
    int capacity = 0;
    std::string segment;
    int slot_hint = -1;
    std::string address;
    std::string peer_address;
    std::string measure_address;
    bool saves_on_request = false;
    bool watches_links = false;
    absl::Duration measured_due = -absl::InfiniteDuration();  // its link is waited for until then
    absl::Duration heard;
    absl::Duration lost_due = absl::InfiniteDuration();  // finite: lost, in its grace
    bool holds_ranks = false;                            // of the newest generation
    bool concerned = false;                              // by the present round
    uint32_t prepared_round = 0;
    bool staged = false;
    absl::Duration prepare_due = absl::InfiniteDuration();
    absl::Duration ack_due = absl::InfiniteDuration();
    uint64_t committed = 0;
    int restored = -1;  // the newest candidate that it restored
    bool bye = false;
    bool leaving = false;
    absl::Duration save_due = absl::InfiniteDuration();  // leaving: nobody saves first after that
    std::string bootstrap;
    std::vector<control::HeldSnapshot> snapshots;
    std::vector<std::string> unreached, unmet;  // as its newest beat says, of the newest generation
    // Other processes that claim its node's name, by incarnation: since when.
    std::map<uint64_t, absl::Duration> claims;
  };
  // A rank that ended with 0 without having finished.
  struct EarlyExit {
    std::string node;
    uint64_t agent = 0;
    control::Fault fault;
    absl::Duration due;
  };

  // Events (coordinator.cc).
  void On(const StartEvent&);
  void On(const HelloReceived& event);
  void On(const StreamLost& event);
  void On(const AgentSaid& event);
  void On(const StopAsked& event);
  void On(const JournalRefused& event);
  void On(const TimerFired& event);
  void Hear(Agent& agent, const control::Beat& beat);
  void Hear(Agent& agent, const control::Fault& fault);
  void Hear(Agent& agent, const control::Prepared& prepared);
  void Hear(Agent& agent, const control::Committed& committed);
  void Hear(Agent& agent, const control::Restored& restored);
  void Hear(Agent& agent, const control::Stopping& stopping);
  void Hear(Agent& agent, const control::Leave& leave);
  void Hear(Agent& agent, const control::SaveReport& report);
  void Hear(Agent& agent, const control::Bye& bye);
  void Hear(Agent& agent, const control::Measured& measured);
  void Hear(Agent& agent, const control::Saved& saved);

  // Membership (coordinator.cc).
  bool IsOfAnotherRun(const control::Hello& hello) const;
  std::optional<control::Refused> WhyNot(const HelloReceived& event);
  std::optional<control::Refused> WhyTaken(const HelloReceived& event);
  std::string WhyUnlike(const control::Hello& hello) const;
  bool TermsBind(const std::string& node) const;
  void BringUpToDate(Agent& agent);
  void Lose(Agent& agent, const std::string& reason);
  void Remove(std::string node, const std::string& reason,
              FaultClass fault_class = FaultClass::kNodeLost);
  void Release(Agent& agent);
  void Exclude(const std::string& node, const std::string& reason);
  bool IsExcluded(const std::string& node) const;
  bool HasWork(const Agent& agent) const;
  bool IsEarlyExit(int rank) const;
  // Whether a process of this node never joined, by the newest map.
  bool HoldsPlain(const std::string& node, uint64_t incarnation) const;
  AssignRequest Request() const;
  bool RestCanGoOn() const;

  // Faults and generations (coordinator_reform.cc).
  void NodeLost(const std::string& node, uint64_t incarnation, const std::string& reason,
                FaultClass fault_class);
  void Charge(const std::string& node, uint64_t agent, const control::Fault& fault);
  void Refund(int64_t step_committed);
  void Reform(const std::string& reason);
  void StartRound();
  void SendPrepare(Agent& agent);
  void TryForm();
  void TryCommit();
  void TryRun();
  void SendCommit(Agent& agent);
  void TryNext(const std::string& why);
  void TryGrow();
  // The plain ranks, and those of them that are done, as `map` numbers them.
  std::vector<int> PlainRanks(const RankMap& map) const;
  std::vector<int> DoneRanks(const RankMap& map) const;
  bool WouldShrink() const;
  bool is_preparing() const;

  // Changes of the world on request (coordinator_change.cc).
  void LeaveWorld();
  void LetThemGo();
  bool AskForSave(const std::string& why, bool forced, absl::Duration due);
  void SendSave(const Agent& agent);
  void EndSave(const std::string& detail);
  void MayGrow();
  void LookAtChanges();
  bool IsLead(const Agent& agent) const;

  // The agents' links (coordinator_links.cc).
  void TryMeasure();
  void StartMeasurement(const std::string& one, const std::string& other);
  bool IsMeasuring(const std::string& node) const;
  void EndMeasurement(size_t index, double megabytes_per_second, const std::string& detail);
  void LookAtMeasurements();
  bool IsBeingMeasured(const std::string& node, const Agent& agent) const;
  bool IsBeingJudged(const std::string& node) const;
  std::vector<std::string> Measurable() const;
  absl::Duration NearestMeasurement() const;

  // Links that are cut (coordinator_cuts.cc).
  void RemoveWhoIsCutOff();
  bool IsShunned(const std::string& node) const;
  CutLinks LinksNow();
  const LinkPlan& Links();
  std::vector<control::NodeAddress> LinksToWatch(const Agent& agent);
  void TellOfUnmet(const Agent& agent);

  // Stops and ends (coordinator_stop.cc).
  void BeginStop(int signal, const std::string& reason);
  bool SomeStillJoin() const;
  void AskAgents(int64_t newest_step);
  void GiveUpStop(const std::string& reason, bool hurry);
  void SendStop(Agent& agent);
  void End(JobOutcome outcome, int exit_code, const std::string& reason);
  void TryFinish();
  void FinishAs(int exit_code, const std::string& reason);
  int StopCode() const;

  void LookAtDeadlines();
  void LookAtAgents();
  void TellWhoIsHere();
  std::string WhoIsHere();
  absl::Duration Nearest() const;
  void ArmNearest();
  absl::Duration JobTime() const { return job_base_ + (now_ - started_); }
  void Append(const JournalPayload& record);
  template <typename Message>
  void Send(const Agent& agent, Message message) {
    if (agent.stream != 0) Emit(SendToAgent{agent.stream, std::move(message)});
  }
  template <typename Action>
  void Emit(Action action) {
    actions_.emplace_back(std::move(action));
  }

  ElasticOptions options_;
  CoordinatorState state_;
  Id128 run_id_;  // of a new job
  uint64_t least_incarnation_;
  CoordinatorPhase phase_ = CoordinatorPhase::kForming;
  Stage stage_ = Stage::kPreparing;
  bool started_yet_ = false;
  absl::Duration started_, job_base_;
  std::map<std::string, Agent> agents_;  // by node
  std::unordered_map<uint64_t, std::string> nodes_of_streams_;
  int next_id_ = 0;
  int64_t newest_step_ = 0;
  uint64_t ignored_ = 0;

  // Forming.
  absl::Duration join_due_ = absl::InfiniteDuration();
  absl::Duration last_call_due_ = absl::InfiniteDuration();

  // What people are told while too few are there.
  bool may_have_changed_ = true;
  int node_slots_ = 0;  // of a node; 0: none has come yet
  std::string told_;
  absl::Duration told_at_ = -absl::InfiniteDuration();
  absl::Duration tell_due_ = absl::InfiniteDuration();

  // The agents' links.
  struct Measurement {
    uint64_t number;
    std::string one, other;  // the first one calls
    absl::Duration due;
  };
  LinkRates rates_;
  std::vector<Measurement> measurements_;  // under way
  uint64_t last_measurement_ = 0;
  absl::Duration measuring_until_ = -absl::InfiniteDuration();  // of all newcomers

  // Of the generation that forms.
  uint32_t round_ = 0;
  RankMap provisional_;
  std::string reform_reason_;
  bool end_plain_ = false;
  absl::Duration no_spawn_before_ = -absl::InfiniteDuration();
  absl::Duration staged_due_ = absl::InfiniteDuration();
  absl::Duration wait_due_ = absl::InfiniteDuration();  // for enough members
  bool trusts_link_ = false;
  absl::Duration restore_due_ = absl::InfiniteDuration();
  absl::Duration leave_due_ = absl::InfiniteDuration();  // who else leaves
  int leave_signal_ = 0;
  struct AwaitedSave {
    uint64_t number = 0;
    std::string why;      // the world is to change
    bool forced = false;  // it will, saved or not
    absl::Duration due;
  };
  std::optional<AwaitedSave> save_;
  uint64_t last_save_ = 0;
  absl::Duration grow_due_ = absl::InfiniteDuration();  // newcomers wait for others until then
  absl::Duration no_growth_before_ = -absl::InfiniteDuration();
  std::vector<EarlyExit> early_exits_;
  // Nodes that a cut link was blamed on: the other end, where it may be at fault as well, and until
  // when they are not taken while there are enough others.
  struct Shunned {
    std::string from;
    absl::Duration until;
  };
  std::map<std::string, Shunned> shunned_;
  LinkPlan links_;
  uint64_t links_generation_ = 0;  // that links_ is of
  bool said_unmet_ = false, said_all_cut_ = false;
  std::vector<bool> plain_;  // by rank of the newest generation

  // Of a stop or an end.
  StopAgreement stop_;
  absl::Duration seal_due_ = absl::InfiniteDuration();
  absl::Duration end_due_ = absl::InfiniteDuration();
  bool durable_ = false;

  std::optional<absl::Duration> armed_;
  absl::Duration now_;
  std::vector<CoordinatorAction> actions_;
};

}  // namespace outlast
