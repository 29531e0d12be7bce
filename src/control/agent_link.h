// An agent's stream to its coordinator, over a transport: resolves the name, tries each address,
// and does the handshake (control.proto draws it).
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "control/token.h"
#include "control/transport.h"
#include "run/coordinator_link.h"

namespace outlast {

struct AgentLinkOptions {
  std::string coordinator;  // HOST:PORT
  // Asked instead where it is, before each attempt, on a thread of its own: it may move.
  // kUnavailable: nobody could be asked, kFailedPrecondition: and no retry mends that; then it is
  // sought where it was last.
  std::function<absl::StatusOr<std::string>()> find;
  std::string job, node;
  JobToken token;
  control::Certificates certificates;
  control::Liveness liveness;
};

// `loop` and `transport` (control/load_transport.h) must outlive it. kInvalidArgument:
// `coordinator` is no HOST:PORT.
//
// on_up comes when the coordinator has answered the challenge. One that did not prove the token,
// that has none while this agent has, or that speaks another protocol: the answer to Hello is then
// a Refused (kNever) that names it, and nothing that it says is passed on. The same where `find`
// was never answered and may not ask (kFailedPrecondition). on_down names each
// address that was tried and what came of it. Destruction waits until what was sent is off the
// wire, at most two seconds (and for a name server, or `find`, that is being asked).
absl::StatusOr<std::unique_ptr<CoordinatorLink>> MakeAgentLink(EventLoop& loop,
                                                               control::Transport& transport,
                                                               AgentLinkOptions options);

}  // namespace outlast
