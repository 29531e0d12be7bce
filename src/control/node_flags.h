// Flags that `outlast run` and `outlast coordinator` share: how many nodes, and who is trusted.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/token.h"
#include "control/transport.h"

namespace CLI {
class App;
}

namespace outlast {

struct NodeCount {
  int min = 1, max = 1;
};
// "4", or "2:4". kInvalidArgument: neither.
absl::StatusOr<NodeCount> ParseNodeCount(const std::string& text);

// --token-file, --token-fd, --tls-ca, --tls-cert, --tls-key, --allow-strangers.
struct TrustFlags {
  std::string token_file, token_fd;
  std::string ca, certificate, key;
  bool allow_strangers = false;

  // Adds the flags, which write here.
  void Declare(CLI::App& app);
  // The first flag that was given, such as "--tls-ca"; null: none.
  const char* given() const;
};
struct Trust {
  JobToken token;
  control::Certificates certificates;
  bool allow_strangers = false;
};
// Reads the files, and the descriptor, which is closed. kInvalidArgument: flags that contradict
// each other, or a file that holds something else; else the file system's.
absl::StatusOr<Trust> ReadTrust(const TrustFlags& flags);

}  // namespace outlast
