// The command line of `outlast run`.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/socket.h"
#include "checkpoint/start_point.h"
#include "launch/binding.h"
#include "launch/deadlines.h"
#include "launch/node_options.h"
#include "outlast/elastic/job.h"
#include "run/place.h"

namespace outlast {

class Plugins;

// Exit code of what was refused before a worker ran.
inline constexpr int kExitRefused = 85;

// How the command is run.
enum class Interpreter {
  kByName,  // a .py file by python3, else as it is
  kNone,    // as it is (torchrun's --no-python)
  kModule,  // as a Python module (torchrun's -m)
};

// What to execute: an absolute or relative path, and the arguments.
struct ResolvedCommand {
  std::string program;
  std::vector<std::string> arguments;
};

// What happens to the workers when their agent is killed.
enum class OnAgentDeath : uint8_t {
  kKill,   // they end within a second
  kAdopt,  // they wait for the next agent of the same command line
};

struct LaunchOptions {
  JobOptions job;                     // world: of this node
  std::optional<NodesOptions> nodes;  // none: one
  OuterDeadlines outer;
  std::string run_dir = "./outlast-runs";  // RUN_DIR is made in it
  std::string job_id;                      // empty: the checkpoint root's
  bool fresh = false;
  StartPoint start;  // --restore-from
  bool take_over = false;
  bool stdin_to_rank_0 = false;
  std::vector<std::string> command;  // as given
  Interpreter interpreter = Interpreter::kByName;
  std::vector<std::string> template_command;  // as given; empty: none
  ResolvedCommand template_program;           // what it is; not from the command line
  BindTo bind = BindTo::kNone;
  bool preflight = false;           // the node is looked at before it joins
  std::vector<std::string> probes;  // commands that look at it as well
  OnAgentDeath on_agent_death = OnAgentDeath::kKill;
  absl::Duration adopt_within = absl::Seconds(60);  // from the agent's death
  std::vector<std::string> flags;                   // as given, but --fresh and --take-over
  std::optional<HostPort> metrics;  // where /metrics and /status are served; none: not on TCP
  // Of remote roots; not from the command line. Null: folders alone.
  std::shared_ptr<const Plugins> plugins;
};

// What `outlast run ARGUMENTS...` asks for; `help` is filled instead when it asks for help.
// kInvalidArgument: one line that names the argument, what was found and what is wanted.
absl::StatusOr<LaunchOptions> ParseLaunchOptions(const std::vector<std::string>& arguments,
                                                 std::string* help);

// Finds the command as a shell would, on `path` (PATH). kNotFound, kPermissionDenied: no such file,
// not executable; named.
absl::StatusOr<ResolvedCommand> ResolveCommand(const std::vector<std::string>& command,
                                               const std::string& path,
                                               Interpreter interpreter = Interpreter::kByName);

// The words of `text` as a shell would take them, with its quotes and backslashes and nothing else.
// kInvalidArgument: a quote that does not end.
absl::StatusOr<std::vector<std::string>> SplitWords(std::string_view text);

// kInvalidArgument: this process was itself started as one of several ranks by another launcher, so
// that each would start a world of its own; or what launchers left in its environment is
// contradictory.
absl::Status CheckPlace(int world, const Variables& variables);
// In a pod of a Kubernetes Job, whose number is the node's place in the order of ranks unless
// --node-rank gave one. kInvalidArgument: that, or a variable, contradicts it.
absl::Status TakePod(NodesOptions& nodes, const Variables& variables);
// CheckPlace with the process's own, or TakePod where the job has several nodes, whose agents
// another launcher may well start. kNotFound: the working directory is gone.
absl::Status CheckSurroundings(LaunchOptions& options);

// The help of the tool as a whole.
std::string ToolHelp();

}  // namespace outlast
