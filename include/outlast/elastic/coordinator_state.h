// What a coordinator must not forget: the fold of its journal. The coordinator changes it only by
// appending a record, so a restarted one that folds the same records has the same state.
//
// No clock survives a restart: `at` is the job's time, which counts only while a coordinator runs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "outlast/base/id.h"
#include "outlast/elastic/fault.h"
#include "outlast/elastic/messages.h"
#include "outlast/elastic/policy.h"

namespace outlast {

// --- Records ---

struct StartedRecord {
  Id128 run_id;
  uint64_t incarnation = 0;
};
struct FormingRecord {
  uint64_t target = 0;  // a PREPARE of this generation may have been sent
  std::string reason;
};
struct CommittedRecord {
  control::Commit commit;
};
struct NextRecord {
  int candidate = 0;
};
struct FaultedRecord {
  FaultRecord fault;
  uint64_t agent = 0;  // incarnations of its agent and of itself: each process is charged once
  uint64_t process = 0;
  control::Evidence evidence = control::Evidence::kSelf;
  bool charged = false;
  bool replaces = false;  // the cause that was charged before: that one was its victim
  bool restarts = false;
  absl::Duration at;
};
struct RefundedRecord {
  int64_t step_committed = 0;
  int64_t progress_base = 0;
};
struct ExcludedRecord {
  std::string node;
  std::string reason;
  absl::Duration until;  // job time
};
struct FinishedRecord {
  std::vector<int> ranks;
};
struct StopBegunRecord {
  int signal = 0;
  std::string reason;
};
struct StopWentRecord {
  int64_t step = 0;
};
struct StopGaveUpRecord {
  bool hurry = false;
  std::string reason;
};
struct SaveFailedRecord {
  std::string root_lost;          // empty: it was not
  std::string final_save_failed;  // empty: it has not, or a later commit mended it
};
struct EndingRecord {
  int exit_code = 1;
  std::string reason;
  bool keep = true;  // what is sealed is persisted
};
struct EndedRecord {
  int exit_code = 1;
  std::string reason;
};
// The agent of `node` came first: all others are to be started as it was.
struct TermsRecord {
  std::string node;
  Terms terms;
};

// Of finished ranks, those that never joined: they are never run again.
struct PlainDoneRecord {
  std::vector<int> ranks;
};
using JournalPayload =
    std::variant<StartedRecord, FormingRecord, CommittedRecord, NextRecord, FaultedRecord,
                 RefundedRecord, ExcludedRecord, FinishedRecord, StopBegunRecord, StopWentRecord,
                 StopGaveUpRecord, SaveFailedRecord, EndingRecord, EndedRecord, TermsRecord,
                 PlainDoneRecord>;

// --- State ---

struct CoordinatorState {
  Id128 run_id;
  uint64_t incarnation = 0;     // 0: nothing was written yet
  uint64_t records = 0;         // so far: the next one's index
  uint64_t target = 0;          // above commit.generation: that generation is being formed
  control::Commit commit;       // of the newest generation
  std::vector<int> finished;    // ranks, ascending
  std::vector<int> plain_done;  // of them, those that never joined: they are never run again
  FaultHistory history;
  // Since the newest commit: (agent, process) of faults, and who is held to be the cause.
  std::vector<std::pair<uint64_t, uint64_t>> faulted;
  std::optional<control::Evidence> cause;
  int faults = 0;                        // in all
  std::vector<ExcludedRecord> excluded;  // the newest of each node
  std::optional<int> late_failure;       // exit code of a worker that failed after its work
  int64_t step_committed = 0;
  int64_t progress_base = 0;
  std::string root_lost, final_save_failed;
  std::optional<StopBegunRecord> stop;
  int64_t stop_went = 0;  // to this step
  bool stop_gave_up = false, stop_hurries = false;
  std::string stop_failure;  // why it was given up
  std::optional<EndingRecord> ending;
  std::optional<EndedRecord> ended;
  TermsRecord terms;        // empty: nobody has said any
  absl::Duration job_time;  // of the newest record that has one

  uint64_t generation() const { return commit.generation; }
  bool is_finished(int rank) const;
  bool was_faulted(uint64_t agent, uint64_t process) const;

  void Apply(const JournalPayload& record);
};

// Why a coordinator that was started with `terms` is not to go on from `state`, by flag; empty: it
// may. It would refuse the very agents that hold the job's ranks. Nothing is bound before the first
// generation, and after the job's end.
std::string WhyUnlike(const CoordinatorState& state, const Terms& terms);

}  // namespace outlast
