// Stop requests by signal, for a process that has no agent.
#pragma once

#include <csignal>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/base/fd.h"

namespace outlast {

// Turns SIGTERM, SIGUSR1, SIGUSR2 and SIGINT into something to read. A handler does nothing but
// write to an eventfd. A signal that the program handles or ignores itself is left alone; one line
// on stderr says so. One a process.
class StopSignals {
 public:
  // kFailedPrecondition: there is one already.
  static absl::StatusOr<StopSignals> Install();
  StopSignals(StopSignals&& other) noexcept;
  StopSignals& operator=(StopSignals&&) = delete;
  ~StopSignals();  // back to the default dispositions

  // Readable when a signal came.
  int fd() const { return event_.get(); }
  // The signals that came since the last call, twice at most each.
  std::vector<int> Take();
  // Ends this process by `signal`'s default action.
  [[noreturn]] static void EndProcessBy(int signal);

 private:
  explicit StopSignals(UniqueFd event) : event_(std::move(event)) {}
  UniqueFd event_;
  std::vector<int> installed_;
};

}  // namespace outlast
