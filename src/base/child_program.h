// Runs another program to its end, or to a deadline.
#pragma once

#include <csignal>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace outlast {

struct ProgramCall {
  std::vector<std::string> command;  // a path, or a name in PATH, and arguments
  std::string folder;                // where it runs; empty: where we do
  std::vector<std::pair<std::string, std::string>> environment;  // besides our own
  absl::Duration deadline = absl::InfiniteDuration();
  // What the program gets when the calling thread dies, so that it is not left alone: SIGTERM for
  // one that then ends what it has started.
  int death_signal = SIGKILL;
  size_t keep_output = 8 << 10;  // bytes: at least so much of its end is kept
  // While this descriptor can be read, `stops` is asked, on the calling thread; once it says yes
  // the program gets SIGTERM, and `stop_grace` to end by itself. Borrowed; -1: none.
  int stop_fd = -1;
  std::function<bool()> stops = [] { return true; };
  absl::Duration stop_grace = absl::Seconds(5);
};

struct ProgramEnd {
  int code = 0;            // exit code; 127: it could not be started
  int signal = 0;          // that ended it; 0: none
  bool timed_out = false;  // it was killed at the deadline
  bool stopped = false;    // it was told to end before its time
  std::string last_line;   // of its output and errors that is not blank; UTF-8, at most 1 KiB
  std::string output;      // the end of its output and errors, as it was written
};

// The program has no input, and a process group of its own, all of which is killed when it ends, at
// the deadline, or when the calling thread dies. Helpers that left the group are not waited for.
// Safe in a process with threads, whatever its size. Blocks. Errors: no pipe or process could be
// had.
absl::StatusOr<ProgramEnd> RunProgram(const ProgramCall& call);

}  // namespace outlast
