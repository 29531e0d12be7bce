// How the guardian's children come to run a program: workers, and the template.
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "launch/binding.h"
#include "outlast/base/fd.h"

namespace outlast {

// An order to spawn, as it came.
struct Birth {
  int slot = 0;
  uint64_t incarnation = 0;
  bool may_be_forked = false;  // from the template
  std::vector<std::string> environment;
  std::vector<std::string> variables;  // of the descriptors after the first three
  std::vector<UniqueFd> fds;
  Binding binding;
  uint16_t master_port = 0;
  bool is_master = false;
};

// All that a child needs, ready before it is made: each page that it touches is copied for it.
struct PreparedBirth {
  std::vector<std::string> strings;  // of the environment
  std::vector<char*> environment, arguments;
  std::vector<UniqueFd> handed_down;  // not close-on-exec; here only until the child has its own
};
// `tag`: OUTLAST_SLOT_TAG's value. `arguments` is borrowed for as long as the result lives.
absl::Status Prepare(const Birth& birth, std::string_view tag,
                     const std::vector<std::string>& arguments, PreparedBirth& prepared);

// What a child that could not run the program tells through a pipe that a successful exec closes.
struct ExecFailure {
  int error_number;
  char step[28];
};

// What stands in the pipe when the program could not be run, for people.
std::string TextOf(const ExecFailure& failure);

// In the child of `parent`, which has one thread.
struct Inherited {
  const sigset_t& mask;
  const rlimit& descriptors;  // the limit on them; rlim_max 0: the parent's
};
[[noreturn]] void BecomeProgram(const std::string& program, const Birth& birth,
                                const PreparedBirth& prepared, pid_t parent,
                                const Inherited& inherited, int failure_pipe);

// Binds `pid`, 0: the caller, to the CPUs; none: as it is. A cpuset may have shrunk since the
// topology was read: then the caller's own errors say so, and it runs where it may.
void BindToCpus(pid_t pid, const Binding& binding);

}  // namespace outlast
