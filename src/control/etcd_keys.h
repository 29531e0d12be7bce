// What a job keeps in etcd, and where its agents look for its coordinator.
//
//   /outlast/v1/JOB/leader      who leads, and where: {"id", "name", "address"}; goes with its
//   lease.
//                               The revision that made it is the leader's incarnation
//   /outlast/v1/JOB/run         which run of the job the journal is of: a number
//   /outlast/v1/JOB/over        how that run ended: {"run", "exit_code", "reason"}
//   /outlast/v1/JOB/journal/N   the journal's record N, 16 hex digits (outlast/elastic/journal.h).
//                               The first may stand for all before it and itself; those are gone
//
// Each is written in a transaction that holds only while the writer's own `leader` key is there, so
// nothing of a leader that was deposed, and does not know it yet, arrives. A new run deletes the
// records of the former one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "control/etcd.h"

namespace outlast {

// "HOST:PORT,HOST:PORT", without or with "etcd://" before it; with TLS "etcd+https://" stands
// before it, or "https://" before each, as etcd's own tools have it. kInvalidArgument: something
// else.
struct EtcdAddress {
  std::vector<std::string> endpoints;
  bool uses_tls = false;
};
absl::StatusOr<EtcdAddress> ParseEtcdAddress(std::string_view text);
// Whether a coordinator's address says that etcd knows it.
bool IsEtcdAddress(std::string_view text);

class EtcdKeys {
 public:
  explicit EtcdKeys(const std::string& job) : folder("/outlast/v1/" + job + "/") {}

  const std::string folder;
  const std::string leader = folder + "leader";
  const std::string run = folder + "run";
  const std::string over = folder + "over";
  const std::string journal = folder + "journal/";
  std::string Record(uint64_t index) const;
};

struct EtcdLeader {
  std::string id;       // drawn by each process
  std::string name;     // for people
  std::string address;  // HOST:PORT; empty: it does not listen yet

  std::string text() const;
  static std::optional<EtcdLeader> Parse(std::string_view text);
};

struct EtcdOver {
  std::string run;
  int exit_code = 1;
  std::string reason;

  std::string text() const;
  static std::optional<EtcdOver> Parse(std::string_view text);
};

// Where the coordinator of `job` listens, HOST:PORT. kNotFound: nobody leads it now. kUnavailable:
// etcd does not answer. kFailedPrecondition: it refuses, such as an unknown user. Blocks for at
// most about two seconds.
absl::StatusOr<std::string> FindEtcdLeader(control::EtcdClient& client, const std::string& job);

}  // namespace outlast
