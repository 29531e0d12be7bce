// What a run leaves for people and programs: events.jsonl while it goes, report.json at its end.
// Events and their fields: event_log.h.
// report.json: version 1; see Write. Text that is no UTF-8 has U+FFFD in its place.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "launch/job_status.h"
#include "launch/options.h"
#include "launch/run_dir.h"
#include "outlast/base/id.h"
#include "outlast/elastic/job.h"
#include "outlast/meter/ledger_file.h"

namespace outlast {

// How much of its budget is used with this fault: "1 of 3".
std::string BudgetText(const RecordFault& record);

// Not safe for concurrent use.
class RunRecord {
 public:
  RunRecord(const RunDir& run_dir, const LaunchOptions& options, const Id128& run_id);
  // Goes on with the record of a killed agent: what it wrote counts, as far as it can be read.
  struct Former {};
  RunRecord(const RunDir& run_dir, const LaunchOptions& options, const Id128& run_id, Former);

  // This agent has taken a killed one's place.
  void Adopted(uint64_t generation, int workers);
  // That this very process was started has been told.
  bool knows(int slot, uint64_t incarnation) const;

  // Of a job of several nodes: its run id, once a coordinator has told it. May come twice.
  void Joined(const Id128& run_id);
  void Started(const SpawnWorker& worker, int rank, int pid, bool is_forked);
  void TemplateReady(int pid);
  void Ended(int slot, int rank, uint64_t incarnation, const ProcessEnd& end,
             const std::string& error);
  void Committed(const CommitGeneration& commit);
  void Faulted(const RecordFault& record, const std::string& last_lines);
  // Of any node, as the coordinator judges it; where this agent leads the job.
  void JobFaulted(const RecordFault& record);
  void StopAsked(int signal);
  void StacksWritten(const std::string& folder, const std::string& reason);
  void Saved(int64_t step, const std::string& checkpoint, uint64_t bytes,
             absl::Duration write_time);
  void SaveFailed(int64_t step, const std::string& error);
  // To the remote root.
  void Uploaded(int64_t step, const std::string& checkpoint, uint64_t bytes, absl::Duration time);
  void UploadFailed(int64_t step, const std::string& error);
  // This node's ranks' snapshots lie on another one too. Events of them are at least 10 s apart.
  void Copied(int64_t step, const std::string& partner, uint64_t bytes, absl::Duration time);
  void Restored(uint64_t generation, StateSource source, int64_t step);
  // A verdict of the watch, and where its evidence lies.
  void Judged(const std::string& verdict, const std::string& folder);
  // Whom the watch had found moves again.
  void Recovered(const std::string& verdict);
  // /metrics and /status, at HOST:PORT.
  void Serving(const std::string& address);
  void Noted(const std::string& line);
  // What came of the request to stop, if there was one, for the line that closes the run: "saved
  // step 12 in 0.31 s", or what is durable of a request that was not served in time.
  std::string StopText(int exit_code) const;
  // Writes report.json.
  absl::Status Finished(int exit_code, const std::string& reason);

  // As the events tell so far.
  const JobStatus& status() const { return status_; }
  double Seconds() const;

 private:
  struct Fault {
    RecordFault record;
    std::string last_lines;
    absl::Time at;
  };
  struct Victim {
    int rank;
    ProcessEnd end;
    bool after_a_peer;  // failed by itself after a peer; else we stopped it
  };

  static bool MaySayThatAStopWasSaved(int exit_code);
  void ReadFormer();
  void Write(const char* event, const nlohmann::ordered_json& fields);

  const RunDir& run_dir_;
  const LaunchOptions& options_;
  std::string run_id_;
  absl::Time started_at_;
  absl::Duration started_up_;
  std::string former_faults_;  // JSON, as the report has them; of an agent before this one
  std::vector<Fault> faults_;
  std::vector<Fault> job_faults_;
  std::vector<Victim> victims_;  // since the last fault that counts
  std::vector<int> stop_signals_;
  JobStatus status_;
  uint64_t generations_ = 0;
  int restarts_ = 0;
  uint64_t copies_ = 0, copied_bytes_ = 0;
  absl::Duration copied_at_ = -absl::InfiniteDuration();
  int world_ = 0;
};

}  // namespace outlast
