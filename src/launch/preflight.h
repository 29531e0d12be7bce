// Is this node fit to train? Looked at before it joins a job.
//
// Every check is a program, ours too (`outlast preflight --only NAME`), run with a deadline: what
// hangs is killed, and the launcher goes on. The contract is that of node-problem-detector's custom
// plugins: exit code 0: fit, 1: unfit, anything else: nobody knows; the last line of output says
// why. Only a clear "unfit" excludes a node: who fails to look at a node says nothing about it
// (fail open), which is warned of.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace outlast {

struct ProgramEnd;

inline constexpr int kProbeFit = 0, kProbeUnfit = 1, kProbeUnknown = 2;

enum class Fitness : uint8_t { kFit, kUnfit, kUnknown };
std::string_view NameOf(Fitness fitness);

struct ProbeFinding {
  std::string probe;  // a check's name, or a program's command line
  Fitness fitness = Fitness::kUnknown;
  std::string detail;  // one line: measured and wanted, or what went wrong
  absl::Duration took;
};

// One of our own checks. Floors are low: they find what is broken, not what is slow.
struct Check {
  std::string_view name;
  std::string_view what;  // for people
  double floor = 0;
  std::string_view unit;
  double megabytes = 0;  // that it moves, where the floor is a rate; 0: it is not
};
const std::vector<Check>& Checks();
// kInvalidArgument: no such check, naming those that are.
absl::StatusOr<Check> FindCheck(std::string_view name);

struct PreflightOptions {
  std::string tool;                          // the path of `outlast`
  std::string folder;                        // where the disk check writes
  std::vector<Check> checks = Checks();      // in this order
  std::vector<std::string> programs;         // commands for /bin/sh -c
  absl::Duration limit = absl::Seconds(10);  // of each
  // Our own checks that would begin later are left out, and say nothing.
  absl::Duration begin_within = absl::InfiniteDuration();
  std::function<bool()> stopped = [] { return false; };  // asked before each: nobody waits any more
};

// One after the other, so that none disturbs another. Blocks; at most `limit` each. Of a program's
// helpers in groups of their own nobody asks here: the tool ends them.
std::vector<ProbeFinding> RunPreflight(const PreflightOptions& options);

// Of an agent, before it joins a job of several nodes: `outlast preflight` run by itself, which
// ends whatever its probes leave behind. Our checks begin within 5 s, each has 10 s, and so has
// each probe. `folder`: for the disk check, and for what was found (preflight.json).
struct NodeLook {
  std::string unfit;                  // why the node must not join; empty: it may
  std::vector<std::string> warnings;  // what says nothing about it, and passes
  bool stopped = false;               // it was told to end before it knew
};
// While `stop_fd` can be read, `stops` is asked; once it says yes the look ends, and all that it
// started.
NodeLook LookAtNode(
    const std::string& folder, const std::vector<std::string>& probes, int stop_fd = -1,
    std::function<bool()> stops = [] { return true; });
// Pure: what `json`, the tool's findings, and its end mean.
NodeLook JudgeNode(std::string_view json, const ProgramEnd& end);
// The path of this program.
std::string OwnProgram();

// What unfit findings say, in one line; empty: the node may join.
std::string WhyUnfit(const std::vector<ProbeFinding>& findings);

// `check` here and now, in this process: its exit code, and the line that it says. Blocks as long
// as the disk does.
struct CheckEnd {
  int code = kProbeUnknown;
  std::string line;
};
CheckEnd RunCheck(const Check& check, const std::string& folder);

// Pure: what a program's end means.
ProbeFinding JudgeProbe(std::string probe, const ProgramEnd& end, absl::Duration limit);
// The same for our own check: of one that was killed at the limit the rate is known to lie below
// what it would have needed.
ProbeFinding JudgeCheck(const Check& check, const ProgramEnd& end, absl::Duration limit);

}  // namespace outlast
