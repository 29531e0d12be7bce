#include "launch/run_record.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "launch/event_log.h"
#include "launch/machine.h"
#include "launch/process.h"
#include "outlast/base/clock.h"
#include "outlast/elastic/exit_code.h"

namespace outlast {
namespace {

using nlohmann::ordered_json;

constexpr absl::Duration kCopiesApart = absl::Seconds(10);

std::string Utc(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone());
}

std::string Dump(const ordered_json& json, int indent) {
  return json.dump(indent, ' ', false, ordered_json::error_handler_t::replace);
}

ordered_json Describe(const ProcessEnd& end) {
  ordered_json json;
  if (end.signal == 0) json["code"] = end.code;
  if (end.signal != 0) json["signal"] = end.signal;
  json["by_us"] = end.by_us;
  return json;
}

ordered_json Describe(const RecordFault& record, const std::string& last_lines) {
  const FaultRecord& fault = record.fault;
  ordered_json json;
  json["class"] = std::string(FaultClassName(fault.fault_class));
  json["rank"] = fault.rank;
  if (!fault.node.empty()) json["node"] = fault.node;
  json["generation"] = fault.generation;
  json["step_reached"] = fault.step_reached;
  json["step_committed"] = fault.step_committed;
  json["end"] = Describe(fault.end);
  json["found_by"] = fault.found_by;
  json["detail"] = fault.detail;
  json["root"] = fmt::format("{:016x}", fault.root);
  json["victim"] = fault.victim;
  // What one of several nodes reports is counted by the coordinator.
  if (fault.node.empty() || record.budget > 0) json["budget"] = BudgetText(record);
  json["last_lines"] = last_lines;
  return json;
}

}  // namespace

// Restarts, not faults: the one that uses them up is not restarted.
std::string BudgetText(const RecordFault& record) {
  return fmt::format("{} of {}", std::min(record.budget_used, record.budget), record.budget);
}

RunRecord::RunRecord(const RunDir& run_dir, const LaunchOptions& options, const Id128& run_id)
    : run_dir_(run_dir),
      options_(options),
      run_id_(run_id.hex()),
      started_at_(Clock::Real().WallTime()),
      started_up_(Clock::Real().Uptime()),
      world_(options.nodes ? 0 : options.job.world) {
  const auto self = ReadProcess(getpid());
  status_.run_dir = run_dir.path();
  ordered_json fields = {{"version", kEventLogVersion}, {"job", options.job_id}};
  if (options.nodes) {  // the run's id and its world are not known yet
    fields.update({{"node", options.nodes->node}, {"slots", options.job.world}});
  } else {
    fields.update({{"run_id", run_id_}, {"world", options.job.world}});
  }
  fields.update({{"max_restarts", options.job.max_restarts},
                 {"command", options.command},
                 {"pid", getpid()},
                 {"start_ticks", self.has_value() ? self->start_ticks : 0},
                 {"host", HostName()},
                 {"boot_id", BootId().hex()}});
  Write("start", fields);
}

RunRecord::RunRecord(const RunDir& run_dir, const LaunchOptions& options, const Id128& run_id,
                     Former)
    : run_dir_(run_dir),
      options_(options),
      run_id_(run_id.hex()),
      started_at_(Clock::Real().WallTime()),
      started_up_(Clock::Real().Uptime()),
      world_(options.job.world) {
  status_.run_dir = run_dir.path();
  ReadFormer();
}

void RunRecord::ReadFormer() {
  if (const auto former = ReadEventLog(run_dir_.path()); former.ok()) status_ = former->status;
  status_.run_dir = run_dir_.path();
  if (absl::Time began; absl::ParseTime(absl::RFC3339_full, status_.started_at, &began, nullptr)) {
    started_up_ -= std::max(absl::ZeroDuration(), started_at_ - began);
    started_at_ = began;
  }
  ordered_json faults = ordered_json::array();
  std::ifstream events(run_dir_.path() + "/events.jsonl");
  for (std::string line; std::getline(events, line);) {
    ordered_json event = ordered_json::parse(line, nullptr, false);
    if (!event.is_object()) continue;
    if (event["event"] == "commit") ++generations_;
    if (event["event"] == "worker_started" && event["attempt"] > 0) ++restarts_;
    if (event["event"] != "fault") continue;
    for (const char* of_the_line : {"t", "event"}) event.erase(of_the_line);
    faults.push_back(std::move(event));
  }
  stop_signals_ = status_.stop_signals;
  former_faults_ = Dump(faults, -1);
}

void RunRecord::Adopted(uint64_t generation, int workers) {
  const auto self = ReadProcess(getpid());
  Write("agent_adopted", {{"pid", getpid()},
                          {"start_ticks", self.has_value() ? self->start_ticks : 0},
                          {"host", HostName()},
                          {"boot_id", BootId().hex()},
                          {"generation", generation},
                          {"workers", workers}});
}

bool RunRecord::knows(int slot, uint64_t incarnation) const {
  return std::ranges::any_of(status_.ranks, [&](const RankStatus& rank) {
    return rank.slot == slot && rank.incarnation == incarnation;
  });
}

void RunRecord::Write(const char* event, const ordered_json& fields) {
  ordered_json line;
  line["t"] = Seconds();
  line["at"] = Utc(Clock::Real().WallTime());
  line["event"] = event;
  line.update(fields);
  run_dir_.AppendEvent(Dump(line, -1));
  Fold(line, status_);
}

void RunRecord::Joined(const Id128& run_id) {
  if (run_id.is_zero() || run_id.hex() == run_id_) return;
  run_id_ = run_id.hex();
  Write("joined", {{"run_id", run_id_}});
}

double RunRecord::Seconds() const {
  return absl::ToDoubleSeconds(Clock::Real().Uptime() - started_up_);
}

void RunRecord::Started(const SpawnWorker& worker, int rank, int pid, bool is_forked) {
  if (worker.attempt > 0) ++restarts_;
  ordered_json fields = {{"rank", rank},
                         {"slot", worker.slot},
                         {"incarnation", worker.incarnation},
                         {"generation", worker.generation},
                         {"attempt", worker.attempt},
                         {"pid", pid}};
  if (is_forked) fields["from"] = "template";
  Write("worker_started", fields);
}

void RunRecord::TemplateReady(int pid) { Write("template_ready", {{"pid", pid}}); }

void RunRecord::Ended(int slot, int rank, uint64_t incarnation, const ProcessEnd& end,
                      const std::string& error) {
  ordered_json fields = {{"rank", rank}, {"slot", slot}, {"incarnation", incarnation}};
  fields.update(Describe(end));
  if (!error.empty()) fields["error"] = error;
  Write("worker_ended", fields);
  if (end.by_us && !faults_.empty()) victims_.push_back({rank, end, false});
}

void RunRecord::Committed(const CommitGeneration& commit) {
  ++generations_;
  ordered_json fields = {{"generation", commit.generation}, {"members", commit.members}};
  if (commit.job != nullptr) {
    world_ = commit.job->map.world;
    fields["world"] = world_;
    fields["ranks"] = commit.ranks;
    for (const RankRun& run : commit.job->map.runs)
      fields["nodes"].push_back(
          {{"node", run.node}, {"rank", run.first_rank}, {"ranks", run.count}});
  }
  Write("commit", fields);
}

void RunRecord::Faulted(const RecordFault& record, const std::string& last_lines) {
  if (record.fault.victim) {
    victims_.push_back({record.fault.rank, record.fault.end, true});
  } else {
    victims_.clear();
  }
  faults_.push_back({record, last_lines, Clock::Real().WallTime()});
  Write("fault", Describe(record, last_lines));
}

void RunRecord::JobFaulted(const RecordFault& record) {
  job_faults_.push_back({record, "", Clock::Real().WallTime()});
  Write("job_fault", Describe(record, ""));
}

void RunRecord::StopAsked(int signal) {
  stop_signals_.push_back(signal);
  Write("stop_asked", {{"signal", signal}});
}

void RunRecord::StacksWritten(const std::string& folder, const std::string& reason) {
  Write("stacks", {{"folder", folder}, {"reason", reason}});
}

void RunRecord::Saved(int64_t step, const std::string& checkpoint, uint64_t bytes,
                      absl::Duration write_time) {
  Write("saved", {{"step", step},
                  {"checkpoint", checkpoint},
                  {"bytes", bytes},
                  {"seconds", absl::ToDoubleSeconds(write_time)}});
}

void RunRecord::SaveFailed(int64_t step, const std::string& error) {
  Write("save_failed", {{"step", step}, {"error", error}});
}

void RunRecord::Uploaded(int64_t step, const std::string& checkpoint, uint64_t bytes,
                         absl::Duration time) {
  Write("uploaded", {{"step", step},
                     {"checkpoint", checkpoint},
                     {"bytes", bytes},
                     {"seconds", absl::ToDoubleSeconds(time)}});
}

void RunRecord::UploadFailed(int64_t step, const std::string& error) {
  Write("upload_failed", {{"step", step}, {"error", error}});
}

void RunRecord::Copied(int64_t step, const std::string& partner, uint64_t bytes,
                       absl::Duration time) {
  ++copies_;
  copied_bytes_ += bytes;
  const absl::Duration now = Clock::Real().Uptime();
  if (now - copied_at_ < kCopiesApart) return;
  copied_at_ = now;
  Write("copied", {{"step", step},
                   {"partner", partner},
                   {"bytes", bytes},
                   {"seconds", absl::ToDoubleSeconds(time)},
                   {"copies", copies_}});
}

void RunRecord::Restored(uint64_t generation, StateSource source, int64_t step) {
  constexpr const char* kNames[] = {"unknown", "nothing", "memory", "peer", "disk", "remote"};
  Write("restored", {{"generation", generation},
                     {"source", kNames[static_cast<size_t>(source)]},
                     {"step", step}});
}

void RunRecord::Judged(const std::string& verdict, const std::string& folder) {
  Write("verdict", {{"verdict", verdict}, {"folder", folder}});
}

void RunRecord::Recovered(const std::string& verdict) {
  Write("recovered", {{"verdict", verdict}});
}

void RunRecord::Serving(const std::string& address) { Write("metrics", {{"address", address}}); }

void RunRecord::Noted(const std::string& line) { Write("note", {{"line", line}}); }

bool RunRecord::MaySayThatAStopWasSaved(int exit_code) {
  return exit_code != ExitCodeOf(JobOutcome::kPreemptedUnsaved) &&
         exit_code != ExitCodeOf(JobOutcome::kNotInRoot);
}

std::string RunRecord::StopText(int exit_code) const {
  if (!status_.stop) return "";
  const StopStatus& stop = *status_.stop;
  if (MaySayThatAStopWasSaved(exit_code)) {
    if (!stop.saved_step || !stop.service_seconds) return "";
    return fmt::format("saved step {} in {:.2f} s", *stop.saved_step, *stop.service_seconds);
  }
  const bool saves = status_.checkpoint || status_.failed_saves > 0;
  if (!saves) return "";
  return fmt::format("the request was not served in time, the last durable step is {}",
                     status_.checkpoint ? std::to_string(status_.checkpoint->step) : "none");
}

absl::Status RunRecord::Finished(int exit_code, const std::string& reason) {
  Write("finish", {{"exit_code", exit_code}, {"reason", reason}});
  ordered_json report;
  report["version"] = 1;
  report["job"] = options_.job_id;
  report["run_id"] = run_id_;
  report["run_dir"] = run_dir_.path();
  report["command"] = options_.command;
  if (options_.nodes) report["node"] = options_.nodes->node;
  report["world"] = world_;
  report["started_at"] = Utc(started_at_);
  report["ended_at"] = Utc(Clock::Real().WallTime());
  report["wall_seconds"] = Seconds();
  report["exit_code"] = exit_code;
  report["reason"] = reason;
  report["generations"] = generations_;
  report["restarts"] = restarts_;
  report["stop_signals"] = stop_signals_;
  report["stop"] = nullptr;
  if (status_.stop) {
    const StopStatus& stop = *status_.stop;
    const bool is_saved = stop.saved_step && MaySayThatAStopWasSaved(exit_code);
    ordered_json json = {{"asked_seconds", stop.asked_seconds},
                         {"saved_step", nullptr},
                         {"service_seconds", nullptr},
                         {"last_durable_step", nullptr}};
    if (is_saved) json["saved_step"] = *stop.saved_step;
    if (is_saved && stop.service_seconds) json["service_seconds"] = *stop.service_seconds;
    if (status_.checkpoint) json["last_durable_step"] = status_.checkpoint->step;
    report["stop"] = json;
  }
  if (options_.nodes) report["peer_copies"] = {{"count", copies_}, {"bytes", copied_bytes_}};
  report["root"] = nullptr;  // the fault that ended the job; null where none did
  // Of several nodes the coordinator counts, and tells the leading agent.
  report["budget"] = nullptr;
  if (!options_.nodes) report["budget"] = fmt::format("0 of {}", options_.job.max_restarts);
  report["faults"] = ordered_json::parse(former_faults_.empty() ? "[]" : former_faults_);
  for (const ordered_json& fault : report["faults"]) {
    const auto budget = fault.find("budget");
    if (budget != fault.end()) report["budget"] = *budget;
  }
  for (const Fault& fault : faults_) {
    ordered_json json = Describe(fault.record, fault.last_lines);
    json["at"] = Utc(fault.at);
    report["faults"].push_back(json);
    if (fault.record.fault.victim) continue;
    if (json.contains("budget")) report["budget"] = json["budget"];
    if (exit_code != 0 && stop_signals_.empty()) report["root"] = json;
  }
  if (!job_faults_.empty()) report["job_faults"] = ordered_json::array();
  for (const Fault& fault : job_faults_) {
    ordered_json json = Describe(fault.record, "");
    json["at"] = Utc(fault.at);
    if (!fault.record.fault.victim) report["budget"] = json["budget"];
    report["job_faults"].push_back(json);
  }
  report["victims"] = ordered_json::array();  // those who ended after the last fault that counts
  for (const Victim& victim : victims_) {
    ordered_json json = {{"rank", victim.rank},
                         {"how", victim.after_a_peer ? "failed after a peer" : "stopped by us"}};
    json.update(Describe(victim.end));
    report["victims"].push_back(json);
  }
  return run_dir_.WriteReport(Dump(report, 2) + "\n");
}

}  // namespace outlast
