// N ranks as threads of one test, over the keeper that the agent uses.
#pragma once

#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "outlast/elastic/fault.h"
#include "outlast/elastic/job.h"
#include "outlast/run/run.h"

namespace outlast {
class Keeper;
}

namespace outlast::testing {

struct LocalWorldOptions {
  JobOptions job;       // its world is set by LocalWorld
  std::string run_dir;  // empty: none
  // Called on the keeper's thread before the job starts: attach extensions here.
  std::function<void(Keeper&)> prepare;
  // Called on the keeper's thread when all ranks have ended, before the keeper goes: detach and
  // destroy them here.
  std::function<void(Keeper&)> finish;
  // A world that is not done by then is ended: all ranks are killed.
  absl::Duration timeout = absl::Seconds(60);
};

struct LocalWorldResult {
  int exit_code = -1;  // what `outlast run` would return; -1: the timeout passed
  std::string reason;
  std::vector<FaultRecord> faults;
  uint64_t generation = 0;  // the last
  int spawns = 0;           // threads that were started, the first of each rank included
  uint64_t refused = 0;     // Keeper::refused()
};

// A rank "dies" when its body returns an error (exit code 1), or by KillRank. Then what it holds of
// Outlast gives kCancelled or kUnavailable, its abort callbacks run, and it is expected to return
// soon; its slot is refilled by a new thread. A rank that does not return within 100 ms of a kill
// counts as dead nevertheless, and its thread is joined at the end.
class LocalWorld {
 public:
  // What a rank's program would do in main: usually outlast::Run::ForEachGeneration.
  using Body = std::function<absl::Status(outlast::Run&)>;

  explicit LocalWorld(int ranks, LocalWorldOptions options = {});
  ~LocalWorld();

  // Runs the job to its end, once. Blocks; all threads are joined when it returns.
  LocalWorldResult Run(const Body& body);

  // The next ones are for the bodies and for other threads, while Run runs.
  void KillRank(int rank, int signal = SIGKILL);
  // As if the agent had got `signal`.
  void AskStop(int signal = SIGTERM);
  // Runs `work` on the keeper's thread and waits for it. Not from an extension.
  void OnKeeper(const std::function<void(Keeper&)>& work);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace outlast::testing
