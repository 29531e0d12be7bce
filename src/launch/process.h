// Processes as the kernel tells of them in /proc, and signals that cannot reach a stranger.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/proc.h"
#include "outlast/base/fd.h"

namespace outlast {

// The children of `pid`, of all its threads, zombies too. A caller's own children are never missed
// while it does not reap; those of others may be, when one of them ends meanwhile: look again.
std::vector<pid_t> ChildrenOf(pid_t pid);

// Everything below `root`, parents before their children, but for the processes `apart` and what is
// below them.
std::vector<ProcessInfo> DescendantsOf(pid_t root, const std::set<pid_t>& apart = {});

// Sends `signal` to that very process: false when it has ended, also when its pid now belongs to
// another.
bool SendSignal(const ProcessInfo& process, int signal);

// Whether the process has a handler for `signal`.
bool CatchesSignal(pid_t pid, int signal);

// The value of variable `name` in the environment that the process was started with; empty when
// there is none.
std::string EnvironmentOf(pid_t pid, const std::string& name);

absl::StatusOr<UniqueFd> OpenPidFd(pid_t pid);

// Those by which people and batch systems speak to an agent, but for what is ignored: nohup's
// promise holds.
sigset_t AgentSignals();

// Kills and reaps everything below the calling process, a subreaper, until nothing is left.
// kDeadlineExceeded: something was still there after `limit` (uninterruptible sleep); it has
// SIGKILL pending.
absl::Status EndDescendants(absl::Duration limit);

}  // namespace outlast
