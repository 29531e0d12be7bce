// A TCP connection on an event loop that sends and hears whole frames, and never waits.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "outlast/base/fd.h"
#include "run/peer_frames.h"

namespace outlast {

// Belongs to its loop's thread. Ears may do anything with it, destroy it too; none is called before
// a call of it returned.
class FrameSocket {
 public:
  struct Ears {
    // Beats are not told.
    std::function<void(uint16_t channel, const std::string& payload)> on_frame =
        [](uint16_t, const std::string&) {};
    // Nothing is heard any more. kUnavailable: closed or broken; kDeadlineExceeded: silent;
    // else what came is no frame (FrameParser), and last words may still be sent.
    std::function<void(const absl::Status& why)> on_end = [](const absl::Status&) {};
  };

  // Takes a non-blocking socket, whose connect may be undecided yet.
  FrameSocket(EventLoop& loop, UniqueFd fd, size_t max_payload);
  ~FrameSocket();
  FrameSocket(const FrameSocket&) = delete;
  FrameSocket& operator=(const FrameSocket&) = delete;

  void Listen(Ears ears) {
    ears_ = std::make_shared<const Ears>(std::move(ears));
    has_told_ = false;
  }
  void set_max_payload(size_t bytes) { parser_.set_max_payload(bytes); }
  // From now on a beat goes out each `beat`, and hearing nothing for `loss` ends it.
  void KeepAlive(absl::Duration beat, absl::Duration loss);

  // Queued, and sent as the peer takes it.
  void Send(Frame frame);
  void SendWord(PeerWord word, std::string_view rest);
  // What is queued is still sent, then the end; what comes is dropped. Keep it a while: closed with
  // bytes unread, it would take the last words back.
  void Finish();
  size_t queued_bytes() const { return queued_bytes_; }
  // The frames of users' channels that have not left as a whole, in order. One of which a part has
  // left stays queued besides: the stream goes on with whole frames.
  std::deque<Frame> TakeUnsent();
  // HOST of the other end, as far as it is known.
  const std::string& remote_host() const { return remote_host_; }

 private:
  void OnReady();
  void Read();
  // False: it is over, deaf, or gone.
  bool Parse(std::string_view bytes);
  void Write();
  void WatchWritesIfNeeded();
  void OnTimer();
  void ArmTimer();
  void End(const absl::Status& why);
  void TellEnd(const absl::Status& why);

  EventLoop& loop_;
  UniqueFd fd_;
  std::string remote_host_ = "?";
  std::shared_ptr<const Ears> ears_ = std::make_shared<const Ears>();
  const std::shared_ptr<bool> is_gone_ = std::make_shared<bool>(false);
  FrameParser parser_;
  std::deque<Frame> queue_;
  size_t queued_bytes_ = 0;
  size_t sent_of_first_ = 0;
  bool watches_writes_ = false;
  bool is_decided_ = false;  // the connect
  bool is_finishing_ = false;
  bool is_deaf_ = false;
  bool is_over_ = false;
  bool has_told_ = false;
  absl::Duration beat_ = absl::InfiniteDuration();
  absl::Duration loss_ = absl::InfiniteDuration();
  absl::Duration heard_at_;
  absl::Duration beat_at_ = absl::InfiniteDuration();
  EventLoop::TimerId timer_ = 0;
};

}  // namespace outlast
