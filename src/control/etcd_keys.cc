#include "control/etcd_keys.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/socket.h"

namespace outlast {
namespace {

using nlohmann::json;

constexpr std::string_view kScheme = "etcd://", kTlsScheme = "etcd+https://";

std::string Dump(const json& object) {
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

// Empty: there is no such text.
std::string TextOf(const json& object, const char* name) {
  const auto at = object.find(name);
  return at != object.end() && at->is_string() ? at->get<std::string>() : std::string();
}

}  // namespace

bool IsEtcdAddress(std::string_view text) {
  return text.starts_with(kScheme) || text.starts_with(kTlsScheme);
}

absl::StatusOr<EtcdAddress> ParseEtcdAddress(std::string_view text) {
  const auto refuse = [text](std::string_view wanted) {
    return Error(absl::StatusCode::kInvalidArgument, "etcd '{}': {}", text, wanted);
  };
  std::string_view rest = text;
  const auto take = [](std::string_view& from, std::string_view scheme) {
    if (!from.starts_with(scheme)) return false;
    from.remove_prefix(scheme.size());
    return true;
  };
  const bool is_plain = take(rest, kScheme), is_tls = !is_plain && take(rest, kTlsScheme);
  EtcdAddress address;
  size_t with_tls = 0;
  while (true) {
    const size_t comma = rest.find(',');
    std::string_view one = rest.substr(0, comma);
    if (is_tls || (!is_plain && take(one, "https://"))) ++with_tls;
    const auto endpoint = HostPort::Parse(one);
    if (!endpoint.ok() || endpoint->port == 0)
      return refuse("HOST:PORT is wanted, or several with commas between them");
    address.endpoints.push_back(endpoint->text());
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  if (with_tls > 0 && with_tls < address.endpoints.size())
    return refuse("https:// before all of them is wanted, or before none");
  address.uses_tls = with_tls > 0;
  return address;
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
  if (reply.outcome == control::EtcdReply::Outcome::kRefused)
    return Error(absl::StatusCode::kFailedPrecondition, "etcd refuses: {}", reply.why);
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
