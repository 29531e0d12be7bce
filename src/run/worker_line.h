// The keeper's end of one worker's socket. Sending never waits: what does not fit the peer's queue
// (it is stopped, perhaps) is kept and tried again. A peer that lets megabytes lie is cut off; the
// watchdog or its process' end does the rest.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/channel.h"
#include "base/event_loop.h"
#include "run/wire.h"

namespace outlast {

// Belongs to its loop's thread. One line may serve one worker after another.
class WorkerLine {
 public:
  explicit WorkerLine(EventLoop& loop) : loop_(loop) {}
  ~WorkerLine() { Close(); }
  WorkerLine(const WorkerLine&) = delete;
  WorkerLine& operator=(const WorkerLine&) = delete;

  // The worker's end of a new socket; `on_readable` is called while something waits to be received.
  absl::StatusOr<UniqueFd> Open(std::function<void()> on_readable);
  // Goes on with this end of a line that another process had opened.
  absl::Status Resume(UniqueFd end, std::function<void()> on_readable);
  int fd() const { return channel_.fd(); }
  bool is_open() const { return channel_.fd() >= 0; }
  // What was not sent is dropped.
  void Close();

  // The descriptors are borrowed. kInvalidArgument: over a channel's limits, and dropped.
  // kUnavailable: the peer was cut off just now. To a peer that is gone all is dropped without a
  // word.
  absl::Status Send(const Message& message, std::span<const int> fds);
  // kResourceExhausted: nothing is there. kInvalidArgument: a packet that is no message, of many
  // perhaps. nullopt: the peer is gone, and the line closed.
  absl::StatusOr<std::optional<Message>> Receive();

 private:
  struct Outgoing {
    std::string bytes;
    std::vector<UniqueFd> fds;
  };
  void SendLater();
  void Flush();

  EventLoop& loop_;
  Channel channel_;
  std::deque<Outgoing> outbox_;
  size_t outbox_bytes_ = 0;
  std::optional<EventLoop::TimerId> timer_;
};

}  // namespace outlast
