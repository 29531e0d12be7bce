// What the agents of one generation tell each other: the agent of rank 0, the *lead*, and each
// other one, a *follower*, over one connection a pair. It carries keys of Put and Get, what the
// ranks' parts of a checkpoint need to become one, and what tells who hangs. Between followers
// nothing is told; whether they reach each other can be watched.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "outlast/base/id.h"

namespace outlast {

// Who belongs to a generation, as its COMMIT says.
struct PeerGroup {
  Id128 run_id;  // as the coordinator's WELCOME says: generations count from 1 in each run
  uint64_t generation = 0;
  std::string self;                // the name of this node
  std::string lead;                // of the node that holds rank 0
  std::vector<std::string> nodes;  // that hold ranks; self and lead among them
  std::string lead_address;        // HOST:PORT
  struct Link {
    std::string node;
    std::string address;  // HOST:PORT
  };
  // Other followers that are to be reached: kPeerLinks alone hears of them, on_up and on_down.
  std::vector<Link> links;
};

// Belongs to its loop's thread. No call waits, and none calls back before it returned.
class Peers {
 public:
  // `channel` tells users apart; each hears only its own.
  struct Ears {
    std::function<void(const std::string& node, const std::string& bytes)> on_message =
        [](const std::string&, const std::string&) {};
    // The connection stands, at first or again. Messages that were under way when it broke may be
    // lost: ask again.
    std::function<void(const std::string& node)> on_up = [](const std::string&) {};
    std::function<void(const std::string& node, const std::string& why)> on_down =
        [](const std::string&, const std::string&) {};
  };
  virtual ~Peers() = default;
  virtual void Listen(uint16_t channel, Ears ears) = 0;
  // HOST:PORT where this agent takes followers' connections; the same for the agent's life.
  virtual std::string address() const = 0;
  // Joins the group, and leaves the former one. Connections are made, and made again after a loss,
  // until Leave.
  virtual void Enter(const PeerGroup& group) = 0;
  // Nothing of `generation` or an older one is heard any more.
  virtual void Leave(uint64_t generation) = 0;
  // To the lead, or from the lead to a follower; kept until the connection stands, in order.
  // kInvalidArgument: over the size limit. kFailedPrecondition: no such peer in the present group.
  // kResourceExhausted: too much waits for it.
  virtual absl::Status Send(const std::string& node, uint16_t channel, std::string bytes) = 0;
};

inline constexpr uint16_t kPeerKeys = 1;   // the keeper's: Put and Get
inline constexpr uint16_t kPeerSaves = 2;  // the save service's
inline constexpr uint16_t kPeerWatch = 3;  // the watch's
inline constexpr uint16_t kPeerLinks = 4;  // nobody's: who hears of connections and links alone

}  // namespace outlast
