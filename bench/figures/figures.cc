// outlast_figures [AREA] [--only TEXT,...] [--json FILE] [--peers FILE] [--dir FOLDER] [--smoke]
#include "figures/figures.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "outlast/base/clock.h"

namespace outlast::bench {
namespace {

nlohmann::json ToJson(const std::optional<Reference>& reference) {
  if (!reference) return nullptr;
  return {{"name", reference->name}, {"value", reference->value}};
}

// Lines of bench/peers: name, value and what it is of. False: not such a file.
bool ReadPeers(const std::string& path, Settings& settings) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const auto figure = nlohmann::json::parse(line, nullptr, false);
    if (!figure.is_object() || !figure.contains("name") || !figure["name"].is_string() ||
        !figure.contains("value") || !(figure["value"].is_number() || figure["value"].is_null())) {
      return false;
    }
    if (figure["value"].is_null()) continue;  // it could not be had; the line says why
    const auto name = figure["name"].get<std::string>();
    settings.peers[name] = {figure.value("of", name), figure["value"].get<double>()};
  }
  return !settings.peers.empty();
}

constexpr double kNotable = 5;  // ms

double LoadAverage() {
  double load = 0;
  return getloadavg(&load, 1) == 1 ? load : -1;
}

}  // namespace

double Quantile(std::vector<double> samples, double share) {
  std::sort(samples.begin(), samples.end());
  const auto last = static_cast<double>(samples.size() - 1);
  const double at = share * last;
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, samples.size() - 1);
  return std::lerp(samples[low], samples[high], at - std::floor(at));
}

bool Report::Wants(std::string_view name) const {
  return only_.empty() || std::any_of(only_.begin(), only_.end(), [&](const std::string& part) {
           return name.find(part) != std::string_view::npos;
         });
}

void Report::Measure(std::initializer_list<std::string_view> names,
                     const std::function<absl::Status()>& measure) {
  if (std::none_of(names.begin(), names.end(), [&](auto name) { return Wants(name); })) return;
  if (const absl::Status done = measure(); !done.ok())
    Fail(std::string(*names.begin()), done.ToString());
}

void Report::Add(const Figure& figure) {
  if (!Wants(figure.name)) return;
  if (figure.samples.empty()) return Fail(figure.name, "nothing was measured");
  const double value = Quantile(figure.samples, 0.5);
  const auto [min, max] = std::minmax_element(figure.samples.begin(), figure.samples.end());
  const bool ok = figure.sense == Goal::kAtMost ? value <= figure.goal : value >= figure.goal;
  const std::optional<double> standstill = standstill_.TakeLongest();
  const nlohmann::json line = {
      {"name", figure.name},
      {"value", value},
      {"unit", figure.unit},
      {"goal", figure.goal},
      {"limit", ToJson(figure.limit)},
      {"peer", ToJson(figure.peer)},
      {"n", figure.samples.size()},
      {"min", *min},
      {"max", *max},
      {"p90", Quantile(figure.samples, 0.9)},
      {"load", LoadAverage()},
      {"standstill_ms", standstill ? nlohmann::json(*standstill) : nullptr},
      {"ok", ok}};
  fmt::print(json_, "{}\n", line.dump());
  std::fflush(json_);
  std::string beside;
  for (const auto* reference : {&figure.limit, &figure.peer}) {
    if (*reference) beside += fmt::format(", {} {:.4g}", (*reference)->name, (*reference)->value);
  }
  if (standstill && *standstill > kNotable)
    beside += fmt::format(", the machine stood still for {:.4g} ms", *standstill);
  fmt::print(
      stderr,
      "{:<26} {:>9.4g} {:<8} goal {} {:.4g}{}  (min {:.4g}, p90 {:.4g}, max {:.4g}, n {}{})\n",
      figure.name, value, figure.unit, figure.sense == Goal::kAtMost ? "<=" : ">=", figure.goal,
      ok ? "" : "  MISSED", *min, Quantile(figure.samples, 0.9), *max, figure.samples.size(),
      beside);
}

void Report::Fail(const std::string& name, const std::string& why) {
  failed_ = true;
  fmt::print(stderr, "{:<26} not measured: {}\n", name, why);
}

std::optional<Reference> Settings::PeerOf(const std::string& name) const {
  const auto found = peers.find(name);
  if (found == peers.end()) return std::nullopt;
  return found->second;
}

std::optional<double> TimeCommand(const std::vector<std::string>& command,
                                  const std::string& output) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  const int64_t started = MonotonicNanos();
  pid_t pid = 0;
  const int spawned = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (spawned != 0) return std::nullopt;
  int status = 0;
  if (waitpid(pid, &status, 0) != pid || status != 0) return std::nullopt;
  return static_cast<double>(MonotonicNanos() - started) / 1e9;
}

}  // namespace outlast::bench

int main(int argc, char** argv) {
  using namespace outlast::bench;
  const std::map<std::string, std::vector<void (*)(const Settings&, Report&)>> areas = {
      {"launch", {MeasureLaunch, MeasureJoin, MeasureOutage}},
      {"run", {MeasureRestart, MeasureCollectives}},
      {"elastic", {MeasureRestart}},
      {"checkpoint", {MeasureCheckpoint}},
      {"meter", {MeasureMeter}},
      {"blackbox", {MeasureBlackBox}},
      {"",
       {MeasureMeter, MeasureBlackBox, MeasureLaunch, MeasureJoin, MeasureOutage, MeasureRestart,
        MeasureCollectives, MeasureCheckpoint}}};
  std::vector<std::string> only;
  std::string area, peers, json_path, folder = std::filesystem::temp_directory_path();
  Settings settings;
  CLI::App app("Measures the figures of Outlast and writes one JSON object a line.");
  app.add_option("AREA", area, "launch, run, elastic, checkpoint, meter or blackbox (all)");
  app.add_option("--json", json_path, "Where the lines go (standard output)")->type_name("FILE");
  app.add_option("--dir", folder, "A folder on the disk to measure")->type_name("FOLDER");
  app.add_option("--only", only, "Only figures whose names contain one of these")
      ->delimiter(',')
      ->type_name("TEXT,...");
  app.add_option("--peers", peers, "What a script of bench/peers wrote, to stand beside ours")
      ->type_name("FILE");
  app.add_flag("--smoke", settings.smoke, "Tiny counts: shows that it works, not how fast");
  CLI11_PARSE(app, argc, argv);
  const auto chosen = areas.find(area);
  if (chosen == areas.end()) {
    fmt::print(stderr,
               "bench: area '{}': launch, run, elastic, checkpoint, meter or blackbox wanted\n",
               area);
    return 2;
  }
  const std::filesystem::path build =
      std::filesystem::canonical("/proc/self/exe").parent_path().parent_path();
  settings.tool = build / "outlast";
  settings.trainer = build / "bench" / "outlast_restart_trainer";
  settings.nodes_trainer = build / "bench" / "outlast_nodes_trainer";
  if (const auto file = build / "outlast_agent_streams"; std::filesystem::exists(file))
    settings.agent_streams = file;
  settings.folder = std::filesystem::absolute(folder) / "outlast-bench-XXXXXX";
  if (mkdtemp(settings.folder.data()) == nullptr) {
    fmt::print(stderr, "bench: --dir '{}': a writable folder wanted\n", folder);
    return 2;
  }
  if (!peers.empty() && !ReadPeers(peers, settings)) {
    fmt::print(stderr, "bench: --peers '{}': lines of a script of bench/peers wanted\n", peers);
    std::filesystem::remove_all(settings.folder);
    return 2;
  }
  std::FILE* json = json_path.empty() ? stdout : std::fopen(json_path.c_str(), "we");
  if (json == nullptr) {
    fmt::print(stderr, "bench: --json '{}': cannot be written\n", json_path);
    std::filesystem::remove_all(settings.folder);
    return 2;
  }
  Report report(json, only);
  for (const auto measure : chosen->second) measure(settings, report);
  if (json != stdout) std::fclose(json);
  std::filesystem::remove_all(settings.folder);
  return report.failed() ? 1 : 0;
}
