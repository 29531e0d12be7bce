#include "adapters/slurm_script.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "base/flag_values.h"
#include "outlast/base/digest.h"

namespace outlast {
namespace {

constexpr size_t kKeyDigits = 16;

// --- The parts of the script that are alike in all ---

constexpr char kStart[] = R"bash(
attempt=${SLURM_RESTART_COUNT:-0}
export OUTLAST_ATTEMPT=$SLURM_JOB_ID.$attempt
say() { printf 'outlast: Slurm job %s, attempt %s: %s\n' "$SLURM_JOB_ID" "${OUTLAST_ATTEMPT#*.}" "$*" >&2; }

scratch=$(mktemp -d || mktemp -d -p /tmp) && cd -- "$folder" || { say "no folder to work in"; exit 85; }
trap 'rm -rf "$scratch"' EXIT

# Slurm's warning and scancel's TERM come here. Whoever leads has all ranks agree on a step and save it.
lead='' stop='' interrupted=''
hear() { stop=$1 interrupted=1; [ -z "$lead" ] || kill -s "$1" "$lead" 2>/dev/null; }
trap 'hear USR1' USR1
trap 'hear TERM' TERM
follow() { lead=$1; [ -z "$stop" ] || kill -s "$stop" "$lead" 2>/dev/null; }

# The exit code of a child, whatever signals come meanwhile.
await() {
  local code
  while interrupted=''; wait "$1"; code=$?; [ -n "$interrupted" ]; do :; done
  return "$code"
}

finish() {
  case $1 in 80 | 81 | 84) requeue "$1" ;; esac
  say "ends with $1"
  exit "$1"
}

requeue() {
  local state
  state=$(scontrol show job "$SLURM_JOB_ID" --oneliner | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p')
  if [ "$state" != RUNNING ]; then
    say "$1: not requeued, Slurm ends it ($state)"
  elif [ "$attempt" -ge "$max_requeues" ]; then
    say "$1: not requeued, $max_requeues requeues are used up"
  else
    say "$1: requeued"
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID"
  fi
}

# On a node that its agent found unfit (87). The others go on, so it is given back, where enough are left.
excluded() {
  local reason="outlast: excluded by job $SLURM_JOB_ID" rest
  if [ "$drain" = yes ]; then
    scontrol update NodeName="$SLURMD_NODENAME" State=DRAIN Reason="$reason" && say "node $SLURMD_NODENAME is drained"
  else
    say "node $SLURMD_NODENAME is unfit. To keep others off it: scontrol update NodeName=$SLURMD_NODENAME State=DRAIN Reason='$reason'"
  fi
  [ "$SLURM_NODEID" -gt 0 ] || return  # the batch script runs there
  rest=$(scontrol show hostnames "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N)" | grep -vxF "$SLURMD_NODENAME")
  [ "$(wc -l <<<"$rest")" -ge "${nodes%:*}" ] || return
  say "node $SLURMD_NODENAME is given back"
  # In a folder where it cannot leave its files. It ends this step's part on the node, this shell too.
  cd /proc && scontrol update JobId="$SLURM_JOB_ID" NodeList="$(paste -sd, <<<"$rest")"
}
)bash";

constexpr char kOneNode[] = R"bash(
"$tool" run --job "$job" -n "$ranks" --max-restarts "$max_restarts" --grace "$grace" --stop-within "$stop_within" \
  "${flags[@]}" -- "${command[@]}" &
follow $!
await "$lead"
code=$?
[ "$code" != 87 ] || excluded
finish "$code"
)bash";

constexpr char kManyNodes[] = R"bash(
# One a node, in the step. Slurm signals all of its processes: the shell waits for the agent.
agent() {
  trap : TERM USR1 USR2 INT HUP
  local token=$OUTLAST_TOKEN code
  unset OUTLAST_TOKEN
  "$tool" run --nnodes "$nodes" --coordinator "$coordinator" --job "$job" --node "$SLURMD_NODENAME" \
    --node-rank "$SLURM_NODEID" -n "$ranks" --max-restarts "$max_restarts" --grace "$grace" \
    --stop-within "$stop_within" --token-fd 3 "$@" 3<<<"$token"
  code=$?
  [ "$code" != 87 ] || excluded
  exit "$code"
}

# The coordinator, on this attempt's journal. One that is killed starts again there, at the same port, and
# the agents, which train on meanwhile, come back to it.
coordinate() {
  local again=0 pid line code
  lead='' stop=''
  trap 'hear USR1' USR1
  trap 'hear TERM' TERM
  while :; do
    "$tool" coordinator --job "$job" --journal "$scratch/journal" --listen "$address:$port" --nnodes "$nodes" -n "$ranks" \
      --max-restarts "$max_restarts" --last-call "$last_call" --grace "$grace" --stop-within "$stop_within" \
      "${terms[@]}" --token-fd 3 3<<<"$token" >"$scratch/said" &
    pid=$!
    read -r line <"$scratch/said"
    [ "$again" -gt 0 ] || printf '%s\n' "$line" >"$scratch/led"
    port=${line##*:}
    follow "$pid"
    await "$pid"
    code=$?
    case $code in 13[2-9]) ;; *) break ;; esac
    [ -n "$line" ] && [ "$again" -lt 5 ] || break
    again=$((again + 1))
    lead=''
    say "the coordinator was killed ($code) and starts again"
  done
  # One that finds the end of the job in its journal does not tell how it ended.
  [ "$again" = 0 ] || [ "$code" != 85 ] || code=137
  exit "$code"
}

# Each attempt has its own, at the address by which Slurm knows the node.
token=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
address=$(scontrol show node "$SLURMD_NODENAME" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
mkfifo "$scratch/said" "$scratch/led"
coordinate &
pid=$!
read -r line <"$scratch/led"
follow "$pid"
coordinator=$address:${line##*:}
agents=85
if [ -n "$line" ]; then
  OUTLAST_TOKEN=$token srun --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill --wait=0 --mpi=none --cpu-bind=none --input=none \
    bash -c "$(declare -p tool job nodes ranks max_restarts grace stop_within drain coordinator); $(declare -f say excluded agent); agent \"\$@\"" \
    agent "${flags[@]}" -- "${command[@]}" &
  await $!
  agents=$?
  kill "$lead" 2>/dev/null  # it has ended the job and serves late agents, or has nobody left
fi
await "$lead"
code=$?
# Where the coordinator was killed, or only saw the agents go, they tell why.
case $code:$agents in
  137:*) code=$agents ;;
  8[014]:0 | 8[014]:8[01467] | 8[014]:129 | 8[014]:13[07] | 8[014]:143) ;;
  8[014]:*) code=$agents ;;
esac
finish "$code"
)bash";

// --- Words ---

bool IsPlain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("_-+=./:,@%").find(c) != std::string_view::npos;
}

bool IsControl(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

std::string ShellArray(const std::vector<std::string>& words) {
  std::string text = "(";
  for (const std::string& word : words)
    text += fmt::format("{}{}", text.size() > 1 ? " " : "", ShellWord(word));
  return text + ")";
}

// Option lines have their own quoting, which differs from bash's: what would need it is refused.
absl::Status CheckOptionValue(std::string_view flag, std::string_view value) {
  const auto fits = [](char c) {
    return IsPlain(c) || std::string_view("*[]&|~!^<>").find(c) != std::string_view::npos;
  };
  if (std::all_of(value.begin(), value.end(), fits)) return absl::OkStatus();
  std::string shown(value);
  std::replace_if(shown.begin(), shown.end(), IsControl, '?');
  return RefuseValue(flag, shown, "a value without spaces, quotes, '#', '$' or control characters");
}

absl::Status CheckMoreOption(const std::string& option) {
  constexpr std::array kOwn = {"job-name",  "nodes",      "comment",   "signal",
                               "requeue",   "no-requeue", "chdir",     "no-kill",
                               "open-mode", "ntasks",     "wrap",      "array",
                               "wait",      "parsable",   "test-only", "ntasks-per-node"};
  const std::string name = option.substr(0, option.find('='));
  if (!option.starts_with("--") || name.size() < 3)
    return RefuseValue("--sbatch", option, "an option such as --gres=gpu:8");
  for (const std::string_view own : kOwn) {
    if (name.substr(2) == own)
      return RefuseValue("--sbatch", option, "an option that the request does not set itself");
  }
  return CheckOptionValue("--sbatch", option);
}

absl::StatusOr<std::vector<std::string>> Options(const SlurmJob& job) {
  const NodeCount& nodes = job.nodes;
  std::vector<std::string> options = {"--job-name=" + job.job,
                                      nodes.min == nodes.max
                                          ? fmt::format("--nodes={}", nodes.max)
                                          : fmt::format("--nodes={}-{}", nodes.min, nodes.max)};
  if (job.cpus_per_node > 0) {
    options.push_back(fmt::format("--cpus-per-task={}", job.cpus_per_node));
  } else {
    options.emplace_back("--exclusive");
  }
  for (const auto& [flag, value] :
       {std::pair<std::string, std::string>{"--partition", job.partition},
        {"--account", job.account},
        {"--time", job.time}}) {
    OUTLAST_RETURN_IF_ERROR(CheckOptionValue(flag, value));
    if (!value.empty()) options.push_back(fmt::format("{}={}", flag, value));
  }
  options.push_back(fmt::format("--signal=B:USR1@{}", job.notice));
  options.insert(options.end(), {"--no-kill", "--requeue", "--open-mode=append"});
  for (const std::string& option : job.sbatch_options) {
    OUTLAST_RETURN_IF_ERROR(CheckMoreOption(option));
    options.push_back(option);
  }
  return options;
}

std::string Body(const SlurmJob& job) {
  const bool is_one = job.nodes.max == 1;
  std::string text = "# Rendered by outlast submit --to slurm.\n";
  const auto set = [&text](std::string_view name, std::string_view value) {
    text += fmt::format("{}={}\n", name, ShellWord(value));
  };
  set("tool", job.tool);
  set("folder", job.folder);
  set("job", job.job);
  set("nodes", job.nodes.min == job.nodes.max ? std::to_string(job.nodes.max)
                                              : fmt::format("{}:{}", job.nodes.min, job.nodes.max));
  set("ranks", std::to_string(job.ranks_per_node));
  set("max_restarts", std::to_string(job.max_restarts));
  set("max_requeues", std::to_string(job.max_requeues));
  set("grace", std::to_string(StopGrace(job.notice)));
  set("stop_within", std::to_string(StopWithin(job.notice)));
  if (!is_one) {
    set("last_call", fmt::format("{}", absl::ToDoubleSeconds(job.last_call)));
    set("port", std::to_string(job.port));
    text += fmt::format("terms={}\n", ShellArray(job.terms));
  }
  set("drain", job.drain_excluded ? "yes" : "no");
  text += fmt::format("flags={}\ncommand={}\n", ShellArray(job.run_flags), ShellArray(job.command));
  return text + kStart + (is_one ? kOneNode : kManyNodes);
}

}  // namespace

int StopWithin(int notice) { return notice * 9 / 10; }
int StopGrace(int notice) { return notice * 6 / 10; }

std::string ShellWord(std::string_view word) {
  if (!word.empty() && std::all_of(word.begin(), word.end(), IsPlain)) return std::string(word);
  const bool has_control = std::any_of(word.begin(), word.end(), IsControl);
  std::string text = has_control ? "$'" : "'";
  for (const char c : word) {
    if (IsControl(c)) {
      text += fmt::format("\\{:03o}", static_cast<unsigned char>(c));
    } else if (c == '\'') {
      text += has_control ? "\\'" : "'\\''";
    } else if (c == '\\' && has_control) {
      text += "\\\\";
    } else {
      text += c;
    }
  }
  return text + "'";
}

absl::StatusOr<SlurmRequest> RenderSlurm(const SlurmJob& job) {
  if (job.job.empty()) return RefuseValue("--job", "", "the job's id");
  OUTLAST_RETURN_IF_ERROR(CheckJobId(job.job));
  OUTLAST_RETURN_IF_ERROR(CheckName("--key", job.key));
  SlurmRequest request{.job = job.job, .folder = job.folder, .key = job.key};
  OUTLAST_ASSIGN_OR_RETURN(request.options, Options(job));
  const std::string body = Body(job);
  std::string lines;
  const auto add = [&lines](const std::string& option) { lines += "#SBATCH " + option + "\n"; };
  for (const std::string& option : request.options) add(option);
  if (request.key.empty()) request.key = ToHex(Sha256(lines + body)).substr(0, kKeyDigits);
  request.options.push_back("--comment=outlast-key=" + request.key);
  add(request.options.back());
  request.script = "#!/bin/bash\n" + lines + body;
  return request;
}

}  // namespace outlast
