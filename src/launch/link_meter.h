// This node's end of measurements of links: a listener that takes the calls which the coordinator
// announced, and a caller. Each measurement is bounded: 0.3 s of bytes each way, 64 MiB at most, 2
// s where the link is too slow to carry what was sent in that time.
//
//   caller  TICKET, bytes, end ->      called
//           <- what came, and in what time; bytes, end
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "outlast/base/id.h"

namespace outlast {

struct LinkRate {
  double there = 0, back = 0;  // MB/s, as the receiver counted them
};

// Calls of one thread. It has two of its own; destruction ends them within 0.1 s.
class LinkMeter {
 public:
  // Listens on a free port of `host`, a number of this machine.
  static absl::StatusOr<std::unique_ptr<LinkMeter>> Start(EventLoop& loop, const std::string& host);
  ~LinkMeter();

  // HOST:PORT.
  const std::string& address() const;
  // Somebody will call with this ticket, once. The newest few are remembered.
  void Expect(const Id128& ticket);
  // Calls `address`; `done` is called on the loop, unless this is gone. kUnavailable,
  // kDeadlineExceeded: nobody took the call; kPermissionDenied: the ticket was not known there.
  void Measure(const std::string& address, const Id128& ticket,
               std::function<void(const absl::StatusOr<LinkRate>&)> done);

 private:
  class Impl;
  explicit LinkMeter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace outlast
