#include "launch/node_options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <climits>
#include <initializer_list>
#include <utility>

#include "base/error.h"
#include "base/flag_values.h"
#include "base/socket.h"
#include "control/endpoint.h"
#include "control/etcd_keys.h"

namespace outlast {
namespace {

constexpr char kTorchrunPort[] = "29400";  // of an endpoint without one

// Flags that mean nothing on one node, where they are most likely half of what was meant.
absl::Status RefuseOnOneNode(const NodeFlags& flags) {
  const auto refuse = [](std::string_view flag, std::string_view value) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{} {}without several nodes: --nnodes N or MIN:MAX with more than one wanted",
                 flag, value.empty() ? std::string() : fmt::format("'{}' ", value));
  };
  for (const auto& [flag, value] : std::initializer_list<std::pair<const char*, std::string>>{
           {"--coordinator", flags.coordinator},
           {"--node", flags.node},
           {"--advertise", flags.advertise},
           {"--spares", flags.spares},
           {"--last-call", flags.last_call},
           {"--join-timeout", flags.join},
           {"--exclude-for", flags.exclude_for},
           {"--preflight-peer-rate", flags.preflight_peer_rate},
           {"--peer-rate", flags.peer_rate},
           {"--peer-every", flags.peer_every},
           {"--peer-memory", flags.peer_memory},
           {"--failure-domain", flags.failure_domain}}) {
    if (!value.empty()) return refuse(flag, value);
  }
  if (const char* flag = flags.trust.given(); flag != nullptr) return refuse(flag, "");
  if (const char* flag = flags.etcd.given(); flag != nullptr) return refuse(flag, "");
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadCoordinator(const NodeFlags& flags) {
  const bool has_both = !flags.coordinator.empty() && !flags.endpoint.empty();
  if (has_both && flags.coordinator != flags.endpoint) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--coordinator '{}' and --rdzv-endpoint '{}': one of them wanted",
                 flags.coordinator, flags.endpoint);
  }
  std::string text = flags.coordinator.empty() ? flags.endpoint : flags.coordinator;
  if (text.empty()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--nnodes '{}' without --coordinator: HOST:PORT of one of the nodes wanted, the "
                 "same on all",
                 flags.nodes);
  }
  if (IsEtcdAddress(text)) return text;
  if (const char* flag = flags.etcd.given(); flag != nullptr) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{} with --coordinator '{}': etcd://HOST:PORT,... or etcd+https://... wanted",
                 flag, text);
  }
  const bool has_port = text.find(':') != std::string::npos;
  if (flags.coordinator.empty() && !has_port) text += std::string(":") + kTorchrunPort;
  const auto endpoint = HostPort::Parse(text);
  if (!endpoint.ok()) return RefuseValue("--coordinator", text, "HOST:PORT");
  if (endpoint->port == 0)
    return RefuseValue("--coordinator", text, "a port that all nodes can name, not 0,");
  if (IsAnyAddress(endpoint->host))
    return RefuseValue("--coordinator", text, "an address of one of the nodes, the same on all,");
  return text;
}

absl::Status ReadJobId(const NodeFlags& flags, std::string& job_id) {
  if (job_id.empty()) {
    OUTLAST_RETURN_IF_ERROR(CheckName("--rdzv-id", flags.rendezvous_id));
    job_id = flags.rendezvous_id;
  }
  if (!job_id.empty()) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "--nnodes '{}' without --job: the job's id wanted, the same on all nodes",
               flags.nodes);
}

absl::Status ReadPeerTier(const NodeFlags& flags, PeerTierOptions& peers) {
  constexpr int kMega = 1'000'000;
  int rate = static_cast<int>(peers.bytes_per_second / kMega), memory = 0;
  OUTLAST_RETURN_IF_ERROR(ReadInteger("--peer-rate", flags.peer_rate, 0, kMega, rate));
  OUTLAST_RETURN_IF_ERROR(ReadInteger("--peer-memory", flags.peer_memory, 1, INT_MAX, memory));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--peer-every", flags.peer_every, peers.every));
  OUTLAST_RETURN_IF_ERROR(CheckName("--failure-domain", flags.failure_domain));
  peers.bytes_per_second = static_cast<uint64_t>(rate) * kMega;
  peers.most_bytes = static_cast<uint64_t>(memory) * kMega;
  peers.domain = flags.failure_domain;
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadNode(const NodeFlags& flags) {
  std::string node = flags.node;
  if (node.empty()) {
    char name[256] = {};
    if (gethostname(name, sizeof name - 1) == 0) node = name;
    if (node.empty())
      return Error(absl::StatusCode::kInvalidArgument, "this machine has no name: --node wanted");
  }
  OUTLAST_RETURN_IF_ERROR(CheckName("--node", node));
  return node;
}

}  // namespace

void NodeFlags::Declare(CLI::App& app) {
  app.add_option("--nnodes", nodes, "Nodes that hold ranks: N, or MIN:MAX (1)")
      ->type_name("N|MIN:MAX");
  app.add_option("--coordinator", coordinator,
                 "Where the nodes meet: the node whose address it is leads the job, unless an "
                 "outlast coordinator listens there; or etcd://HOST:PORT,... (with TLS "
                 "etcd+https://) which knows where the job's outlast coordinator is")
      ->type_name("HOST:PORT");
  app.add_option("--node", node, "This node's name in the job (the machine's)")->type_name("NAME");
  app.add_option("--advertise", advertise,
                 "Own address that other nodes reach (the one from which the coordinator is "
                 "reached)")
      ->type_name("HOST");
  app.add_option("--spares", spares,
                 "Nodes besides MAX that the start waits for; they take a lost one's place (0)")
      ->type_name("N");
  app.add_option("--last-call", last_call,
                 "How long the last nodes are waited for, once there are MIN (5)")
      ->type_name("S");
  app.add_option("--join-timeout", join, "How long MIN nodes are waited for (600)")->type_name("S");
  app.add_option("--exclude-for", exclude_for,
                 "Of the node that leads: how long a node that is unfit is not taken (1800)")
      ->type_name("S");
  app.add_option(
         "--preflight-peer-rate", preflight_peer_rate,
         "Of the node that leads: MB/s that a node's link is to carry each way, as it is "
         "measured before it is given ranks, or 50% of the median of the other links; 0: it "
         "is only told (0)")
      ->type_name("MB/S|%");
  app.add_option("--peer-rate", peer_rate,
                 "How fast copies of snapshots go to another node, at most; 0: none do (200)")
      ->type_name("MB/S");
  app.add_option("--peer-every", peer_every, "Least time between two rounds of copies (1)")
      ->type_name("S");
  app.add_option("--peer-memory", peer_memory,
                 "What copies may take of this node's memory, own ranks' and others' (a quarter)")
      ->type_name("MB");
  app.add_option("--failure-domain", failure_domain,
                 "What fails together with this node, such as its rack: copies go to another one "
                 "(the node)")
      ->type_name("NAME");
  trust.Declare(app);
  etcd.Declare(app);
  app.add_flag("--standalone", standalone, "One node, as without --nnodes");
  app.add_option("--rdzv-endpoint,--rdzv_endpoint", endpoint, "torchrun's --coordinator")
      ->type_name("HOST[:PORT]");
  app.add_option("--rdzv-id,--rdzv_id", rendezvous_id, "torchrun's --job")->type_name("ID");
  app.add_option("--rdzv-backend,--rdzv_backend", rendezvous_backend,
                 "torchrun's; any is accepted: there is one way to meet")
      ->type_name("TEXT");
  app.add_option("--node-rank,--node_rank", hint,
                 "This node's place in the order of ranks, where it is free")
      ->type_name("N");
}

absl::StatusOr<std::optional<NodesOptions>> ReadNodes(const NodeFlags& flags, std::string& job_id) {
  NodesOptions options;
  if (!flags.nodes.empty()) {
    OUTLAST_ASSIGN_OR_RETURN(options.count, ParseNodeCount(flags.nodes));
  }
  OUTLAST_RETURN_IF_ERROR(ReadInteger("--node-rank", flags.hint, 0, INT_MAX, options.hint));
  if (options.count.max == 1) {
    OUTLAST_RETURN_IF_ERROR(RefuseOnOneNode(flags));
    return std::nullopt;
  }
  if (flags.standalone) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--standalone and --nnodes '{}': one of them wanted", flags.nodes);
  }
  OUTLAST_ASSIGN_OR_RETURN(options.coordinator, ReadCoordinator(flags));
  if (IsEtcdAddress(options.coordinator)) {
    OUTLAST_ASSIGN_OR_RETURN(options.etcd, ReadEtcd(options.coordinator, flags.etcd));
  }
  OUTLAST_RETURN_IF_ERROR(ReadJobId(flags, job_id));
  OUTLAST_ASSIGN_OR_RETURN(options.node, ReadNode(flags));
  options.advertise = flags.advertise;
  if (IsAnyAddress(options.advertise))
    return RefuseValue("--advertise", options.advertise, "an address that other nodes reach");
  OUTLAST_RETURN_IF_ERROR(ReadInteger("--spares", flags.spares, 0, 1 << 16, options.spares));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--last-call", flags.last_call, options.last_call));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--join-timeout", flags.join, options.join));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--exclude-for", flags.exclude_for, options.exclude_for));
  OUTLAST_RETURN_IF_ERROR(CheckWaits(flags.last_call, options.last_call, flags.join, options.join));
  OUTLAST_RETURN_IF_ERROR(ReadPeerRate(flags.preflight_peer_rate, options.preflight_peer_rate));
  OUTLAST_RETURN_IF_ERROR(ReadPeerTier(flags, options.peers));
  OUTLAST_ASSIGN_OR_RETURN(options.trust, ReadTrust(flags.trust));
  return options;
}

}  // namespace outlast
