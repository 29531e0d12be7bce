// How copies of snapshots travel from agent to agent: over connections of their own, on a thread of
// low priority, so that they hold up neither a beat nor training.
//
//   push   sender ── HEAD, CHUNK 0.. ──> keeper of the copy ── TAKEN | NO ──> sender     paced
//   fetch  asker ── WANT ──> who has it ── HEAD, CHUNK 0.. | NO ──> asker                at full
//   speed
//
// A connection begins with the greeting of peers (run/peer_greeting.h): the same job and run, the
// node that is meant, proof of the job's token. One of an older generation is refused. Each chunk
// travels with its number and is checked against its CRC32C on arrival; nothing is believed of a
// copy that did not come whole. A transfer in which nothing moves for 30 s is given up.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/replica_plan.h"
#include "checkpoint/replica_store.h"

namespace outlast {

struct ReplicaLinkOptions {
  std::string job;
  std::string node;               // this one
  std::string host;               // where this agent is reached
  std::string token;              // empty: none
  uint64_t bytes_per_second = 0;  // of what is pushed; 0: no limit
  absl::Duration no_progress = absl::Seconds(30);
  // One line for people: who was refused. On the link's thread.
  std::function<void(const std::string& line)> say = [](const std::string&) {};
};

// Safe for concurrent use. Destruction ends all transfers, without their `done`.
class ReplicaLink {
 public:
  // Listens at `host`. The store outlives it. kUnavailable: no port.
  static absl::StatusOr<std::unique_ptr<ReplicaLink>> Start(ReplicaLinkOptions options,
                                                            ReplicaStore& store);
  virtual ~ReplicaLink() = default;

  // HOST:PORT
  virtual std::string address() const = 0;
  // Transfers of older generations end (kAborted), and their connections are refused from now on.
  virtual void Enter(const Id128& run_id, uint64_t generation, std::set<std::string> nodes) = 0;

  // On the link's thread, once, unless the link goes first. `bytes` of chunks.
  using Done = std::function<void(const absl::Status& outcome, uint64_t bytes)>;
  // Brings copies that the store has to `node`. A copy that is not here ends it with kNotFound.
  virtual void Push(const std::string& node, const std::string& address,
                    std::vector<ReplicaName> copies, std::optional<SnapshotKey> keep,
                    Done done) = 0;
  // Brings copies that `node` has into the store.
  virtual void Fetch(const std::string& node, const std::string& address,
                     std::vector<ReplicaName> copies, Done done) = 0;
};

}  // namespace outlast
