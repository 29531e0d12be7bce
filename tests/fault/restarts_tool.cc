// `outlast run` for jobs that lose more ranks in an hour than any job should: without the limits
// that would stop them.
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "launch/agent.h"
#include "outlast/base/plugins.h"
#include "outlast/base/status.h"
#include "outlast/store/blob.h"

int main(int argc, char** argv) {
  using namespace outlast;
  auto options = ParseLaunchOptions({argv + 1, argv + argc}, nullptr);
  auto plugins = std::make_shared<Plugins>();
  const char* path = std::getenv("PATH");
  if (!options.ok() || !RegisterStores(*plugins).ok() || path == nullptr) return 85;
  options->plugins = std::move(plugins);
  options->job.max_restarts = options->job.same_root_limit = 1000;
  options->job.restarts_per_hour_limit = 1000;
  options->job.progress_steps = 1;  // so none waits
  const auto command = ResolveCommand(options->command, path, options->interpreter);
  if (!command.ok()) return 85;
  const Id128 run_id = Id128::Random();
  GuardianCommand orders{command->program, command->arguments, run_id.hex(), {}};
  sigprocmask(SIG_SETMASK, nullptr, &orders.signal_mask);
  const auto guardian = Guardian::Fork(orders);
  if (!guardian.ok()) return 85;
  return RunAgent(*options, run_id, **guardian);
}
