#include "control/etcd_keys.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/socket.h"

namespace outlast {
namespace {

using nlohmann::json;

constexpr std::string_view kScheme = "etcd://";

std::string Dump(const json& object) {
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

// Empty: there is no such text.
std::string TextOf(const json& object, const char* name) {
  const auto at = object.find(name);
  return at != object.end() && at->is_string() ? at->get<std::string>() : std::string();
}

}  // namespace

bool IsEtcdAddress(std::string_view text) { return text.starts_with(kScheme); }

absl::StatusOr<std::vector<std::string>> ParseEtcdEndpoints(std::string_view text) {
  std::string_view rest = text;
  if (IsEtcdAddress(rest)) rest.remove_prefix(kScheme.size());
  std::vector<std::string> endpoints;
  while (true) {
    const size_t comma = rest.find(',');
    const auto endpoint = HostPort::Parse(rest.substr(0, comma));
    if (!endpoint.ok() || endpoint->port == 0) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "etcd '{}': HOST:PORT is wanted, or several with commas between them", text);
    }
    endpoints.push_back(endpoint->text());
    if (comma == std::string_view::npos) return endpoints;
    rest.remove_prefix(comma + 1);
  }
}

std::string EtcdKeys::Record(uint64_t index) const {
  return fmt::format("{}{:016x}", journal, index);
}

std::string EtcdLeader::text() const {
  return Dump({{"id", id}, {"name", name}, {"address", address}});
}

std::optional<EtcdLeader> EtcdLeader::Parse(std::string_view text) {
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) return std::nullopt;
  return EtcdLeader{TextOf(object, "id"), TextOf(object, "name"), TextOf(object, "address")};
}

std::string EtcdOver::text() const {
  return Dump({{"run", run}, {"exit_code", exit_code}, {"reason", reason}});
}

std::optional<EtcdOver> EtcdOver::Parse(std::string_view text) {
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) return std::nullopt;
  const auto code = object.find("exit_code");
  if (code == object.end() || !code->is_number_integer()) return std::nullopt;
  const auto value = code->get<int64_t>();
  if (value < 0 || value > 255) return std::nullopt;
  return EtcdOver{TextOf(object, "run"), static_cast<int>(value), TextOf(object, "reason")};
}

absl::StatusOr<std::string> FindEtcdLeader(control::EtcdClient& client, const std::string& job) {
  const EtcdKeys keys(job);
  const control::EtcdReply reply = client.Read(keys.folder, keys.leader, 1);
  if (!reply.done())
    return Error(absl::StatusCode::kUnavailable, "etcd does not answer ({})", reply.why);
  if (reply.keys.empty() || reply.keys[0].key != keys.leader) {
    return Error(absl::StatusCode::kNotFound,
                 "nobody leads job {} now, as etcd has it (outlast coordinator --etcd)", job);
  }
  const auto leader = EtcdLeader::Parse(reply.keys[0].value);
  if (!leader) return Error(absl::StatusCode::kNotFound, "{}: it names nobody", keys.leader);
  if (leader->address.empty()) {
    return Error(absl::StatusCode::kNotFound, "{} leads job {}, and does not listen yet",
                 leader->name, job);
  }
  return leader->address;
}

}  // namespace outlast
