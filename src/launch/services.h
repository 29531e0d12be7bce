// What the agent adds to the keeper of a job: saves and the watch, and what both tell ledger,
// record and console.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "checkpoint/save_service.h"
#include "launch/console.h"
#include "launch/options.h"
#include "launch/run_ledger.h"
#include "launch/run_record.h"
#include "run/keeper.h"
#include "watch/monitor.h"

namespace outlast {

// Belongs to the keeper's loop; attached from construction to destruction. Borrows all that it is
// given.
class JobServices {
 public:
  JobServices(Keeper& keeper, WorkerHost& host, const LaunchOptions& options, RunLedger& ledger,
              RunRecord& record, Console& console);
  ~JobServices();

  // Goes on with what a killed agent's services kept. Before the keeper starts. Blocks on storage.
  absl::Status GoOn(Kept& kept);

  void Committed(const CommitGeneration& commit);
  void Faulted(const FaultRecord& fault) {
    reached_step_ = std::max(reached_step_, fault.step_reached);
  }
  // When a rank that the watch found had moved last, on the ledger's clock; 0: it was not found by
  // the watch.
  int64_t LastProgressOf(const FaultRecord& fault) const;
  // For people: what the slot's black box says it does, and since when; empty: nothing.
  std::string WhereIs(int slot);
  Monitor& monitor() { return *monitor_; }

  // All workers have ended, and not because they were done: what memory holds goes to disk. `done`
  // hears whether the state that a rank wanted last is there, and one of at least `last_step`; of
  // several nodes on the loop, later (SaveService::PersistLast). Blocks in a job of one node.
  void PersistLast(int64_t last_step, std::function<void(bool is_last)> done);

 private:
  SaveObserver Observer();
  void OnVerdict(const Verdict& verdict, const std::string& folder);

  Keeper& keeper_;
  RunLedger& ledger_;
  RunRecord& record_;
  Console& console_;
  std::unique_ptr<SaveService> saves_;
  std::unique_ptr<Monitor> monitor_;
  uint64_t generation_ = 0;
  int64_t committed_at_ns_ = 0;
  int64_t reached_step_ = 0;
  std::map<int, int64_t> hung_since_ns_;  // by rank
};

}  // namespace outlast
