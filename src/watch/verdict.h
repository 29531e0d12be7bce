// Who hangs, and why: a pure function over two looks at every rank.
//
// A look is what the agent sees without the rank's help: its process in /proc and its black box.
// Rules, in this order:
//   1 liveness    dead, frozen (all stopped, or a debugger), stopped
//   2 progress    what moved between the looks is slow, not hung
//   3 agreement   members that entered the same operation with different signatures: desync
//   4 waiting     who joined an operation waits for who did not; the root of that graph is the
//   culprit 5 cycle       waiting without a root: operations issued in opposite orders 6 all joined
//   the operation itself is stuck
//
// Two departures from the plain rules, both against false kills. A live root that is within its
// *own* limit (declared, configured or learned) is not blamed yet, although the ranks that wait for
// it are past theirs: rank 0 saves or evaluates while the others wait. Only a waiting rank's
// declared limit, which is firm, overrules that. And an unwinding root is rank_left_early whatever
// section its exception is leaving: it will not come.
//
// A node of several sees its own ranks only. Who waits in an operation that ranks of other nodes
// belong to may wait for those: it is not blamed, and where nobody else is there is no verdict
// here. The looks of all nodes together tell more (joint_look.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "outlast/blackbox/flight_log.h"
#include "outlast/blackbox/progress.h"

namespace outlast {

enum class ProcessState : uint8_t {
  kUnknown,          // no process joined, or /proc could not be read
  kRunning,          // runs or sleeps
  kUninterruptible,  // D
  kStopped,          // T: SIGSTOP and the like
  kTraced,           // a debugger is attached
  kDead,
};

enum class LimitSource : uint8_t { kNone, kConfigured, kLearned, kDeclared };
std::string_view LimitSourceName(LimitSource source);

// How long a rank has been at what it does, against what that may take.
struct Pace {
  absl::Duration age;
  absl::Duration limit = absl::InfiniteDuration();
  LimitSource source = LimitSource::kNone;  // kNone: nothing pending
  std::string section;                      // which section it counts for; empty: outside any

  bool is_past_limit() const { return age > limit; }
  // Reason enough to judge. Idling past its limit is none, unless somebody waits for the rank.
  bool is_over() const { return source != LimitSource::kNone && is_past_limit(); }
};

struct CommLook {
  CommSnapshot row;
  std::vector<KeptOperation> operations;  // of comms with something pending
  std::shared_ptr<const std::vector<uint32_t>>
      members;  // ranks of the world; null or empty: the row has no list
};

// A rank's evidence at one look. Ranks without data are unknown, never "also hung".
struct RankLook {
  int rank = 0;
  int slot = 0;
  int node = 0;
  bool has_data = false;     // the rank's tables could be read
  uint64_t incarnation = 0;  // of the slot's present process as the agent knows it; 0: not told
  ProcessState process = ProcessState::kUnknown;
  std::optional<int>
      exit_code;  // of a dead process, where known; 128 + signal for one that was killed
  bool has_finished = false;  // its body returned OK: it enters nothing any more
  ProgressSnapshot progress;
  std::vector<CommLook> comms;
  std::vector<PairRow> pairs;
  Pace pace;

  // Anything but beats moved, or another process sits there.
  bool MovedSince(const RankLook& earlier) const;
};

struct RankLooks {
  const RankLook* first = nullptr;  // null: the rank is new in the second look
  const RankLook* second = nullptr;
};

enum class VerdictClass : uint8_t {
  kNone,
  kFrozen,  // everything stands still for a reason outside the job: no verdict
  kStopped,
  kProcessDead,
  kMissingRank,
  kRankLeftEarly,
  kDesync,
  kP2pUnmatched,
  kCollectiveOrderDeadlock,
  kDataLoaderStall,
  kCheckpointStall,
  kCompileSkew,
  kIoStuck,
  kInitMissing,
  kSectionOverLimit,
  kStuckOutsideComm,
  kCommStuckUnknown,
};
// "none", "stopped", "data_loader_stall" ...: the names in JSON, fault records and reports.
std::string_view VerdictClassName(VerdictClass verdict_class);

enum class Confidence : uint8_t { kWeak, kLikely, kCertain };
std::string_view ConfidenceName(Confidence confidence);

struct Culprit {
  int rank = 0, slot = 0, node = 0;
  std::string section;
  Phase phase = Phase::kNone;
  uint64_t step = 0;
  absl::Duration age;  // in what it does

  bool operator==(const Culprit&) const = default;
};

struct CommFinding {
  std::string name;
  uint64_t id_hash = 0;
  uint64_t seq = 0;  // the operation that is waited in; 0: the communicator's init
  std::string op;

  bool operator==(const CommFinding&) const = default;
};

struct Verdict {
  VerdictClass verdict_class = VerdictClass::kNone;
  Confidence confidence = Confidence::kLikely;
  bool ambiguous = false;  // a tie: both sets are culprits
  std::string kind;        // desync: type, size, datatype, root, reduction, order; p2p: "a->b"
  uint64_t generation = 0;
  std::vector<Culprit> culprits;  // by rank
  std::vector<int> waiting;       // ranks that wait for them, ascending
  CommFinding comm;
  uint64_t first_divergent_seq = 0;  // 0: none
  std::vector<int> cycle;            // each waits for the next, the last for the first
  std::vector<std::string> evidence;
  std::string reason;     // one line
  int ignored_looks = 0;  // of old incarnations and generations
  // None, since who is past its limit may wait for ranks of other nodes: their looks would tell.
  bool needs_others = false;

  // Something for people or the ladder to do.
  bool is_finding() const {
    return verdict_class != VerdictClass::kNone && verdict_class != VerdictClass::kFrozen;
  }
  bool operator==(const Verdict&) const = default;
};

struct VerdictOptions {
  int world = 1;
  // By rank, those that live on other nodes: nothing is known of them here, and their own nodes
  // judge them. Empty: none does.
  std::vector<bool> elsewhere;
  uint64_t generation =
      0;  // looks of other generations are ignored and counted; 0: the newest there is
  // An expired deadline starts a judgement. False: judge tables that carry none, such as saved
  // ones.
  bool needs_expired_deadline = true;
};

// The same answer for every order of `looks`. Costs about 1 us a rank.
Verdict JudgeRanks(std::span<const RankLooks> looks, const VerdictOptions& options);

// "0-3,7"
std::string RankList(std::span<const int> ranks);

}  // namespace outlast
