// How a follower comes to its lead: connects, greets, and again after a loss.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/event_loop.h"
#include "base/serial_thread.h"
#include "base/socket.h"
#include "run/frame_socket.h"
#include "run/peer_greeting.h"
#include "run/tcp_peers.h"

namespace outlast {

// Belongs to its loop's thread.
class PeerDialer {
 public:
  struct Ears {
    // The lead is who it should be, and in the same generation.
    std::function<void(std::unique_ptr<FrameSocket> socket)> on_up;
    // This attempt failed; another one follows, or none where the generation is over.
    std::function<void(const absl::Status& why)> on_failed;
    // The lead is not who it should be: it gets last words.
    std::function<void(std::unique_ptr<FrameSocket> socket, const absl::Status& why)> on_refused;
  };
  PeerDialer(EventLoop& loop, const TcpPeersOptions& options, Ears ears);
  ~PeerDialer();

  // Drops what was before, and begins.
  void Dial(const PeerIdentity& self, const std::string& lead_address);
  // The connection that on_up gave is lost.
  void DialAgain();
  void Stop();

 private:
  void Resolve();
  void Connect();
  void OnFrame(uint16_t channel, const std::string& payload);
  void OnRefused(std::string_view rest);
  // The attempt is over.
  void Fail(const absl::Status& why);
  void Retry();
  std::unique_ptr<FrameSocket> TakeSocket();

  EventLoop& loop_;
  const TcpPeersOptions& options_;
  const Ears ears_;
  const std::shared_ptr<bool> is_gone_ = std::make_shared<bool>(false);
  PeerIdentity self_;
  std::string lead_address_;
  std::vector<SocketAddress> addresses_;
  size_t next_address_ = 0;
  uint64_t dial_ = 0;  // tells answers of the name service that come late
  std::optional<FollowerGreeting> greeting_;
  std::unique_ptr<FrameSocket> socket_;
  bool is_proven_ = false;  // the lead is
  absl::Duration up_at_ = -absl::InfiniteDuration();
  absl::Duration back_off_;
  EventLoop::TimerId timer_ = 0;            // the attempt's deadline, or the next attempt
  std::unique_ptr<SerialThread> resolver_;  // from the first name on
};

}  // namespace outlast
