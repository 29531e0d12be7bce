// What agents and the coordinator tell each other. Values only: how they travel is the transport's.
//
// One stream an agent; within a stream messages keep their order, and a stream that breaks may lose
// what was under way in both directions. Everything here may come twice.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "outlast/base/id.h"
#include "outlast/elastic/fault.h"
#include "outlast/elastic/membership.h"
#include "outlast/elastic/terms.h"

namespace outlast::control {

// A snapshot is one (generation, step) of this run.
struct SnapshotId {
  uint64_t generation = 0;
  int64_t step = 0;
  auto operator<=>(const SnapshotId&) const = default;
};
// Sealed bytes of `rank` of a world of `world` ranks, in the rank's own buffer or as a replica.
struct HeldSnapshot {
  SnapshotId id;
  int rank = 0;
  int world = 0;
};
// generation 0: the checkpoint of `step` in the root.
struct ResumeCandidate {
  uint64_t generation = 0;
  int64_t step = 0;
  bool operator==(const ResumeCandidate&) const = default;
};

// --- Agent to coordinator ---

struct Hello {
  std::string job;
  std::string node;
  uint64_t incarnation = 0;  // of the agent; another one at each start
  int slot_hint = -1;
  int capacity = 0;  // slots
  std::string segment;
  std::vector<std::string> addresses;  // all of them
  std::string peer_address;            // HOST:PORT where it takes the other agents' connections
  std::string measure_address;         // HOST:PORT where its link is measured; empty: it is not
  Terms terms;                         // that it was started with; empty: it does not say
  bool saves_on_request = false;       // it takes SAVE
  bool watches_links = false;          // it takes Commit::links
  // What it has seen so far; zero at first.
  Id128 run_id;
  uint64_t coordinator = 0;  // the highest incarnation of a coordinator
  uint64_t generation = 0;   // the newest that it was committed to
};

enum class RankPhase : uint8_t {
  kPlain,      // the slot's last process never joined
  kJoined,     // it did
  kFinished,   // its work is done: until a generation forms anew
  kPlainDone,  // it never joined, and ended with 0: for ever
};
struct RankBeat {
  int rank = 0;
  RankPhase phase = RankPhase::kPlain;
};
struct Beat {
  uint64_t counter = 0;
  int64_t newest_step = 0;  // of any rank here
  std::vector<RankBeat> ranks;
  // Filled in by the driver: nodes of its generation that it should reach, and has not for a while;
  // and of Commit::links those that it has never reached, in any generation.
  std::vector<std::string> unreached;
  std::vector<std::string> unmet;
};

// Whether the failed worker is a cause by itself (a signal, an exit of its own, a verdict), or says
// that a peer or the network failed.
enum class Evidence : uint8_t { kSelf, kPeer };
struct Fault {
  int rank = -1;
  uint64_t generation = 0;  // that it was in, or was meant for
  uint64_t process = 0;     // unique in the agent's incarnation
  uint64_t born = 0;        // the generation that it was spawned for
  FaultClass fault_class = FaultClass::kCrash;
  Evidence evidence = Evidence::kSelf;
  ProcessEnd end;
  std::string what;  // exit code, 128 + signal, or the verdict's name
  uint32_t phase = 0;
  std::string detail;
  bool plain = false;     // it had never joined
  bool finished = false;  // after its work was done
};

// The abort of all generations below `generation` was raised, and these slots are to be filled.
// Sent at once, and again when all ranks that the map of `round` gives to this node are staged.
struct Prepared {
  uint64_t generation = 0;
  uint32_t round = 0;
  bool staged = false;
  int64_t last_step = 0;
  // Filled in by the driver, which alone sees buffers and ports.
  std::vector<HeldSnapshot> snapshots;
  std::string bootstrap;  // HOST:PORT that it holds for the next generation
};
struct Committed {
  uint64_t generation = 0;
};
struct Restored {
  uint64_t generation = 0;
  int candidate = 0;
  bool ok = false;
  std::string detail;  // file, chunk, found and wanted
};
struct Stopping {
  int64_t asked = 0;
  bool on_time = false;
  int64_t step = 0;  // where a late one is
};
// The agent was asked to end (a signal, a platform's notice). hurry: at once, without a save.
struct Leave {
  int signal = 0;
  bool hurry = false;
  absl::Duration within;  // how long it may take
  // How long its ranks are left to train, where nothing else ends them; zero: it does not say.
  absl::Duration stays;
};
enum class SaveOutcome : uint8_t {
  kCommitted,
  kRefused,
  kRootLost,
  kFinalSaveFailed,
  kNothingRestores
};
struct SaveReport {
  SaveOutcome outcome = SaveOutcome::kCommitted;
  int64_t step = 0;
  std::string detail;
};
// No worker lives here any more. Of a stop or of an end, or all ranks of this node are done.
struct Bye {
  uint64_t generation = 0;
  bool durable = false;  // its part of the stop's save is known to be durable
  int64_t final_step = 0;
};

// What the caller of a MEASURE found.
struct Measured {
  uint64_t number = 0;
  double megabytes_per_second = 0;  // of the slower way; 0: they did not reach each other
  std::string detail;               // both ways, or why not
};

// What became of a SAVE.
struct Saved {
  uint64_t number = 0;
  bool durable = false;
  int64_t step = 0;    // that is durable
  std::string detail;  // why none is; empty: nothing here saves
};

using AgentMessage = std::variant<Beat, Fault, Prepared, Committed, Restored, Stopping, Leave,
                                  SaveReport, Bye, Measured, Saved>;

// --- Coordinator to agent ---

struct Welcome {
  Id128 run_id;
  uint64_t incarnation = 0;
  uint64_t generation = 0;
};
// kLater: try again; kNever: not in this job; kExcluded: not while the node cools down.
enum class Refusal : uint8_t {
  kLater,
  kNever,
  kExcluded,
  kBegunAnew,  // the same job, as another run: the agent's own run is over
};
struct Refused {
  Refusal kind = Refusal::kNever;
  std::string reason;
};
struct Prepare {
  uint64_t generation = 0;
  uint32_t round = 0;         // rises within a coordinator's incarnation
  RankMap map;                // provisional: COMMIT names the same one, or another round comes
  std::vector<int> plain;     // ranks whose last process never joined
  std::vector<int> finished;  // plain ranks that are done: all others take part
  absl::Duration spawn_delay;
  bool end_plain = false;  // plain workers are ended: one of them failed
  std::string reason;
};
struct NodeAddress {
  std::string node;
  std::string address;  // Hello::peer_address
  bool operator==(const NodeAddress&) const = default;
};
struct Commit {
  uint64_t generation = 0;
  RankMap map;
  std::vector<int> plain;
  std::vector<int> finished;
  std::string bootstrap;                // of rank 0's node
  std::string lead_address;             // Hello::peer_address of rank 0's node
  std::vector<ResumeCandidate> resume;  // best first; empty: whatever the root says
  int candidate = 0;                    // of `resume`, to be tried now
  // Of each agent its own: the nodes that it watches the links to, besides those to the lead. Not
  // in the journal.
  std::vector<NodeAddress> links;
  bool operator==(const Commit&) const = default;
};
struct Next {
  uint64_t generation = 0;
  int candidate = 0;
};
enum class StopHow : uint8_t {
  kAtStep,
  kAtOnce,  // what all ranks have in memory is saved without their help
  kNoSave,  // the same, and nothing is saved
  kHurry,   // all are killed
};
struct Stop {
  StopHow how = StopHow::kAtStep;
  int64_t step = 0;
  int signal = 0;         // for workers that never joined
  absl::Duration within;  // of the whole stop, counted from the message's arrival
  std::string reason;
};
struct Go {
  int64_t step = 0;
};
struct Exclude {
  std::string reason;
};
struct Collect {
  std::string reason;
};
// The job is over: every agent ends with this exit code.
struct Done {
  int exit_code = 0;
  std::string reason;
};

// Two agents measure the link between them: one calls, the other is called.
struct Measure {
  uint64_t number = 0;
  Id128 ticket;         // by which the one that is called knows the caller
  std::string address;  // HOST:PORT to call; empty: it is called
};

// To the agent of rank 0: all ranks are to save a step that none of them has reached yet, and train
// on. SAVED follows. Only to agents that take it.
struct Save {
  uint64_t number = 0;  // never used twice in a job
  uint64_t generation = 0;
  std::string reason;
};

using CoordinatorMessage = std::variant<Welcome, Refused, Prepare, Commit, Next, Stop, Go, Exclude,
                                        Collect, Done, Measure, Save>;

}  // namespace outlast::control
