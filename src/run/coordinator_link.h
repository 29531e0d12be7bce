// One agent's stream to the coordinator of a job of several nodes, as the keeper uses it. Whoever
// implements it brings the transport: gRPC between nodes, or a queue in one process.
#pragma once

#include <functional>
#include <string>

#include "outlast/elastic/messages.h"

namespace outlast {

// Belongs to its loop's thread. No call waits, and none calls back before it returned.
class CoordinatorLink {
 public:
  struct Ears {
    std::function<void()> on_up = [] {};
    // The stream broke, or could not be opened; what was under way may be lost.
    std::function<void(const std::string& why)> on_down = [](const std::string&) {};
    std::function<void(const control::CoordinatorMessage&)> on_said =
        [](const control::CoordinatorMessage&) {};
  };
  virtual ~CoordinatorLink() = default;
  virtual void Listen(Ears ears) = 0;
  // Opens a stream: on_up or on_down follows within the transport's deadline. A former stream must
  // be down.
  virtual void Open() = 0;
  // The first words on a stream that is up. The transport adds the proof of the token.
  virtual void Hello(const control::Hello& hello) = 0;
  // Dropped without a word when the stream is down.
  virtual void Send(const control::AgentMessage& message) = 0;
  // Ends the stream, or the attempt to open one: nothing is heard of it any more, on_down neither.
  virtual void Drop(const std::string& reason) = 0;
};

}  // namespace outlast
