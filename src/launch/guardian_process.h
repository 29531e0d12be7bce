// The guardian's side: runs in the forked child.
#pragma once

#include "base/channel.h"
#include "launch/guardian.h"

namespace outlast {

// Serves the agent until it closes its end or orders the finish, ends every descendant, and
// returns.
void RunGuardian(const GuardianCommand& command, Channel agent, pid_t agent_pid, UniqueFd door);

}  // namespace outlast
