// Peers over TCP: each agent listens, followers connect to the lead. One connection serves one
// generation: it begins with a greeting (peer_greeting.h), and all that it carries is of that
// generation.
//
//   follower  connect ─ greet ─ proven ─ waits for the lead's Enter ─ WELCOME: up
//      ^                                                                  │ lost
//      └───────────────── back-off with jitter, up to 2 s ────────────────┘
//
// Refused, with one line on both sides that names both: another job or run, a node that is not in
// the generation, a generation that is over, another token, another version, a message over the
// limit, bytes of a stranger. Of two connections of one node the newer one, once proven, stays.
// Messages are neither encrypted nor signed one by one.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "run/peers.h"

namespace outlast {

struct TcpPeersOptions {
  std::string job;
  std::string node;   // this one
  std::string token;  // the job's secret; empty: none
  // HOST:PORT to listen on; port 0: any free one.
  std::string bind = "127.0.0.1:0";
  // What others reach this host by; empty: the host of `bind`.
  std::string announced_host;

  size_t max_message_bytes = 4 << 20;
  size_t max_waiting_bytes = 16 << 20;  // to one peer
  absl::Duration beat = absl::Seconds(1);
  absl::Duration loss =
      absl::Seconds(3);  // silence after which a peer is down; three beats or more
  absl::Duration greeting = absl::Seconds(5);  // from connect to proof
  // How long a follower of a generation that this agent has not entered yet is let wait.
  absl::Duration enter = absl::Seconds(60);
  // One line for people, without a line end. Empty: to stderr. The same line is said once a minute.
  std::function<void(const std::string& line)> say;
};

// kInvalidArgument, kUnavailable: `bind` is no address, or none of this machine, or taken.
// `loop` must outlive it. May wait for the machine's name service where `bind` holds a name.
absl::StatusOr<std::unique_ptr<Peers>> MakeTcpPeers(EventLoop& loop, TcpPeersOptions options);

}  // namespace outlast
