// From the command to its exit, for two processes that do nothing.
#include "figures/figures.h"

namespace outlast::bench {
namespace {

std::vector<double> Times(const std::vector<std::string>& command, int count) {
  std::vector<double> samples;
  for (int i = 0; i < count; ++i) {
    if (const auto seconds = TimeCommand(command)) samples.push_back(*seconds * 1e3);
  }
  return samples;
}

}  // namespace

void MeasureLaunch(const Settings& settings, Report& report) {
  const int count = settings.smoke ? 2 : 40;
  Figure figure{.name = "launch.start_2", .unit = "ms", .goal = 20};
  figure.samples = Times(
      {settings.tool, "run", "-n", "2", "--run-dir", settings.folder + "/runs", "--", "/bin/true"},
      count);
  const auto bare = Times({"/bin/sh", "-c", "/bin/true & /bin/true & wait"}, count);
  if (!bare.empty()) figure.limit = Reference{"a shell that starts them", Quantile(bare, 0.5)};
  const auto peer = Times({"torchrun", "--nproc-per-node", "2", "--no-python", "/bin/true"},
                          settings.smoke ? 1 : 3);
  figure.peer = settings.PeerOf(figure.name);
  if (!peer.empty()) figure.peer = Reference{"torchrun", Quantile(peer, 0.5)};
  report.Add(figure);
}

}  // namespace outlast::bench
