// Keeps RUN_DIR/ledger.bin (outlast/meter/ledger_file.h): processes, generations and faults as the
// agent sees them, and the steps of all ranks from their black boxes, drained once a second and
// when a process ends.
//
// Of a job of several nodes it is this node's part, under the agent's own id: its slots, their
// ranks, and generations of as many ranks as it holds.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "launch/options.h"
#include "launch/step_totals.h"
#include "outlast/base/id.h"
#include "outlast/blackbox/segment.h"
#include "outlast/blackbox/step_log.h"
#include "outlast/elastic/job.h"
#include "outlast/meter/ledger_file.h"

namespace outlast {

// Belongs to its loop's thread. A ledger that cannot be written never stops a job: see error().
class RunLedger {
 public:
  static absl::StatusOr<std::unique_ptr<RunLedger>> Open(EventLoop& loop,
                                                         const std::string& run_dir,
                                                         const LaunchOptions& options,
                                                         const Id128& run_id);
  // Goes on with the ledger of an agent that was killed at `lost_ns` (CLOCK_MONOTONIC; 0: not
  // known), while `generation` ran.
  static absl::StatusOr<std::unique_ptr<RunLedger>> GoOn(EventLoop& loop,
                                                         const std::string& run_dir,
                                                         uint64_t generation, int64_t lost_ns);
  ~RunLedger();

  // A process that a former agent had started, and had said so.
  void Adopted(int slot, int rank, int black_box_fd);

  // `black_box_fd` is borrowed for the call; each slot keeps its box for the whole job.
  void Started(const SpawnWorker& worker, int rank, int pid, int black_box_fd);
  void Ended(int slot, int pid, uint64_t born, const ProcessEnd& end);
  // The run of several nodes that `node`, this one, takes part in. Told again: nothing happens.
  void Joined(const Id128& run_id, const std::string& node);
  void Committed(const CommitGeneration& commit);
  // `last_progress_ns`: when a hung rank had moved last, on this clock; 0: not known.
  // `slot`: the culprit's; -1: of another node.
  void Faulted(const FaultRecord& fault, int slot, int64_t last_progress_ns);
  void Finished(int exit_code, const std::string& reason);
  // For what others know: checkpoints, restores, roll-backs.
  void Append(const LedgerEntry& entry);

  // Drains the boxes, and says what all steps so far add up to.
  RunTotals Totals();
  // When the slot's newest step ended (CLOCK_MONOTONIC), as of the last drain; 0: none did.
  int64_t LastStepEnd(int slot) const;

  // Nanoseconds of the ledger's clock (CLOCK_BOOTTIME).
  int64_t Now() const;
  // The first write that failed.
  const absl::Status& error() const { return error_; }

 private:
  struct Box {
    SegmentView view;
    int rank;
    uint64_t next_seq = 1;
    bool has_meter = false;
    std::optional<StepRecord> last;
    StepTotals totals;
    double peak_flops_per_second = 0;  // 0: unknown
    int64_t known_to_ns = -1;          // start of the last step that a former agent wrote
  };

  RunLedger(EventLoop& loop, LedgerWriter writer);
  void DrainAndRepeat();
  void Drain(int slot, Box& box);
  // What the slot's process was in when it ended.
  void AppendOpenStep(int slot, const Box& box);

  EventLoop& loop_;
  LedgerWriter writer_;
  const int64_t boottime_minus_monotonic_ns_;
  std::map<int, Box> boxes_;
  uint64_t generation_ = 0;
  std::map<int, int64_t> known_to_ns_;  // by slot
  Id128 joined_;                        // zero: no run of several nodes
  EventLoop::TimerId timer_ = 0;
  absl::Status error_;
};

// Writes what an agent that was killed could not: the steps since it looked last, and those that
// its workers had open when they ended. Call it once they are gone. Does nothing where the ledger
// has an end. `black_boxes`: by slot, borrowed.
absl::Status CompleteLedger(const std::string& run_dir, const std::map<int, int>& black_boxes);

}  // namespace outlast
