// A worker's side of the socket: requests with answers, and the messages that the keeper pushes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "run/wire.h"

namespace outlast {

// The keeper answers at once, or at the deadline that the request names. More than that means that
// it is stuck.
inline constexpr absl::Duration kKeeperSlack = absl::Seconds(30);

// Safe for concurrent use. Calls block their own thread only.
class Link {
 public:
  virtual ~Link() = default;

  // Sends a request and waits for its answer: its payload and descriptors, or its error.
  // kDeadlineExceeded: none within `timeout`. kAborted: the generation ended meanwhile (requests
  // that carry one). kUnavailable: the keeper is gone.
  virtual absl::StatusOr<Message> Call(MessageKind kind, uint64_t generation,
                                       std::string_view payload, absl::Duration timeout) = 0;
  // Sends an event that has no answer.
  virtual absl::Status Notify(MessageKind kind, uint64_t generation, std::string_view payload) = 0;
  // Calls `handler` on the reader's thread for each pushed message of `kind`. It must not block.
  virtual void OnMessage(MessageKind kind, std::function<void(const Message&)> handler) = 0;
};

}  // namespace outlast
