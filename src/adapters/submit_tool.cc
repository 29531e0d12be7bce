#include "adapters/submit_tool.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <climits>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <ostream>
#include <system_error>

#include "adapters/slurm.h"
#include "base/error.h"
#include "base/flag_rules.h"
#include "base/flag_values.h"
#include "control/node_flags.h"
#include "launch/options.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

constexpr int kMaxRanks = 4096;
// Less leaves no time to save; Slurm's field for it has 16 bits.
constexpr int kMinNotice = 20, kMaxNotice = 65535;

struct Arguments {
  SlurmJob job;
  std::string engine, nodes = "1", ranks, cpus, notice, max_restarts, max_requeues, last_call, port;
  bool dry = false, json = false;
};

void Declare(CLI::App& app, Arguments& raw) {
  SlurmJob& job = raw.job;
  app.set_help_flag("-h,--help", "This text");
  app.add_option("--to", raw.engine, "Whom to send it to: slurm")->required()->type_name("ENGINE");
  app.add_option("--job", job.job, "The job's id, the same in all attempts; its name in Slurm")
      ->required()
      ->type_name("ID");
  app.add_option("--nnodes", raw.nodes, "Nodes that hold ranks (1)")->type_name("N|MIN:MAX");
  app.add_option("-n,--nproc-per-node", raw.ranks, "Ranks of each node")
      ->required()
      ->type_name("N");
  app.add_option("--partition", job.partition, "Slurm's partition (its default)");
  app.add_option("--account", job.account, "Slurm's account (its default)");
  app.add_option("--time", job.time, "Time limit of an attempt, as sbatch takes it (Slurm's)");
  app.add_option("--cpus-per-node", raw.cpus, "CPUs of each node (whole nodes)")->type_name("N");
  app.add_option("--sbatch", job.sbatch_options, "One more option of sbatch; may be repeated")
      ->type_name("OPTION")
      ->allow_extra_args(false);
  app.add_option("--run", job.run_flags, "One more flag of outlast run; may be repeated")
      ->type_name("FLAG")
      ->allow_extra_args(false);
  app.add_option("--notice", raw.notice,
                 "Slurm warns so long before the time limit; the job saves and ends (120)")
      ->type_name("S");
  app.add_option("--max-restarts", raw.max_restarts,
                 "Restarts since the last committed step, in an attempt (3)")
      ->type_name("R");
  app.add_option("--max-requeues", raw.max_requeues, "Attempts besides the first (200)")
      ->type_name("N");
  app.add_option("--last-call", raw.last_call, "How long nodes besides MIN are waited for (5)")
      ->type_name("S");
  app.add_option("--port", raw.port, "The coordinator's port (any that is free)")->type_name("P");
  app.add_flag("--drain-excluded", job.drain_excluded,
               "Drain a node that is found unfit (87); for operators of Slurm");
  app.add_option("--key", job.key, "Submitted once, however often it is sent (from the request)");
  app.add_option("--tool", job.tool, "Where nodes find outlast (where it is here)")
      ->type_name("PATH");
  app.add_flag("--dry", raw.dry, "Print the batch script, send nothing");
  app.add_flag("--json", raw.json, "The answer as one JSON object");
  app.footer(
      "Example:\n"
      "  outlast submit --to slurm --job gpt --nnodes 2:4 -n 8 --time 4:00:00 "
      "--sbatch=--gres=gpu:8 "
      "-- ./train --steps 1000\n"
      "\n"
      "Exit codes: 0 submitted, or there already; 1 Slurm gave no answer: send it again; 85 "
      "refused.");
}

// What it means is the coordinator's or the script's own affair.
absl::Status RefuseRunFlags(const std::vector<std::string>& flags) {
  constexpr std::pair<const char*, const char*> kOwn[] = {
      {"--fresh", "another root of checkpoints, for each attempt would start over,"},
      {"--restore-from", "a run by hand, for each attempt would begin there again,"},
      {"--preempt-exit", "80, by which the script knows what to requeue,"},
      {"--token-file", "the token that each attempt makes"},
      {"--token-fd", "the token that each attempt makes"},
      {"--spares", "--nnodes MIN:MAX"},
      {"--advertise", "the address by which Slurm knows the node"},
      {"--last-call", "--last-call of outlast submit"},
      {"--grace", "--notice"},
      {"--stop-within", "--notice"}};
  for (const std::string& flag : flags) {
    for (const auto& [name, wanted] : kOwn) {
      if (flag.substr(0, flag.find('=')) == name) return RefuseValue("--run", flag, wanted);
    }
  }
  return absl::OkStatus();
}

// The agents' command line is read here as each of them will: what it would refuse on the nodes is
// refused before it waits in the queue.
absl::StatusOr<LaunchOptions> TryRunFlags(const SlurmJob& job) {
  OUTLAST_RETURN_IF_ERROR(RefuseRunFlags(job.run_flags));
  std::vector<std::string> words = {"-n",
                                    std::to_string(job.ranks_per_node),
                                    "--job",
                                    job.job,
                                    "--max-restarts",
                                    std::to_string(job.max_restarts)};
  if (job.nodes.max > 1) {
    words.insert(words.end(), {"--nnodes", fmt::format("{}:{}", job.nodes.min, job.nodes.max),
                               "--coordinator", "127.0.0.1:1", "--node", "node"});
  }
  words.insert(words.end(), job.run_flags.begin(), job.run_flags.end());
  words.emplace_back("--");
  words.insert(words.end(), job.command.begin(), job.command.end());
  std::string help;
  OUTLAST_ASSIGN_OR_RETURN(LaunchOptions options, ParseLaunchOptions(words, &help));
  if (!help.empty()) return RefuseValue("--run", "--help", "flags of a job");
  return options;
}

// A coordinator refuses agents that were started on other terms than its own.
std::vector<std::string> TermsOf(const LaunchOptions& options, const SlurmJob& job) {
  JobOptions usual;
  usual.max_restarts = job.max_restarts;
  const Terms without = JobTerms(usual, job.ranks_per_node, job.nodes, 0);
  std::vector<std::string> flags;
  for (const Term& term : JobTerms(options.job, job.ranks_per_node, job.nodes,
                                   options.nodes ? options.nodes->spares : 0)) {
    if (std::find(without.begin(), without.end(), term) == without.end())
      flags.push_back(term.flag + "=" + term.value);
  }
  return flags;
}

absl::Status Complete(Arguments& raw) {
  SlurmJob& job = raw.job;
  if (raw.engine != "slurm") return RefuseValue("--to", raw.engine, "slurm");
  OUTLAST_ASSIGN_OR_RETURN(job.nodes, ParseNodeCount(raw.nodes));
  job.ranks_per_node = 0;
  OUTLAST_RETURN_IF_ERROR(ReadInteger("-n", raw.ranks, 1, kMaxRanks, job.ranks_per_node));
  if (job.ranks_per_node == 0) return RefuseValue("-n", "", "ranks of each node");
  OUTLAST_RETURN_IF_ERROR(ReadInteger("--cpus-per-node", raw.cpus, 1, 1 << 16, job.cpus_per_node));
  OUTLAST_RETURN_IF_ERROR(ReadInteger("--notice", raw.notice, kMinNotice, kMaxNotice, job.notice));
  OUTLAST_RETURN_IF_ERROR(
      ReadInteger("--max-restarts", raw.max_restarts, 0, INT_MAX, job.max_restarts));
  OUTLAST_RETURN_IF_ERROR(
      ReadInteger("--max-requeues", raw.max_requeues, 0, INT_MAX, job.max_requeues));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--last-call", raw.last_call, job.last_call));
  OUTLAST_RETURN_IF_ERROR(ReadInteger("--port", raw.port, 1, 65535, job.port));
  std::error_code error;
  job.folder = std::filesystem::current_path(error);
  if (!error && job.tool.empty()) job.tool = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) {
    return Error(absl::StatusCode::kNotFound, "the working directory or the tool's file: {}",
                 error.message());
  }
  OUTLAST_ASSIGN_OR_RETURN(const LaunchOptions options, TryRunFlags(job));
  job.terms = TermsOf(options, job);
  return absl::OkStatus();
}

int CodeOf(const absl::Status& status) {
  const bool is_asked_again = absl::IsUnavailable(status) || absl::IsFailedPrecondition(status);
  return is_asked_again ? 1 : kExitRefused;
}

absl::StatusOr<std::string> Submit(Arguments& raw) {
  OUTLAST_RETURN_IF_ERROR(Complete(raw));
  OUTLAST_ASSIGN_OR_RETURN(const SlurmRequest request, RenderSlurm(raw.job));
  if (raw.dry && raw.json) {
    nlohmann::ordered_json json;
    json["job"] = request.job;
    json["key"] = request.key;
    json["options"] = request.options;
    json["script"] = request.script;
    return json.dump() + "\n";
  }
  if (raw.dry) return request.script;
  OUTLAST_ASSIGN_OR_RETURN(const SlurmSubmission done, SubmitToSlurm(request));
  if (raw.json) {
    nlohmann::ordered_json json;
    json["job"] = request.job;
    json["slurm_job"] = done.entry.id;
    json["state"] = done.entry.state;
    json["was_there"] = done.was_there;
    json["key"] = request.key;
    return json.dump() + "\n";
  }
  return fmt::format("Slurm job {} {}, key {}\n", done.entry.id,
                     done.was_there ? "is there already (" + done.entry.state + ")" : "submitted",
                     request.key);
}

}  // namespace

int RunSubmitTool(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err) {
  CLI::App app("Sends a job to a batch system, which runs it by outlast run.", "outlast submit");
  Arguments raw;
  Declare(app, raw);
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  if (dashes != arguments.end()) raw.job.command.assign(dashes + 1, arguments.end());
  const auto refuse = [&err](std::string_view why) {
    err << "outlast: submit: " << why << '\n';
    return kExitRefused;
  };
  const std::vector<std::string> flags(arguments.begin(), dashes);
  absl::Status fits = RefuseCutValues(app, flags);
  if (!fits.ok()) return refuse(MessageOf(fits));
  try {
    app.parse(std::vector<std::string>(flags.rbegin(), flags.rend()));
  } catch (const CLI::CallForHelp&) {
    out << app.help();
    return 0;
  } catch (const CLI::ParseError& error) {
    fits = RefuseRepeatedFlags(app);
    if (!fits.ok()) return refuse(MessageOf(fits));
    return refuse(std::string(error.what()) + ": see outlast submit --help");
  }
  fits = RefuseRepeatedFlags(app);
  if (fits.ok()) fits = RefuseEmptyValues(app);
  if (!fits.ok()) return refuse(MessageOf(fits));
  const auto text = Submit(raw);
  if (!text.ok()) {
    err << "outlast: submit: " << MessageOf(text.status()) << '\n';
    return CodeOf(text.status());
  }
  out << *text;
  return 0;
}

}  // namespace outlast
