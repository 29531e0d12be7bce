// Whether other agents can be reached: their doors are knocked at, once a beat each.
//
// A knock is a connect that the other machine's kernel answers, and that is hung up at once: it
// says what the network lets through and nothing of how busy the agent there is, and any agent that
// listens has a door, whatever its version. One that is not answered within the patience failed, as
// did one that was refused.
#pragma once

#include <functional>
#include <list>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/socket.h"
#include "outlast/base/fd.h"
#include "run/peers.h"

namespace outlast {

// Belongs to its loop's thread.
class LinkProbes {
 public:
  struct Options {
    absl::Duration beat = absl::Seconds(1);
    absl::Duration patience = absl::Seconds(3);
  };
  // At the first knock, and whenever the next one goes otherwise. None is called from within Watch.
  struct Ears {
    std::function<void(const std::string& node)> on_reached;
    std::function<void(const std::string& node, const std::string& why)> on_unreached;
  };
  LinkProbes(EventLoop& loop, Options options, Ears ears);
  ~LinkProbes();

  // These from now on, and no others. Addresses are numbers; one that is none is not watched.
  void Watch(const std::vector<PeerGroup::Link>& links);

 private:
  struct Link {
    std::string node;
    SocketAddress at;
    UniqueFd fd;                   // not open: no knock is under way
    EventLoop::TimerId timer = 0;  // the knock's end, or the next one
    enum { kUnknown, kReached, kUnreached } state = kUnknown;
  };
  void Knock(Link& link);
  // It was answered, or refused.
  void Answered(Link& link);
  void NotAnswered(Link& link);
  void Done(Link& link, const absl::Status& how);
  void HangUp(Link& link);
  void Stop();

  EventLoop& loop_;
  const Options options_;
  const Ears ears_;
  std::list<Link> links_;
};

}  // namespace outlast
