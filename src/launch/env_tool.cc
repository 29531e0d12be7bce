#include "launch/env_tool.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "base/error.h"
#include "launch/machine.h"
#include "launch/options.h"
#include "outlast/base/status.h"
#include "run/pod.h"

namespace outlast {
namespace {

using nlohmann::ordered_json;

// Why a claim counts, or does not. `index` is its place among all, the one that counts first.
std::string_view WhyOf(const std::vector<PlaceClaim>& claims, size_t index) {
  if (index > 0) return "passed over: it started the launcher above";
  switch (claims[0].launcher) {
    case Launcher::kOutlast:
      return "counts: an agent keeps this process";
    case Launcher::kTorchrun:
      return "counts: TORCHELASTIC_RUN_ID is set, no agent of Outlast is";
    case Launcher::kByHand:
      return "counts: RANK and WORLD_SIZE are set, by no launcher that is known";
    default:
      return "counts: RANK and WORLD_SIZE are not set";
  }
}

ordered_json Describe(const std::optional<PodClaim>& pod) {
  if (!pod) return nullptr;
  ordered_json json;
  json["index"] = pod->index;
  json["node"] = pod->node ? ordered_json(*pod->node) : ordered_json(nullptr);
  for (const Variable& variable : pod->variables) json["variables"][variable.name] = variable.value;
  return json;
}

ordered_json Describe(const std::vector<PlaceClaim>& claims, const std::optional<PodClaim>& pod,
                      const Variables& variables) {
  const PlaceClaim none;
  const PlaceClaim& place = claims.empty() ? none : claims.front();
  ordered_json json;
  json["rank"] = place.rank;
  json["world"] = place.world;
  json["local_rank"] = place.local_rank;
  json["launcher"] = NameOf(place.launcher);
  json["has_agent"] = place.launcher == Launcher::kOutlast;
  const char* run_dir = variables("OUTLAST_RUN_DIR");
  json["run_dir"] = run_dir != nullptr ? ordered_json(run_dir) : ordered_json(nullptr);
  json["cpus"] = CountCpus();
  json["gpus"] = CountGpus();
  json["found"] = ordered_json::array();
  for (size_t i = 0; i < claims.size(); ++i) {
    ordered_json found;
    found["launcher"] = NameOf(claims[i].launcher);
    found["why"] = WhyOf(claims, i);
    for (const Variable& variable : claims[i].variables)
      found["variables"][variable.name] = variable.value;
    json["found"].push_back(std::move(found));
  }
  json["pod"] = Describe(pod);
  return json;
}

void Print(const PodClaim& pod, std::ostream& out) {
  out << fmt::format("  Kubernetes Job: {}\n    {}\n", pod.Text(),
                     pod.node ? fmt::format("pod {}: says no rank; of `outlast run --nnodes` it is "
                                            "the --node-rank",
                                            *pod.node)
                              : "says no rank, and no node's place without PROCESSES_IN_JOB");
}

void Print(const std::vector<PlaceClaim>& claims, const std::optional<PodClaim>& pod,
           const ordered_json& all, std::ostream& out) {
  out << fmt::format("rank {} of {}, local rank {}; {} CPUs, {} GPUs\n", all["rank"].get<int>(),
                     all["world"].get<int>(), all["local_rank"].get<int>(), all["cpus"].get<int>(),
                     all["gpus"].get<int>());
  for (size_t i = 0; i < claims.size(); ++i) {
    out << fmt::format("  {}: {}\n    {}\n", NameOf(claims[i].launcher), claims[i].Text(),
                       WhyOf(claims, i));
  }
  if (pod) Print(*pod, out);
  if (claims.empty()) out << "  no launcher's variables: a world of one\n";
  if (all["has_agent"].get<bool>()) {
    out << fmt::format("  RUN_DIR {}\n",
                       all["run_dir"].is_null() ? "" : all["run_dir"].get<std::string>());
  } else {
    out << "  no agent: going on after a lost rank, agreed stops and verdicts need `outlast run`\n";
  }
}

}  // namespace

int RunEnvTool(const std::vector<std::string>& arguments, const Variables& variables,
               std::ostream& out, std::ostream& err) {
  CLI::App app("Prints which launcher's variables are here, and what they mean.", "outlast env");
  app.footer("Example:\n  srun -n 2 outlast env");
  bool wants_json = false;
  app.add_flag("--json", wants_json, "As one JSON object");
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::CallForHelp&) {
    out << app.help();
    return 0;
  } catch (const CLI::ParseError&) {
    err << "outlast: env: unknown argument: see outlast env --help\n";
    return kExitRefused;
  }
  const auto claims = FindPlace(variables);
  if (!claims.ok()) {
    err << "outlast: " << MessageOf(claims.status()) << '\n';
    return kExitRefused;
  }
  const auto pod = FindPod(variables);
  if (!pod.ok()) {
    err << "outlast: " << MessageOf(pod.status()) << '\n';
    return kExitRefused;
  }
  const ordered_json all = Describe(*claims, *pod, variables);
  if (wants_json) {
    out << all.dump(-1, ' ', false, ordered_json::error_handler_t::replace) << '\n';
  } else {
    Print(*claims, *pod, all, out);
  }
  return 0;
}

}  // namespace outlast
