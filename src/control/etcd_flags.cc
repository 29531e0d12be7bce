#include "control/etcd_flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/flag_values.h"
#include "base/socket.h"
#include "control/certificates.h"
#include "control/endpoint.h"
#include "control/etcd_keys.h"
#include "control/secret_file.h"

namespace outlast {
namespace {

// The first line, as an editor or `echo` leaves it.
absl::StatusOr<std::string> ReadPassword(const std::string& path) {
  OUTLAST_ASSIGN_OR_RETURN(std::string text, ReadSecretFile(path, "etcd's password file"));
  text.resize(std::min(text.find_first_of("\r\n"), text.size()));
  if (!text.empty()) return text;
  return Error(absl::StatusCode::kInvalidArgument,
               "etcd's password file {}: its first line is empty, the password wanted", path);
}

absl::Status CheckTls(const std::string& address, bool uses_tls, const EtcdFlags& flags) {
  if (uses_tls && flags.ca.empty())
    return RefuseValue("--etcd-ca", "", fmt::format("for '{}' its CA's certificate", address));
  if (uses_tls) return absl::OkStatus();
  for (const auto& [flag, value] : {std::pair<const char*, std::string>{"--etcd-ca", flags.ca},
                                    {"--etcd-cert", flags.certificate},
                                    {"--etcd-key", flags.key}}) {
    if (value.empty()) continue;
    return Error(absl::StatusCode::kInvalidArgument,
                 "{} '{}' with etcd '{}', which is without TLS: https:// wanted", flag, value,
                 address);
  }
  return absl::OkStatus();
}

absl::Status CheckUser(const std::string& address, const control::EtcdServers& servers,
                       const EtcdFlags& flags) {
  if (flags.user.empty() != flags.password_file.empty()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--etcd-user '{}' and --etcd-password-file '{}': both or none wanted", flags.user,
                 flags.password_file);
  }
  if (flags.user.empty() || servers.uses_tls) return absl::OkStatus();
  for (const std::string& endpoint : servers.endpoints) {
    OUTLAST_ASSIGN_OR_RETURN(const HostPort at, HostPort::Parse(endpoint));
    if (at.host == "localhost" || IsLoopback(at.host)) continue;
    return Error(absl::StatusCode::kInvalidArgument,
                 "--etcd-user '{}' with etcd '{}': its password would cross the network for all to "
                 "read, https:// wanted",
                 flags.user, address);
  }
  return absl::OkStatus();
}

}  // namespace

void EtcdFlags::Declare(CLI::App& app) {
  app.add_option("--etcd-ca", ca, "Of an https:// etcd: whom its certificates must be from")
      ->type_name("FILE");
  app.add_option("--etcd-cert", certificate, "Own certificate, which etcd is shown")
      ->type_name("FILE");
  app.add_option("--etcd-key", key, "Its key")->type_name("FILE");
  app.add_option("--etcd-user", user, "A user of etcd, where it wants one")->type_name("NAME");
  app.add_option("--etcd-password-file", password_file, "Holds that user's password")
      ->type_name("FILE");
}

const char* EtcdFlags::given() const {
  if (!ca.empty()) return "--etcd-ca";
  if (!certificate.empty()) return "--etcd-cert";
  if (!key.empty()) return "--etcd-key";
  if (!user.empty()) return "--etcd-user";
  return password_file.empty() ? nullptr : "--etcd-password-file";
}

absl::StatusOr<control::EtcdServers> ReadEtcd(const std::string& address, const EtcdFlags& flags) {
  OUTLAST_ASSIGN_OR_RETURN(EtcdAddress parsed, ParseEtcdAddress(address));
  control::EtcdServers servers{.endpoints = std::move(parsed.endpoints),
                               .uses_tls = parsed.uses_tls,
                               .certificates = {},
                               .user = flags.user,
                               .password = {}};
  OUTLAST_RETURN_IF_ERROR(CheckTls(address, servers.uses_tls, flags));
  OUTLAST_RETURN_IF_ERROR(CheckUser(address, servers, flags));
  OUTLAST_ASSIGN_OR_RETURN(servers.certificates,
                           ReadCertificates(flags.ca, flags.certificate, flags.key));
  if (!flags.password_file.empty()) {
    OUTLAST_ASSIGN_OR_RETURN(servers.password, ReadPassword(flags.password_file));
  }
  return servers;
}

}  // namespace outlast
