// Flags that `outlast run` and `outlast coordinator` share: how etcd is reached, and as whom.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "control/etcd.h"

namespace CLI {
class App;
}

namespace outlast {

// --etcd-ca, --etcd-cert, --etcd-key, --etcd-user, --etcd-password-file.
struct EtcdFlags {
  std::string ca, certificate, key;
  std::string user, password_file;

  // Adds the flags, which write here.
  void Declare(CLI::App& app);
  // The first flag that was given, such as "--etcd-ca"; null: none.
  const char* given() const;
};

// The servers of `address` (etcd_keys.h); reads the files. kInvalidArgument: flags that contradict
// each other or the address, a password that would cross a network without TLS, or a file that
// holds something else; else the file system's.
absl::StatusOr<control::EtcdServers> ReadEtcd(const std::string& address, const EtcdFlags& flags);

}  // namespace outlast
