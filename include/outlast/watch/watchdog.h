// Finds hangs and names the rank that causes them, without the suspect's help: the agent reads the
// black boxes.
//
// Contract with the trainer: long work either reports progress (SectionScope::Progress) or declares
// a limit; a declared limit is firm. Everything else is judged by limits that learn themselves, per
// section. A rank with nothing pending (no collective entered, no section open) is idle, and never
// suspected.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace outlast {

class Run;

enum class WatchMode {
  kObserve,  // verdicts are written down and printed
  kAct,      // and the generation is aborted, its culprit replaced where need be
};

// What a section may take before enough was learned. absl::InfiniteDuration() switches one off.
struct FirstLimits {
  absl::Duration init = absl::Seconds(600);     // plus 10 ms a rank
  absl::Duration rebuild = absl::Seconds(180);  // plus 10 ms a rank
  absl::Duration compile = absl::Seconds(480);
  absl::Duration step = absl::Seconds(180);  // each phase of a step, and sections of the user's own
  absl::Duration checkpoint = absl::Seconds(420);  // snapshot, write and restore
  absl::Duration outside = absl::Seconds(300);     // in no section, while a collective waits
};

// Unset means the default; zero and negative are refused; absl::InfiniteDuration() switches a limit
// off.
struct WatchdogOptions {
  WatchMode mode = WatchMode::kAct;
  absl::Duration poll = absl::Seconds(1);
  // Learned limits stay between these two.
  absl::Duration floor = absl::Seconds(10);
  absl::Duration ceiling = absl::Minutes(8);
  FirstLimits first_limits;
  // In the first steps of a generation only first limits and declared ones act.
  int warm_up_steps = 5;
  // Two looks at a rank that did not move in between confirm a suspicion.
  absl::Duration looks_apart = absl::Seconds(2);
};

// kInvalidArgument: names the first rule that is broken. Rules: poll, floor, looks_apart finite and
// above zero; every limit above zero; floor <= ceiling; floor <= each first limit; each first limit
// <= ceiling, but for init and rebuild and those that are switched off; warm_up_steps >= 0.
absl::Status Validate(const WatchdogOptions& options);

class Watchdog {
 public:
  // Asks the agent to watch this job; every rank calls it, and the first one's options hold.
  // Without an agent a thread of this process judges the section limits of its own rank, prints
  // verdicts and stacks, and one line says what is lost. kInvalidArgument as Validate; and from an
  // agent, where limits do not nest: rebuild must be longer than a new process may take (160 s, of
  // several nodes 170 s), and what --collective-timeout tells longer than the ceiling and 10 s.
  // kDeadlineExceeded, kUnavailable: the agent did not answer. `run` must outlive the watchdog.
  static absl::StatusOr<std::unique_ptr<Watchdog>> Start(Run& run,
                                                         const WatchdogOptions& options = {});
  ~Watchdog();

  // Ends the thread of a run without an agent; an agent goes on watching for the others. May be
  // called twice.
  void Stop();

 private:
  class Local;
  explicit Watchdog(std::unique_ptr<Local> local);

  std::unique_ptr<Local> local_;
};

}  // namespace outlast
