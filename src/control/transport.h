// Streams of frames between agents and a coordinator: what a transport must bring. The one that
// stands behind it speaks gRPC, and lives in a shared module of its own (load_transport.h), so that
// a job of one node never loads it. Nothing of gRPC is seen here.
//
// Callbacks come on the transport's own threads, those of one stream one after another: post them.
// None comes after the object that they were given to is gone, so destruction waits for one that
// runs. Other calls wait for nothing, unless they say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "outlast/elastic/messages.h"

namespace outlast::control {

inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr size_t kMaxFrameBytes = 4 << 20;
inline constexpr size_t kMaxGreetingBytes = 64 << 10;  // of all before the welcome

// The first words of an agent on its stream.
struct Opening {
  uint32_t version = kProtocolVersion;
  std::string software;
  std::string job, node;
  std::string nonce;
};
struct Challenge {
  uint32_t version = kProtocolVersion;
  std::string software;
  std::string job;
  std::string nonce;
  std::string proof;  // empty: the coordinator has no token
};
struct Greeting {
  control::Hello hello;
  std::string proof;  // empty: the agent has no token
};

using AgentFrame = std::variant<Opening, Greeting, AgentMessage>;
using CoordinatorFrame = std::variant<Challenge, CoordinatorMessage>;

// PEM texts. Without `ca` and `certificate` streams are plain. A coordinator has a certificate and
// its key; `ca` makes it want one of each agent too. An agent trusts `ca`.
struct Certificates {
  std::string ca, certificate, key;
  bool empty() const { return ca.empty() && certificate.empty(); }
};

// A peer that is silent for `ping_after` is asked for a sign of life, and its streams are closed
// when none comes within `pong_within`: so also a stopped process, whose kernel still answers.
struct Liveness {
  int ping_after_ms = 1500;
  int pong_within_ms = 1500;
  int connect_within_ms = 2500;
};

// The coordinator's side. Safe for concurrent use.
// Destruction waits at most about a second for what streams that were closed had still to be sent.
class FrameServer {
 public:
  struct Ears {
    std::function<void(uint64_t stream, const std::string& address)> on_open;
    // `bytes`: its size on the wire.
    std::function<void(uint64_t stream, AgentFrame frame, size_t bytes)> on_frame;
    // Last of a stream, once, whoever ended it.
    std::function<void(uint64_t stream, const std::string& why)> on_closed;
  };
  virtual ~FrameServer() = default;
  // That it listens on; of several addresses one port.
  virtual int port() const = 0;
  // Dropped when there is no such stream any more. A stream that does not read what it is sent, or
  // whose frame is over the limit, is closed.
  virtual void Send(uint64_t stream, const CoordinatorFrame& frame) = 0;
  // Ends the stream after what was sent on it before.
  virtual void Close(uint64_t stream, const std::string& reason) = 0;
};

// An agent's stream. Safe for concurrent use. Destroyed after Finish, what was sent still leaves.
class FrameStream {
 public:
  struct Ears {
    std::function<void(CoordinatorFrame frame, size_t bytes)> on_frame;
    // Last, once: the stream ended, or could not be opened.
    std::function<void(const std::string& why)> on_closed;
  };
  virtual ~FrameStream() = default;
  virtual void Send(const AgentFrame& frame) = 0;
  // Ends the stream after what was sent on it before.
  virtual void Finish() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  // Streams are numbered from 1. `addresses`: numeric, without a port, such as "127.0.0.1" and
  // "::1". Port 0, with one address: any. Null: it could not be bound.
  virtual std::unique_ptr<FrameServer> Listen(const std::vector<std::string>& addresses, int port,
                                              const Certificates& certificates,
                                              const Liveness& liveness, FrameServer::Ears ears) = 0;
  // `name`: whom the server's certificate must name.
  virtual std::unique_ptr<FrameStream> Connect(const std::string& address, int port,
                                               const std::string& name,
                                               const Certificates& certificates,
                                               const Liveness& liveness,
                                               FrameStream::Ears ears) = 0;
  // Waits until streams that were finished or destroyed are off the wire, at most about two
  // seconds. Before the process ends.
  virtual void Settle() = 0;
};

// The module's one entry: the process's transport, or null when `abi` is not its own.
inline constexpr char kTransportEntry[] = "OutlastControlTransport";
using TransportEntry = Transport* (*)(uint64_t abi);
// Both sides are built together; this tells of a module of another build.
inline constexpr uint64_t kTransportAbi =
    1'000'000 + sizeof(AgentFrame) * 1'000 + sizeof(CoordinatorFrame);

}  // namespace outlast::control
