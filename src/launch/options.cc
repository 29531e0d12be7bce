#include "launch/options.h"

#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "base/error.h"
#include "base/flag_rules.h"
#include "base/flag_values.h"
#include "launch/machine.h"
#include "run/pod.h"

namespace outlast {
namespace {

constexpr int kMaxWorld = 4096;

constexpr char kFooter[] =
    "Example:\n"
    "  outlast run -n 4 --max-restarts 2 -- ./trainer --steps 1000\n"
    "  outlast run --nnodes 2 --coordinator node1:29400 --job j7 -n 4 -- ./trainer   (on each "
    "node)\n"
    "\n"
    "Exit codes: 0 finished; 80 pre-empted and saved, 81 pre-empted, last save not durable: run it "
    "again;\n"
    "82 a human is needed, 83 restarts used up: do not run it again; 84 control lost, or too few "
    "nodes; 85 "
    "refused before a worker ran;\n"
    "86 this node left on request, 87 it was excluded: the job goes on;\n"
    "88 trained, but the last state is not saved; 130 interrupted; with no restart allowed the "
    "first failed worker's own.";

// The raw texts; numbers are checked by us, so that every refusal reads alike.
struct RawOptions {
  std::string world, max_restarts, grace, stop_within, early_exit_grace, preempt_exit, no_retry,
      retry;
  std::string standard_input;
  std::string bind;
  std::string metrics;
  std::string template_command;
  std::string preflight;
  std::string on_agent_death, adopt_within;
  std::string restore_from;
  std::string kill_after, collective_timeout;
  NodeFlags nodes;
  BatchFlags batch;
  bool no_python = false, module = false;  // torchrun's
};

// torchrun's own flags, so that its command lines run unchanged; some are among the nodes'.
void DeclareTorchrun(CLI::App& app, RawOptions& raw) {
  app.add_flag("-m,--module", raw.module, "CMD is a Python module, run by python3 -m");
  app.add_flag("--no-python,--no_python", raw.no_python, "Run CMD as it is, also a .py file");
}

void Declare(CLI::App& app, LaunchOptions& options, RawOptions& raw) {
  app.set_help_flag("-h,--help", "This text");
  app.footer(kFooter);
  app.add_option("-n,--nproc-per-node,--nproc_per_node", raw.world,
                 "Workers on this machine: a number, cpu, gpu, or auto (one a GPU, else one a CPU)")
      ->required()
      ->type_name("N");
  app.add_option("--max-restarts,--max_restarts", raw.max_restarts,
                 "Restarts since the last committed step, and 20 an hour at most; 0: never (3)")
      ->type_name("R");
  app.add_option("--run-dir,--log-dir,--log_dir", options.run_dir,
                 "Where this run's folder is made (./outlast-runs)")
      ->type_name("D");
  app.add_option("--grace", raw.grace, "SIGTERM to SIGKILL in a stop (15)")->type_name("S");
  app.add_option("--stop-within", raw.stop_within, "A stop in all (25)")->type_name("S");
  app.add_option("--kill-after", raw.kill_after,
                 "What the platform gives from SIGTERM to SIGKILL, such as a pod's "
                 "terminationGracePeriodSeconds: --grace and --stop-within must fit in (unknown)")
      ->type_name("S");
  app.add_option("--collective-timeout", raw.collective_timeout,
                 "The trainer's own time-out of collectives, which must be longer than it takes "
                 "to find a hang or a lost node (unknown)")
      ->type_name("S");
  app.add_option("--early-exit-grace", raw.early_exit_grace,
                 "How long others may run on after a joined rank ended (60)")
      ->type_name("S");
  app.add_option("--job", options.job_id, "The job's id (the checkpoint root's)")->type_name("ID");
  app.add_flag("--fresh", options.fresh,
               "Start over a root that holds checkpoints, without restoring");
  app.add_option(
         "--restore-from", raw.restore_from,
         "Where to begin: the newest checkpoint; one of that step, from which a new history "
         "goes on; or another root, which is only read (latest)")
      ->type_name("latest|STEP|FOLDER");
  app.add_flag("--take-over", options.take_over, "Take a root whose owner still beats");
  app.add_option("--preempt-exit", raw.preempt_exit, "Exit code of \"pre-empted, saved\" (80)")
      ->type_name("CODE");
  app.add_option("--no-retry", raw.no_retry, "Worker exit codes that end the job (82,93)")
      ->type_name("CODES");
  app.add_option("--retry", raw.retry, "The only worker exit codes that are tried again (all)")
      ->type_name("CODES");
  app.add_option("--stdin", raw.standard_input,
                 "Which rank reads our standard input (none; rank 0 when -n 1)")
      ->type_name("none|0");
  app.add_option("--bind", raw.bind,
                 "CPUs and memory of each worker: numa (one NUMA node's), core (whole cores of its "
                 "own), none (none)")
      ->type_name("none|numa|core");
  app.add_option("--metrics", raw.metrics,
                 "Serve /metrics (Prometheus) and /status over HTTP; port 0: any (nowhere)")
      ->type_name("HOST:PORT");
  app.add_option("--template", raw.template_command,
                 "A program that does the slow start once and forks ranks that died (none); for "
                 "Python 'python3 -m outlast_template MODULES'")
      ->type_name("CMD");
  app.add_option("--on-agent-death", raw.on_agent_death,
                 "When this agent is killed: end its workers, or keep them for the same command, "
                 "started again, to adopt (kill)")
      ->type_name("kill|adopt");
  app.add_option("--adopt-within", raw.adopt_within,
                 "How long kept workers wait for it before they are ended (60)")
      ->type_name("S");
  raw.nodes.Declare(app);
  raw.batch.Declare(app);
  app.add_option("--preflight", raw.preflight,
                 "Look first whether this node is fit, as outlast preflight does (on of several "
                 "nodes, off of one)")
      ->type_name("on|off");
  app.add_option("--probe", options.probes,
                 "A command that preflight runs as well; may be repeated")
      ->type_name("CMD")
      ->allow_extra_args(false);
  DeclareTorchrun(app, raw);
}

// Where the command begins: behind "--", or at the first argument that is neither a flag nor a
// flag's value.
size_t CommandStart(const std::vector<std::string>& arguments, CLI::App& app, size_t& flags_end) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    flags_end = i;
    if (argument == "--") return i + 1;
    if (argument.size() < 2 || argument[0] != '-') return i;
    const CLI::Option* option = app.get_option_no_throw(argument);
    const bool takes_value = option != nullptr && option->get_expected_min() > 0;
    if (takes_value) ++i;
  }
  flags_end = arguments.size();
  return arguments.size();
}

// "cpu", "gpu", "auto" or a number, as torchrun takes them.
absl::Status ReadWorkers(const std::string& text, int& workers) {
  const bool wants_gpu = text == "gpu";
  const int gpus = wants_gpu || text == "auto" ? CountGpus() : 0;
  if (wants_gpu && gpus == 0) return RefuseValue("-n", text, "a machine with GPUs, or a number");
  if (wants_gpu || gpus > 0) {
    workers = gpus;
    return absl::OkStatus();
  }
  if (text == "cpu" || text == "auto") {
    workers = CountCpus();
    return absl::OkStatus();
  }
  return ReadInteger("-n", text, 1, kMaxWorld, workers);
}

absl::Status ReadBinding(const std::string& text, BindTo& bind) {
  if (text == "numa") {
    bind = BindTo::kNuma;
  } else if (text == "core") {
    bind = BindTo::kCore;
  } else if (!text.empty() && text != "none") {
    return RefuseValue("--bind", text, "none, numa or core");
  }
  return absl::OkStatus();
}

// After ReadNodes.
absl::Status ReadPreflight(const std::string& text, LaunchOptions& options) {
  if (!text.empty() && text != "on" && text != "off")
    return RefuseValue("--preflight", text, "on or off");
  if (text == "off" && !options.probes.empty())
    return Error(absl::StatusCode::kInvalidArgument,
                 "--probe '{}' and --preflight off: at most one wanted", options.probes.front());
  options.preflight =
      text.empty() ? options.nodes.has_value() || !options.probes.empty() : text == "on";
  return absl::OkStatus();
}

// After ReadNodes.
absl::Status ReadAgentDeath(const RawOptions& raw, LaunchOptions& options) {
  const std::string& text = raw.on_agent_death;
  if (!text.empty() && text != "kill" && text != "adopt")
    return RefuseValue("--on-agent-death", text, "kill or adopt");
  if (text == "adopt") options.on_agent_death = OnAgentDeath::kAdopt;
  if (text == "adopt" && options.nodes)
    return Error(absl::StatusCode::kInvalidArgument,
                 "--on-agent-death adopt with --nnodes: a job of one node wanted; of several, the "
                 "other nodes go on without this one");
  if (text != "adopt" && !raw.adopt_within.empty())
    return Error(absl::StatusCode::kInvalidArgument,
                 "--adopt-within {}: --on-agent-death adopt wanted with it", raw.adopt_within);
  return ReadSeconds("--adopt-within", raw.adopt_within, options.adopt_within);
}

absl::Status ReadInterpreter(const RawOptions& raw, LaunchOptions& options) {
  if (raw.module && raw.no_python)
    return Error(absl::StatusCode::kInvalidArgument, "-m and --no-python: at most one wanted");
  if (raw.module) options.interpreter = Interpreter::kModule;
  if (raw.no_python) options.interpreter = Interpreter::kNone;
  return absl::OkStatus();
}

// After the job's own. A stop in all has the platform's time, where that is known.
absl::Status ReadOuterDeadlines(const RawOptions& raw, LaunchOptions& options) {
  OuterDeadlines& outer = options.outer;
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--kill-after", raw.kill_after, outer.kill_after));
  OUTLAST_RETURN_IF_ERROR(
      ReadSeconds("--collective-timeout", raw.collective_timeout, outer.collective_timeout));
  if (!raw.kill_after.empty() && raw.stop_within.empty())
    options.job.stop_within = std::max(options.job.grace, outer.kill_after - kKillMargin);
  return CheckOuterDeadlines({.budget = options.job}, outer);
}

absl::Status ReadStart(const std::string& text, LaunchOptions& options) {
  if (text.empty()) return absl::OkStatus();
  if (options.fresh) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--restore-from '{}' and --fresh: at most one wanted", OneLine(text));
  }
  OUTLAST_ASSIGN_OR_RETURN(options.start, ParseStartPoint(text));
  return absl::OkStatus();
}

absl::Status Interpret(const RawOptions& raw, LaunchOptions& options) {
  JobOptions& job = options.job;
  OUTLAST_RETURN_IF_ERROR(ReadWorkers(raw.world, job.world));
  OUTLAST_RETURN_IF_ERROR(ReadInterpreter(raw, options));
  OUTLAST_RETURN_IF_ERROR(ReadBinding(raw.bind, options.bind));
  if (!raw.metrics.empty()) {
    const auto at = HostPort::Parse(raw.metrics);
    if (!at.ok()) return RefuseValue("--metrics", raw.metrics, "HOST:PORT such as 127.0.0.1:9400");
    options.metrics = *at;
  }
  auto template_command = SplitWords(raw.template_command);
  if (!template_command.ok()) return Annotate(template_command.status(), "--template");
  options.template_command = *std::move(template_command);
  if (options.template_command.empty() && !raw.template_command.empty())
    return RefuseValue("--template", raw.template_command, "a command");
  OUTLAST_RETURN_IF_ERROR(
      ReadInteger("--max-restarts", raw.max_restarts, 0, INT_MAX, job.max_restarts));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--grace", raw.grace, job.grace));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--stop-within", raw.stop_within, job.stop_within));
  OUTLAST_RETURN_IF_ERROR(
      ReadSeconds("--early-exit-grace", raw.early_exit_grace, job.early_exit_grace));
  OUTLAST_RETURN_IF_ERROR(
      ReadInteger("--preempt-exit", raw.preempt_exit, 0, 255, job.preempt_exit));
  OUTLAST_RETURN_IF_ERROR(ReadCodes("--no-retry", raw.no_retry, job.no_retry_codes));
  OUTLAST_RETURN_IF_ERROR(ReadCodes("--retry", raw.retry, job.retry_codes));
  OUTLAST_RETURN_IF_ERROR(CheckJobId(options.job_id));
  OUTLAST_ASSIGN_OR_RETURN(options.nodes, ReadNodes(raw.nodes, options.job_id));
  OUTLAST_RETURN_IF_ERROR(raw.batch.Read(job));
  const NodeCount count = options.nodes ? options.nodes->count : NodeCount{};
  OUTLAST_RETURN_IF_ERROR(CheckLargestWorld(MembershipOf(job, job.world, count)));
  OUTLAST_RETURN_IF_ERROR(ReadPreflight(raw.preflight, options));
  OUTLAST_RETURN_IF_ERROR(ReadOuterDeadlines(raw, options));
  OUTLAST_RETURN_IF_ERROR(ReadAgentDeath(raw, options));
  OUTLAST_RETURN_IF_ERROR(ReadStart(raw.restore_from, options));
  if (options.run_dir.empty()) return RefuseValue("--run-dir", "", "a folder");
  const std::string& input = raw.standard_input;
  if (!input.empty() && input != "none" && input != "0")
    return RefuseValue("--stdin", input, "none or 0");
  const bool is_alone = job.world == 1 && !options.nodes;
  options.stdin_to_rank_0 = input == "0" || (input.empty() && is_alone);
  return absl::OkStatus();
}

absl::Status UnknownFlag(const CLI::App& app) {
  const std::vector<std::string> extras = app.remaining();
  return Error(absl::StatusCode::kInvalidArgument, "unknown flag '{}': see outlast run --help",
               extras.empty() ? "" : extras[0]);
}

bool is_file(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

absl::StatusOr<std::string> FindProgram(const std::string& name, const std::string& path) {
  if (name.find('/') != std::string::npos) {
    if (access(name.c_str(), F_OK) != 0)
      return Error(absl::StatusCode::kNotFound, "command '{}': no such file", name);
    if (!is_file(name))
      return Error(absl::StatusCode::kPermissionDenied,
                   "command '{}': not a file, an executable wanted", name);
    if (access(name.c_str(), X_OK) == 0) return name;
    return Error(absl::StatusCode::kPermissionDenied, "command '{}': the file is not executable",
                 name);
  }
  bool found_other = false;
  for (const std::string& folder : CLI::detail::split(path, ':')) {
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    if (is_file(candidate) && access(candidate.c_str(), X_OK) == 0) return candidate;
    found_other |= access(candidate.c_str(), F_OK) == 0;
  }
  if (found_other)
    return Error(absl::StatusCode::kPermissionDenied,
                 "command '{}': found in PATH, but not executable", name);
  return Error(absl::StatusCode::kNotFound, "command '{}': not found in PATH", name);
}

}  // namespace

absl::StatusOr<LaunchOptions> ParseLaunchOptions(const std::vector<std::string>& arguments,
                                                 std::string* help) {
  LaunchOptions options;
  RawOptions raw;
  CLI::App app("Runs N copies of CMD as one job and keeps it running.", "outlast run");
  Declare(app, options, raw);
  size_t flags_end = 0;
  const size_t start = CommandStart(arguments, app, flags_end);
  options.command.assign(arguments.begin() + static_cast<ptrdiff_t>(start), arguments.end());
  std::vector<std::string> flags(arguments.begin(),
                                 arguments.begin() + static_cast<ptrdiff_t>(flags_end));
  OUTLAST_RETURN_IF_ERROR(RefuseCutValues(app, flags));
  std::ranges::remove_copy_if(flags, std::back_inserter(options.flags), [](const auto& flag) {
    return flag == "--fresh" || flag == "--take-over";
  });
  std::reverse(flags.begin(), flags.end());  // as CLI11 wants it
  try {
    app.parse(flags);
  } catch (const CLI::CallForHelp&) {
    *help = app.help();
    constexpr std::string_view kGeneric = "[OPTIONS]";
    if (const size_t at = help->find(kGeneric); at != std::string::npos) {
      help->replace(at, kGeneric.size(), "-n N [FLAGS] -- CMD [ARGUMENTS]");
    }
    return options;
  } catch (const CLI::ExtrasError&) {
    return UnknownFlag(app);
  } catch (const CLI::RequiredError&) {
    // -n may stand behind the value of a flag that is unknown, where the command seems to begin.
    if (app.remaining_size() > 0) return UnknownFlag(app);
    return Error(absl::StatusCode::kInvalidArgument,
                 "-n is missing: the number of workers wanted, such as -n 4");
  } catch (const CLI::ParseError& error) {
    OUTLAST_RETURN_IF_ERROR(RefuseRepeatedFlags(app));
    return Error(absl::StatusCode::kInvalidArgument, "{}", error.what());
  }
  OUTLAST_RETURN_IF_ERROR(RefuseRepeatedFlags(app));
  OUTLAST_RETURN_IF_ERROR(RefuseEmptyValues(app));
  OUTLAST_RETURN_IF_ERROR(Interpret(raw, options));
  if (options.command.empty() || options.command[0].empty()) {
    return Error(absl::StatusCode::kInvalidArgument, "no command: -- CMD behind the flags wanted");
  }
  return options;
}

absl::StatusOr<ResolvedCommand> ResolveCommand(const std::vector<std::string>& command,
                                               const std::string& path, Interpreter interpreter) {
  ResolvedCommand resolved;
  const std::string& name = command[0];
  const bool is_script = interpreter == Interpreter::kByName && name.ends_with(".py");
  if (is_script || interpreter == Interpreter::kModule) {
    if (is_script && access(name.c_str(), R_OK) != 0)
      return ErrnoStatus(errno, fmt::format("command '{}'", name));
    OUTLAST_ASSIGN_OR_RETURN(resolved.program, FindProgram("python3", path));
    resolved.arguments = {"python3", "-u"};  // lines reach the log as they are printed
    if (!is_script) resolved.arguments.emplace_back("-m");
  } else {
    OUTLAST_ASSIGN_OR_RETURN(resolved.program, FindProgram(name, path));
  }
  resolved.arguments.insert(resolved.arguments.end(), command.begin(), command.end());
  return resolved;
}

absl::StatusOr<std::vector<std::string>> SplitWords(std::string_view text) {
  std::vector<std::string> words;
  char quote = '\0';
  bool in_word = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool is_space = c == ' ' || c == '\t' || c == '\n';
    if (is_space && quote == '\0') {
      in_word = false;
      continue;
    }
    if (!std::exchange(in_word, true)) words.emplace_back();
    if (quote == '\0' && (c == '\'' || c == '"')) {
      quote = c;
    } else if (c == quote) {
      quote = '\0';
    } else if (c == '\\' && quote != '\'' && i + 1 < text.size()) {
      words.back() += text[++i];
    } else {
      words.back() += c;
    }
  }
  if (quote != '\0')
    return Error(absl::StatusCode::kInvalidArgument, "'{}': the quote {} does not end", text,
                 quote);
  return words;
}

absl::Status CheckPlace(int world, const Variables& variables) {
  // A worker of ours may start a job of its own; its variables are replaced.
  if (variables("OUTLAST_RUN_ID") != nullptr) return absl::OkStatus();
  OUTLAST_ASSIGN_OR_RETURN(const std::vector<PlaceClaim> claims, FindPlace(variables));
  for (const PlaceClaim& claim : claims) {
    // By hand one may have said what -n says.
    const bool says_the_same = claim.launcher == Launcher::kByHand && claims.size() == 1 &&
                               claim.world == world && claim.rank == 0;
    if (claim.world == 1 || says_the_same) continue;
    return Error(
        absl::StatusCode::kInvalidArgument,
        "contradictory environment: {} ({}), while -n {} starts a world of its own in each "
        "of these {} processes: unset the variables, or start workers with one launcher "
        "only",
        claim.Text(), NameOf(claim.launcher), world, claim.world);
  }
  return absl::OkStatus();
}

absl::Status TakePod(NodesOptions& nodes, const Variables& variables) {
  OUTLAST_ASSIGN_OR_RETURN(const std::optional<PodClaim> pod, FindPod(variables));
  if (!pod) return absl::OkStatus();
  if (const char* rank = variables("PET_NODE_RANK");
      rank != nullptr && pod->node && std::to_string(*pod->node) != rank) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "contradictory environment: PET_NODE_RANK={} and {}, which is pod {}: the same "
                 "wanted, or one of the two unset",
                 rank, pod->Text(), *pod->node);
  }
  if (nodes.hint < 0) nodes.hint = pod->node.value_or(-1);
  if (!pod->node || nodes.hint == *pod->node) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "contradictory environment: --node-rank '{}' and {}, which is pod {}: the same "
               "wanted, or no --node-rank",
               nodes.hint, pod->Text(), *pod->node);
}

absl::Status CheckSurroundings(LaunchOptions& options) {
  char folder[PATH_MAX];
  if (getcwd(folder, sizeof folder) == nullptr && errno == ENOENT) {
    return Error(absl::StatusCode::kNotFound,
                 "the working directory was removed: an existing one wanted");
  }
  const auto variables = [](const char* name) { return std::getenv(name); };
  if (options.nodes) return TakePod(*options.nodes, variables);
  return CheckPlace(options.job.world, variables);
}

std::string ToolHelp() {
  return "Usage: outlast COMMAND ...\n"
         "\n"
         "  run          run N copies of a program as one job and keep it running\n"
         "  env          which launcher's variables are here, and what they mean\n"
         "  preflight    whether this node is fit to train\n"
         "  status       a run as it stands: ranks, steps, faults, saves, goodput\n"
         "  top          the same, redrawn once a second\n"
         "  report       where the time of a run went, and what it trained\n"
         "  ckpt         list, verify, compare, copy, export and import checkpoints\n"
         "  coordinator  lead a job of several nodes, as a process of its own\n"
         "  submit       send a job to Slurm\n"
         "\n"
         "Each has its own --help; outlast --version says which one this is. Example:\n"
         "  outlast run -n 4 -- ./trainer --steps 1000\n";
}

}  // namespace outlast
