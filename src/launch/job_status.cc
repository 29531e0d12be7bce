#include "launch/job_status.h"

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace outlast {
namespace {

using nlohmann::ordered_json;

constexpr int kVersion = 1;
// Far more than a job has; what is longer is no answer of an agent.
constexpr size_t kMaxRanks = 1 << 16;

ordered_json OrNull(const std::string& text) {
  return text.empty() ? ordered_json(nullptr) : ordered_json(text);
}

template <typename T>
ordered_json OrNull(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json Describe(const RankStatus& rank) {
  return {{"rank", rank.rank},
          {"slot", rank.slot},
          {"node", OrNull(rank.node)},
          {"pid", rank.pid == 0 ? ordered_json(nullptr) : ordered_json(rank.pid)},
          {"state", rank.state},
          {"step", OrNull(rank.step)},
          {"phase", OrNull(rank.phase)},
          {"section", OrNull(rank.section)},
          {"age_seconds", OrNull(rank.age_seconds)},
          {"limit_seconds", OrNull(rank.limit_seconds)},
          {"limit_source", OrNull(rank.limit_source)},
          {"end", OrNull(rank.end)}};
}

ordered_json Describe(const std::optional<FaultStatus>& fault) {
  if (!fault) return nullptr;
  return {{"class", fault->fault_class}, {"rank", fault->rank},
          {"node", OrNull(fault->node)}, {"generation", fault->generation},
          {"detail", fault->detail},     {"at", fault->at}};
}

ordered_json Describe(const std::optional<CheckpointStatus>& checkpoint) {
  if (!checkpoint) return nullptr;
  return {{"step", checkpoint->step},
          {"name", checkpoint->name},
          {"bytes", checkpoint->bytes},
          {"seconds", checkpoint->seconds},
          {"at", checkpoint->at}};
}

ordered_json Describe(const std::optional<StopStatus>& stop) {
  if (!stop) return nullptr;
  return {{"asked_seconds", stop->asked_seconds},
          {"saved_step", OrNull(stop->saved_step)},
          {"service_seconds", OrNull(stop->service_seconds)}};
}

ordered_json Describe(const std::optional<GoodputStatus>& goodput) {
  if (!goodput) return nullptr;
  ordered_json states = ordered_json::object();
  for (const auto& [name, seconds] : goodput->states) states[name] = seconds;
  return {{"ratio", OrNull(goodput->ratio)},
          {"wall_seconds", goodput->wall_seconds},
          {"states", std::move(states)}};
}

// Reads fields of one object; what is missing, null or of another type leaves its target alone.
class Reader {
 public:
  explicit Reader(const ordered_json& object) : object_(object) {}

  void To(const char* key, std::string& target) const {
    if (const ordered_json* value = Find(key); value != nullptr && value->is_string())
      target = value->get<std::string>();
  }
  template <typename Number>
  void To(const char* key, Number& target) const {
    if (const ordered_json* value = Find(key); value != nullptr && value->is_number())
      target = value->get<Number>();
  }
  template <typename Number>
  void To(const char* key, std::optional<Number>& target) const {
    if (const ordered_json* value = Find(key); value != nullptr && value->is_number())
      target = value->get<Number>();
  }
  // Null: not there, or of another type.
  const ordered_json* Object(const char* key) const {
    const ordered_json* value = Find(key);
    return value != nullptr && value->is_object() ? value : nullptr;
  }
  const ordered_json* Array(const char* key) const {
    const ordered_json* value = Find(key);
    return value != nullptr && value->is_array() && value->size() <= kMaxRanks ? value : nullptr;
  }

 private:
  const ordered_json* Find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }

  const ordered_json& object_;
};

RankStatus ReadRank(const ordered_json& object) {
  const Reader from(object);
  RankStatus rank;
  from.To("rank", rank.rank);
  from.To("slot", rank.slot);
  from.To("node", rank.node);
  from.To("pid", rank.pid);
  from.To("state", rank.state);
  from.To("step", rank.step);
  from.To("phase", rank.phase);
  from.To("section", rank.section);
  from.To("age_seconds", rank.age_seconds);
  from.To("limit_seconds", rank.limit_seconds);
  from.To("limit_source", rank.limit_source);
  from.To("end", rank.end);
  return rank;
}

FaultStatus ReadFault(const ordered_json& object) {
  const Reader from(object);
  FaultStatus fault;
  from.To("class", fault.fault_class);
  from.To("rank", fault.rank);
  from.To("node", fault.node);
  from.To("generation", fault.generation);
  from.To("detail", fault.detail);
  from.To("at", fault.at);
  return fault;
}

StopStatus ReadStop(const ordered_json& object) {
  const Reader from(object);
  StopStatus stop;
  from.To("asked_seconds", stop.asked_seconds);
  from.To("saved_step", stop.saved_step);
  from.To("service_seconds", stop.service_seconds);
  return stop;
}

CheckpointStatus ReadCheckpoint(const ordered_json& object) {
  const Reader from(object);
  CheckpointStatus checkpoint;
  from.To("step", checkpoint.step);
  from.To("name", checkpoint.name);
  from.To("bytes", checkpoint.bytes);
  from.To("seconds", checkpoint.seconds);
  from.To("at", checkpoint.at);
  return checkpoint;
}

GoodputStatus ReadGoodput(const ordered_json& object) {
  const Reader from(object);
  GoodputStatus goodput;
  from.To("ratio", goodput.ratio);
  from.To("wall_seconds", goodput.wall_seconds);
  const ordered_json* states = from.Object("states");
  if (states == nullptr) return goodput;
  for (const auto& [name, seconds] : states->items())
    if (seconds.is_number()) goodput.states.emplace_back(name, seconds.get<double>());
  return goodput;
}

void ReadParts(const Reader& from, JobStatus& status) {
  if (const ordered_json* agent = from.Object("agent")) {
    Reader(*agent).To("pid", status.agent_pid);
    Reader(*agent).To("state", status.agent_state);
  }
  const ordered_json* budget = from.Object("budget");
  status.budget_is_known = budget != nullptr;
  if (budget != nullptr) {
    Reader(*budget).To("used", status.budget_used);
    Reader(*budget).To("of", status.budget);
  }
  if (const ordered_json* saves = from.Object("saves")) {
    Reader(*saves).To("durable", status.saves);
    Reader(*saves).To("failed", status.failed_saves);
    Reader(*saves).To("last_error", status.save_error);
  }
  if (const ordered_json* fault = from.Object("last_fault")) status.last_fault = ReadFault(*fault);
  if (const ordered_json* checkpoint = from.Object("checkpoint"))
    status.checkpoint = ReadCheckpoint(*checkpoint);
  if (const ordered_json* stop = from.Object("stop")) status.stop = ReadStop(*stop);
  if (const ordered_json* goodput = from.Object("goodput")) status.goodput = ReadGoodput(*goodput);
}

void ReadLists(const Reader& from, JobStatus& status) {
  if (const ordered_json* command = from.Array("command")) {
    for (const ordered_json& word : *command)
      if (word.is_string()) status.command.push_back(word.get<std::string>());
  }
  if (const ordered_json* ranks = from.Array("ranks")) {
    for (const ordered_json& rank : *ranks)
      if (rank.is_object()) status.ranks.push_back(ReadRank(rank));
  }
  if (const ordered_json* signals = from.Array("stop_signals")) {
    for (const ordered_json& signal : *signals)
      if (signal.is_number()) status.stop_signals.push_back(signal.get<int>());
  }
}

}  // namespace

std::string StatusJson(const JobStatus& status) {
  ordered_json json;
  json["version"] = kVersion;
  json["job"] = status.job;
  json["run_id"] = status.run_id;
  json["run_dir"] = status.run_dir;
  json["host"] = OrNull(status.host);
  json["node"] = OrNull(status.node);
  json["command"] = status.command;
  json["phase"] = status.phase;
  json["agent"] = {{"pid", status.agent_pid}, {"state", status.agent_state}};
  json["started_at"] = status.started_at;
  json["seconds"] = status.seconds;
  json["generation"] = status.generation;
  json["world"] = status.world;
  json["workers_started"] = status.workers_started;
  json["ranks"] = ordered_json::array();
  for (const RankStatus& rank : status.ranks) json["ranks"].push_back(Describe(rank));
  json["faults"] = status.faults;
  json["last_fault"] = Describe(status.last_fault);
  json["budget"] = nullptr;
  if (status.budget_is_known)
    json["budget"] = {{"used", status.budget_used}, {"of", status.budget}};
  json["saves"] = {{"durable", status.saves},
                   {"failed", status.failed_saves},
                   {"last_error", OrNull(status.save_error)}};
  json["checkpoint"] = Describe(status.checkpoint);
  json["verdict"] = OrNull(status.verdict);
  json["stop_signals"] = status.stop_signals;
  json["stop"] = Describe(status.stop);
  json["exit_code"] = OrNull(status.exit_code);
  json["reason"] = OrNull(status.reason);
  json["metrics"] = OrNull(status.metrics);
  json["mfu"] = OrNull(status.mfu);
  json["goodput"] = Describe(status.goodput);
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

absl::StatusOr<JobStatus> ParseStatusJson(std::string_view text) {
  const auto json = ordered_json::parse(text, nullptr, false);
  if (!json.is_object())
    return Error(absl::StatusCode::kDataLoss, "status: {} bytes that are no JSON object",
                 text.size());
  const Reader from(json);
  int version = kVersion;
  from.To("version", version);
  if (version > kVersion)
    return Error(absl::StatusCode::kDataLoss, "status: version {}, this reader knows {}", version,
                 kVersion);
  JobStatus status;
  from.To("job", status.job);
  from.To("run_id", status.run_id);
  from.To("run_dir", status.run_dir);
  from.To("host", status.host);
  from.To("node", status.node);
  from.To("phase", status.phase);
  from.To("started_at", status.started_at);
  from.To("seconds", status.seconds);
  from.To("generation", status.generation);
  from.To("world", status.world);
  from.To("workers_started", status.workers_started);
  from.To("faults", status.faults);
  from.To("verdict", status.verdict);
  from.To("exit_code", status.exit_code);
  from.To("reason", status.reason);
  from.To("metrics", status.metrics);
  from.To("mfu", status.mfu);
  ReadParts(from, status);
  ReadLists(from, status);
  return status;
}

}  // namespace outlast
