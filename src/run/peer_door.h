// Where followers come in: accepts connections, and hands on those that proved who they are.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/event_loop.h"
#include "outlast/base/fd.h"
#include "run/frame_socket.h"
#include "run/peer_greeting.h"
#include "run/tcp_peers.h"

namespace outlast {

// Belongs to its loop's thread.
class PeerDoor {
 public:
  struct Ears {
    // Of this job, and with its token; beats are under way.
    std::function<void(const PeerIdentity& who, std::unique_ptr<FrameSocket> socket)> on_proven;
    std::function<void(std::unique_ptr<FrameSocket> socket, const std::string& who,
                       const absl::Status& why)>
        on_refused;
  };
  PeerDoor(EventLoop& loop, const TcpPeersOptions& options, UniqueFd listener, Ears ears);
  ~PeerDoor();

 private:
  struct Guest {
    std::unique_ptr<FrameSocket> socket;
    LeadGreeting greeting;
    bool is_asked = false;  // the challenge was sent
    EventLoop::TimerId deadline = 0;
  };
  void Accept();
  void Rest();
  void Let(UniqueFd fd);
  void OnFrame(uint64_t id, uint16_t channel, const std::string& payload);
  void OnEnd(uint64_t id, const absl::Status& why);
  void Refuse(uint64_t id, const absl::Status& why);
  // The guest leaves the door.
  Guest Take(uint64_t id);

  EventLoop& loop_;
  const TcpPeersOptions& options_;
  const UniqueFd listener_;
  const Ears ears_;
  std::map<uint64_t, Guest> guests_;
  uint64_t next_guest_ = 1;
  EventLoop::TimerId rest_ = 0;
};

}  // namespace outlast
