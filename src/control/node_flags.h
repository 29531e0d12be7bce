// Flags that `outlast run` and `outlast coordinator` share: how many nodes, and who is trusted.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "control/token.h"
#include "control/transport.h"
#include "outlast/elastic/job_options.h"
#include "outlast/elastic/membership.h"
#include "outlast/elastic/terms.h"

namespace CLI {
class App;
}

namespace outlast {

struct NodeCount {
  int min = 1, max = 1;
};
// "4", or "2:4". kInvalidArgument: neither.
absl::StatusOr<NodeCount> ParseNodeCount(const std::string& text);

// --preflight-peer-rate: MB/s, or "50%" of the median of the other links.
struct PeerRate {
  int floor = 0;
  double share = 0;
};
absl::Status ReadPeerRate(const std::string& text, PeerRate& rate);
// kInvalidArgument: MIN nodes would be waited for no longer than the last ones. `last_call_text`
// and `join_text`: --last-call and --join-timeout as they were given, empty where they were not.
absl::Status CheckWaits(const std::string& last_call_text, absl::Duration last_call,
                        const std::string& join_text, absl::Duration join);

// The worlds that a job of such nodes may have.
MembershipOptions MembershipOf(const JobOptions& job, int slots, const NodeCount& nodes);

// --micro-batches, --ranks-per-replica.
struct BatchFlags {
  std::string micro_batches, ranks_per_replica;

  // Adds the flags, which write here.
  void Declare(CLI::App& app);
  // kInvalidArgument: no number.
  absl::Status Read(JobOptions& job) const;
};

// What a coordinator decides by, and its agents were started with too; `slots` of a node.
Terms JobTerms(const JobOptions& job, int slots, const NodeCount& nodes, int spares);

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
