// `outlast coordinator`: the coordinator of a job as a process of its own.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace outlast {

// Serves until a while after the job's end, and returns the job's exit code. 85: the arguments, the
// address, the token or the journal are refused; 84: another coordinator has the job. Prints one
// line when it listens, "coordinator of job ID at HOST:PORT", and faults and refusals on `err`.
// SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 ask for the job's stop. With --etcd: see
// control/etcd_coordinator.h.
int RunCoordinatorTool(const std::vector<std::string>& arguments, std::ostream& out,
                       std::ostream& err);

}  // namespace outlast
