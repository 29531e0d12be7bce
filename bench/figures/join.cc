// How long agents take to join a job of many nodes: from when all clients are up to when the last
// one was told the first generation. The coordinator is a process of its own, its journal on disk.
#include <memory>

#include "figures/figures.h"
#include "outlast/base/clock.h"
#include "tests/support/piped_process.h"

namespace outlast::bench {
namespace {

using testing::PipedProcess;

constexpr absl::Duration kWithin = absl::Seconds(60);

// Seconds; none: it did not come about.
std::optional<double> Join(const Settings& settings, int processes, int streams, int round) {
  const std::string count = std::to_string(processes * streams);
  PipedProcess coordinator({settings.tool, "coordinator", "--job", "join", "--nnodes", count,
                            "--journal",
                            settings.folder + "/join-" + count + "-" + std::to_string(round)});
  const std::string line = coordinator.LineWith("coordinator of job join at ", kWithin);
  if (line.empty()) return std::nullopt;
  const std::string address = line.substr(line.rfind(' ') + 1);
  std::vector<std::unique_ptr<PipedProcess>> clients;
  for (int i = 0; i < processes; ++i) {
    clients.push_back(std::make_unique<PipedProcess>(
        std::vector<std::string>{settings.agent_streams, address, "join",
                                 std::to_string(i * streams), std::to_string(streams)}));
  }
  for (const auto& client : clients) {
    if (client->LineWith("ready", kWithin).empty()) return std::nullopt;
  }
  const int64_t started = MonotonicNanos();
  for (const auto& client : clients) client->Go();
  for (const auto& client : clients) {
    if (client->LineWith("open 1", kWithin).empty()) return std::nullopt;
  }
  return static_cast<double>(MonotonicNanos() - started) / 1e9;
}

void Measure(const Settings& settings, Report& report, Figure figure, int processes, int streams) {
  if (!report.Wants(figure.name)) return;
  const int rounds = settings.smoke ? 1 : 5;
  for (int round = 0; round < rounds; ++round) {
    const auto seconds = settings.smoke ? Join(settings, 2, 2 + streams / 64, round)
                                        : Join(settings, processes, streams, round);
    if (seconds) figure.samples.push_back(*seconds);
  }
  figure.peer = settings.PeerOf(figure.name);
  report.Add(figure);
}

}  // namespace

void MeasureJoin(const Settings& settings, Report& report) {
  if (settings.agent_streams.empty()) return;
  // A twentieth of what torchrun 2.11 took for 128 agents on such a machine, 23.7 s.
  Measure(settings, report, {.name = "join.128", .unit = "s", .goal = 23.7 / 20}, 128, 1);
  Measure(settings, report, {.name = "join.1024", .unit = "s", .goal = 2}, 16, 64);
}

}  // namespace outlast::bench
