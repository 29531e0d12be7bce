#include "launch/event_log.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "base/error.h"

namespace outlast {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMaxLine = 1 << 20;
constexpr int kMaxSlots = 1 << 16;

const ordered_json* Find(const ordered_json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

std::string Text(const ordered_json& object, const char* key) {
  const ordered_json* value = Find(object, key);
  return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
}

template <typename Number>
std::optional<Number> Read(const ordered_json& object, const char* key) {
  const ordered_json* value = Find(object, key);
  if (value == nullptr || !value->is_number()) return std::nullopt;
  return value->get<Number>();
}

bool IsTrue(const ordered_json& object, const char* key) {
  const ordered_json* value = Find(object, key);
  return value != nullptr && value->is_boolean() && value->get<bool>();
}

// The place that an event is about. Null: it names none.
RankStatus* PlaceOf(const ordered_json& event, JobStatus& status) {
  const std::optional<int> rank = Read<int>(event, "rank");
  const int slot = Read<int>(event, "slot").value_or(rank.value_or(-1));
  if (slot < 0 || slot >= kMaxSlots) return nullptr;
  const auto size = static_cast<size_t>(slot) + 1;
  while (status.ranks.size() < size) {
    status.ranks.emplace_back();
    status.ranks.back().slot = static_cast<int>(status.ranks.size()) - 1;
  }
  RankStatus& place = status.ranks[static_cast<size_t>(slot)];
  if (rank) place.rank = *rank;
  return &place;
}

void OnStart(const ordered_json& event, JobStatus& status) {
  status.job = Text(event, "job");
  status.run_id = Text(event, "run_id");
  status.host = Text(event, "host");
  status.node = Text(event, "node");
  status.boot_id = Text(event, "boot_id");
  status.started_at = Text(event, "at");
  status.world = Read<int>(event, "world").value_or(0);
  status.budget = Read<int>(event, "max_restarts").value_or(0);
  status.budget_is_known = status.node.empty();
  status.agent_pid = Read<int>(event, "pid").value_or(0);
  status.agent_start_ticks = Read<uint64_t>(event, "start_ticks").value_or(0);
  const ordered_json* command = Find(event, "command");
  if (command == nullptr || !command->is_array()) return;
  for (const ordered_json& word : *command)
    if (word.is_string()) status.command.push_back(word.get<std::string>());
}

void OnAgentAdopted(const ordered_json& event, JobStatus& status) {
  status.agent_pid = Read<int>(event, "pid").value_or(0);
  status.agent_start_ticks = Read<uint64_t>(event, "start_ticks").value_or(0);
  status.phase = "re-forming";
}

void OnWorkerStarted(const ordered_json& event, JobStatus& status) {
  RankStatus* place = PlaceOf(event, status);
  if (place == nullptr) return;
  ++status.workers_started;
  place->pid = Read<int>(event, "pid").value_or(0);
  place->incarnation = Read<uint64_t>(event, "incarnation").value_or(0);
  place->state = "starting";
}

// By its incarnation: the rank that its place holds may be another by now.
void OnWorkerEnded(const ordered_json& event, JobStatus& status) {
  const auto incarnation = Read<uint64_t>(event, "incarnation");
  const auto place = std::find_if(
      status.ranks.begin(), status.ranks.end(),
      [&](const RankStatus& rank) { return rank.pid != 0 && incarnation == rank.incarnation; });
  if (place == status.ranks.end()) return;
  place->pid = 0;
  place->state = "ended";
  const std::optional<int> signal = Read<int>(event, "signal");
  place->end = signal ? fmt::format("signal {}", *signal)
                      : fmt::format("exit code {}", Read<int>(event, "code").value_or(0));
  if (IsTrue(event, "by_us")) place->end += " (by us)";
}

void OnCommit(const ordered_json& event, JobStatus& status) {
  status.generation = Read<uint64_t>(event, "generation").value_or(status.generation);
  if (const auto world = Read<int>(event, "world")) status.world = *world;
  const ordered_json* ranks = Find(event, "ranks");  // by slot
  for (size_t slot = 0; ranks != nullptr && ranks->is_array() && slot < ranks->size(); ++slot) {
    if (slot < status.ranks.size() && (*ranks)[slot].is_number())
      status.ranks[slot].rank = (*ranks)[slot].get<int>();
  }
  if (status.phase != "stopping") status.phase = "running";
}

// "1 of 3"
void ReadBudget(const std::string& text, JobStatus& status) {
  const size_t of = text.find(" of ");
  if (of == std::string::npos) return;
  std::from_chars(text.data(), text.data() + of, status.budget_used);
  std::from_chars(text.data() + of + 4, text.data() + text.size(), status.budget);
  status.budget_is_known = true;
}

void OnFault(const ordered_json& event, JobStatus& status) {
  if (IsTrue(event, "victim")) return;
  ReadBudget(Text(event, "budget"), status);
  // The coordinator's word of a fault that this node has told of itself.
  if (Text(event, "event") == "job_fault" && Text(event, "node") == status.node) return;
  FaultStatus fault;
  fault.fault_class = Text(event, "class");
  fault.rank = Read<int>(event, "rank").value_or(-1);
  fault.node = Text(event, "node");
  fault.generation = Read<uint64_t>(event, "generation").value_or(0);
  fault.detail = Text(event, "detail");
  fault.at = Text(event, "at");
  ++status.faults;
  ++status.faults_by_class[fault.fault_class];
  status.last_fault = std::move(fault);
  if (status.phase == "running") status.phase = "re-forming";
}

void OnSaved(const ordered_json& event, JobStatus& status) {
  CheckpointStatus saved;
  saved.step = Read<int64_t>(event, "step").value_or(0);
  saved.name = Text(event, "checkpoint");
  saved.bytes = Read<uint64_t>(event, "bytes").value_or(0);
  saved.seconds = Read<double>(event, "seconds").value_or(0);
  saved.at = Text(event, "at");
  ++status.saves;
  // A newly committed step gives all restarts back.
  if (!status.checkpoint || saved.step > status.checkpoint->step) status.budget_used = 0;
  status.saved_bytes += saved.bytes;
  status.save_error.clear();
  if (status.stop) {
    status.stop->saved_step = saved.step;
    if (const auto at = Read<double>(event, "t"))
      status.stop->service_seconds = std::max(0.0, *at - status.stop->asked_seconds);
  }
  status.checkpoint = std::move(saved);
}

void OnStopAsked(const ordered_json& event, JobStatus& status) {
  status.stop_signals.push_back(Read<int>(event, "signal").value_or(0));
  status.phase = "stopping";
  if (!status.stop) status.stop = StopStatus{Read<double>(event, "t").value_or(0), {}, {}};
}

void OnFinish(const ordered_json& event, JobStatus& status) {
  status.exit_code = Read<int>(event, "exit_code").value_or(1);
  status.reason = Text(event, "reason");
  status.phase = "ended";
}

}  // namespace

void Fold(const ordered_json& event, JobStatus& status) {
  if (!event.is_object()) return;
  const std::string name = Text(event, "event");
  status.seconds = std::max(status.seconds, Read<double>(event, "t").value_or(0));
  if (name == "start") {
    OnStart(event, status);
  } else if (name == "worker_started") {
    OnWorkerStarted(event, status);
  } else if (name == "worker_ended") {
    OnWorkerEnded(event, status);
  } else if (name == "agent_adopted") {
    OnAgentAdopted(event, status);
  } else if (name == "joined") {
    status.run_id = Text(event, "run_id");
  } else if (name == "commit") {
    OnCommit(event, status);
  } else if (name == "fault" || name == "job_fault") {
    OnFault(event, status);
  } else if (name == "saved") {
    OnSaved(event, status);
  } else if (name == "save_failed") {
    ++status.failed_saves;
    status.save_error = Text(event, "error");
  } else if (name == "verdict" || name == "recovered") {
    status.verdict = name == "verdict" ? Text(event, "verdict") : "";
  } else if (name == "stop_asked") {
    OnStopAsked(event, status);
  } else if (name == "metrics") {
    status.metrics = Text(event, "address");
  } else if (name == "finish") {
    OnFinish(event, status);
  }
}

absl::StatusOr<EventLogRead> ReadEventLog(const std::string& run_dir) {
  const std::string path = run_dir + "/events.jsonl";
  std::ifstream file(path, std::ios::binary);
  if (!file) return ErrnoStatus(errno, path);
  EventLogRead read;
  std::string line;
  while (std::getline(file, line)) {
    if (file.eof()) break;  // no line end: it was cut
    if (line.empty()) continue;
    const auto event = line.size() <= kMaxLine ? ordered_json::parse(line, nullptr, false)
                                               : ordered_json(ordered_json::value_t::discarded);
    if (!event.is_object()) {
      ++read.skipped;
      continue;
    }
    if (const int version = Read<int>(event, "version").value_or(kEventLogVersion);
        version > kEventLogVersion)
      return Error(absl::StatusCode::kDataLoss, "{}: version {}, this reader knows {}", path,
                   version, kEventLogVersion);
    Fold(event, read.status);
    ++read.events;
  }
  if (read.events == 0) return Error(absl::StatusCode::kDataLoss, "{}: holds no whole event", path);
  read.status.run_dir = run_dir;
  return read;
}

}  // namespace outlast
