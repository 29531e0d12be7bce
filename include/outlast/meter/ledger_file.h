// ledger.bin: where a run's time went, as the agent saw it. Append-only, one file a RUN_DIR.
//
//   file    = record*
//   record  = u32 bytes of payload, u32 CRC32C of payload, payload
//   payload = u16 kind, u16 version (1), then the fields of the kind's struct below in the order of
//   their declaration:
//             integers and doubles little endian at their own width (enums as u8), an Id128 as its
//             16 bytes, a text as u16 length and that many bytes
//   kinds   = 1 clock_domain  2 submit  3 up  4 down  5 commit  6 step  7 section  8 detected  9
//   rollback
//             10 checkpoint  11 restore  12 cards  13 end  14 meter  15 joined
//
// Cut at any byte, the file reads up to its last whole record. A newer version may append fields:
// readers skip what they do not know, and kinds that they do not know. The first record is a
// clock_domain.
//
// Times are nanoseconds of the agent's CLOCK_BOOTTIME. Key of a step: (job, run, generation, slot,
// step), so neither two generations nor two invocations clash over one step number.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/fd.h"
#include "outlast/base/id.h"
#include "outlast/blackbox/progress.h"
#include "outlast/blackbox/step_log.h"

namespace outlast {

// --- The records ---

// One invocation, and how its clock relates to others. realtime_ns bridges two boots; nothing else
// uses it.
struct ClockDomainEntry {
  Id128 job_id;  // zero while no checkpoint root is open
  Id128 run_id;
  Id128 boot_id;
  int64_t boottime_ns = 0;  // both read together
  int64_t realtime_ns = 0;
  std::string job;      // the name, such as --job gave it; may be empty
  std::string command;  // for display
  bool operator==(const ClockDomainEntry&) const = default;
};

// The job was handed in: its time line starts here.
struct SubmitEntry {
  int64_t time_ns = 0;
  bool operator==(const SubmitEntry&) const = default;
};

// A worker process is alive. generation: the one it was started for.
struct UpEntry {
  int64_t time_ns = 0;
  uint64_t generation = 0;
  int32_t slot = 0;
  int32_t rank = 0;
  int32_t pid = 0;
  bool operator==(const UpEntry&) const = default;
};

// kFinished: it came to its end. kStopped: we ended it, for a stop or a restart. kFault: it died on
// its own.
enum class DownCause : uint8_t { kFinished = 0, kStopped = 1, kFault = 2 };

// A worker process is gone. generation: the one that it was in.
struct DownEntry {
  int64_t time_ns = 0;
  uint64_t generation = 0;
  int32_t slot = 0;
  int32_t rank = 0;
  int32_t pid = 0;
  DownCause cause = DownCause::kFinished;
  std::string how;  // "exit code 3", "signal 9 (SIGKILL)"
  bool operator==(const DownEntry&) const = default;
};

// A generation was committed: all its ranks are members.
struct CommitEntry {
  int64_t time_ns = 0;
  uint64_t generation = 0;
  int32_t world = 0;
  bool operator==(const CommitEntry&) const = default;
};

// One rank's step, from the step log of its black box.
struct StepEntry {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  uint64_t generation = 0;
  int32_t slot = 0;
  int32_t rank = 0;
  int64_t step = 0;
  int64_t data_ns = 0;
  int64_t forward_ns = 0;
  int64_t backward_ns = 0;
  int64_t optimizer_ns = 0;
  int64_t checkpoint_stall_ns = 0;
  int64_t collective_wait_ns = 0;  // lies inside the others
  uint32_t tokens_real = 0;
  uint32_t tokens_padded = 0;
  uint32_t tokens_loss = 0;
  uint32_t samples = 0;
  double model_flops = 0;  // 0: unknown
  double loss = 0;
  double gradient_norm = 0;
  uint16_t flags = 0;  // StepFlag
  bool operator==(const StepEntry&) const = default;
};

// The agent's form of a step record: `boottime_minus_monotonic_ns` is what the two clocks of this
// boot are apart.
StepEntry ToStepEntry(const StepRecord& record, int32_t slot, int32_t rank,
                      int64_t boottime_minus_monotonic_ns);

// Time outside of steps with a known purpose: eval, restore, compile, a blocking save.
struct SectionEntry {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  uint64_t generation = 0;
  int32_t slot = 0;
  Phase phase = Phase::kNone;
  bool operator==(const SectionEntry&) const = default;
};

// The class of an agent that was killed and followed by another one: last_progress_ns is when.
inline constexpr char kAgentLost[] = "agent lost";

// A fault was found, and ends `generation`.
struct DetectedEntry {
  int64_t time_ns = 0;  // of the decision
  int64_t last_progress_ns =
      0;                    // when the culprit last moved; for a death, when it died. 0: not known
  uint64_t generation = 0;  // that it ends
  int32_t slot = 0;         // the culprit
  int32_t rank = 0;
  int64_t step = 0;  // that the culprit was in
  std::string
      fault_class;  // "crash", "hang", "stopped", "preempt" (which is planned), "node lost" ...
  std::string
      found;  // how: "pidfd: signal 9 (SIGKILL)", "rank 2 is stopped (state T) in backward" ...
  bool operator==(const DetectedEntry&) const = default;
};

// Where a state came from. kNothing: training started over.
enum class StateSource : uint8_t {
  kUnknown = 0,
  kNothing = 1,
  kMemory = 2,
  kPeer = 3,
  kDisk = 4,
  kRemote = 5
};

std::string_view ToString(StateSource source);

// `generation` goes on from an older step than the one that was reached. Both are "the next step to
// run".
struct RollbackEntry {
  int64_t time_ns = 0;
  uint64_t generation = 0;  // the new one
  int64_t resume_step = 0;
  int64_t reached_step = 0;
  StateSource source = StateSource::kUnknown;
  bool operator==(const RollbackEntry&) const = default;
};

// A save, from its start to its commit record (or its failure).
struct CheckpointEntry {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  uint64_t generation = 0;
  int64_t step = 0;
  uint64_t bytes = 0;
  std::string error;  // empty: it is durable
  bool operator==(const CheckpointEntry&) const = default;
};

// One rank read its state; training goes on with `step`.
struct RestoreEntry {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  uint64_t generation = 0;
  int32_t slot = 0;
  int64_t step = 0;
  uint64_t bytes = 0;
  StateSource source = StateSource::kUnknown;
  bool operator==(const RestoreEntry&) const = default;
};

// How many devices (ranks, without devices) the job plans for and holds from now on.
struct CardsEntry {
  int64_t time_ns = 0;
  int32_t planned = 0;
  int32_t held = 0;
  bool operator==(const CardsEntry&) const = default;
};

// The run ended by itself. A ledger without one was cut: its agent died.
struct EndEntry {
  int64_t time_ns = 0;
  int32_t exit_code = 0;
  std::string reason;
  bool operator==(const EndEntry&) const = default;
};

// What a rank's meter counts by, and divides by.
struct MeterEntry {
  int64_t time_ns = 0;
  int32_t slot = 0;
  int64_t flops_per_unit = 0;        // 0: unknown
  double peak_flops_per_second = 0;  // of this rank's device; 0: unknown
  std::string flops_text;            // "a token; causal attention, ...; formula: ..."
  std::string peak_text;             // with its source, or "unknown peak (reason)"
  bool operator==(const MeterEntry&) const = default;
};

// One node's agent has joined a run of several nodes, which keep a ledger each.
struct JoinedEntry {
  int64_t time_ns = 0;
  Id128 run_id;  // of the whole run; the clock_domain's is this invocation's
  std::string node;
  bool operator==(const JoinedEntry&) const = default;
};

// In the order of their kinds: an entry's kind is its index + 1.
using LedgerEntry =
    std::variant<ClockDomainEntry, SubmitEntry, UpEntry, DownEntry, CommitEntry, StepEntry,
                 SectionEntry, DetectedEntry, RollbackEntry, CheckpointEntry, RestoreEntry,
                 CardsEntry, EndEntry, MeterEntry, JoinedEntry>;

// --- The file ---

// Appends to a ledger. One thread.
class LedgerWriter {
 public:
  // Creates `path`, or goes on behind the last whole record of what is there. Errors as open(2);
  // kDataLoss: there is a file that is no ledger.
  static absl::StatusOr<LedgerWriter> Open(const std::string& path);

  // Appends with one write(2), so that a kill leaves whole records and at most one that is cut. Not
  // synced: it survives the process, not the machine. After an error (a full disk) nothing of
  // `entries` is in the file, and a later call may succeed.
  absl::Status Append(std::span<const LedgerEntry> entries);
  absl::Status Append(const LedgerEntry& entry) { return Append({&entry, 1}); }

 private:
  LedgerWriter(UniqueFd fd, std::string path, int64_t size)
      : fd_(std::move(fd)), path_(std::move(path)), size_(size) {}

  UniqueFd fd_;
  std::string path_;
  int64_t size_;
};

struct LedgerRead {
  std::vector<LedgerEntry> entries;
  uint64_t whole_bytes = 0;  // up to the end of the last whole record
  uint64_t cut_bytes = 0;    // behind it: a record that a kill cut, or damage
  uint64_t skipped = 0;      // records of a kind that this version does not know
};

// Reads what is whole in `bytes`, which may be anything.
LedgerRead ParseLedger(std::span<const std::byte> bytes);

// The same for a file. kNotFound: no such file. kDataLoss: it has bytes but starts with no
// clock_domain record.
absl::StatusOr<LedgerRead> ReadLedger(const std::string& path);

// The record's bytes as they are in the file.
void AppendRecord(const LedgerEntry& entry, std::vector<std::byte>& out);

}  // namespace outlast
