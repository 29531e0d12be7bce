// What `outlast run` is told of a job of several nodes.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/peer_tier_options.h"
#include "control/etcd_flags.h"
#include "control/node_flags.h"

namespace outlast {

struct NodesOptions {
  NodeCount count;               // nodes that hold ranks
  std::string coordinator;       // HOST:PORT, or etcd://HOST:PORT,...
  control::EtcdServers etcd;     // of the latter
  std::string node;              // this one's name
  std::string advertise;         // HOST; empty: the address from which the coordinator is reached
  int hint = -1;                 // of this node's place in the first generation
  int spares = 0;                // agents besides, that the first generation waits for
  PeerRate preflight_peer_rate;  // what a node's link is to carry
  absl::Duration last_call = absl::Seconds(5);
  absl::Duration exclude_for = absl::Seconds(1800);
  absl::Duration join = absl::Seconds(600);
  Trust trust;
  PeerTierOptions peers{.bytes_per_second = 200'000'000, .every = absl::Seconds(1)};
};

// The raw texts of the flags.
struct NodeFlags {
  std::string nodes, coordinator, node, advertise, spares, last_call, join, exclude_for;
  std::string preflight_peer_rate;
  std::string peer_rate, peer_every, peer_memory, failure_domain;
  std::string endpoint, rendezvous_id, rendezvous_backend, hint;  // torchrun's
  bool standalone = false;
  TrustFlags trust;
  EtcdFlags etcd;

  void Declare(CLI::App& app);
};

// What the flags ask for; none: one node, which is so without --nnodes. `job_id`, as --job gave it,
// is filled in where only --rdzv-id gave one. kInvalidArgument: one line: flag, found, wanted.
absl::StatusOr<std::optional<NodesOptions>> ReadNodes(const NodeFlags& flags, std::string& job_id);

}  // namespace outlast
