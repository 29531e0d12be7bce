// A stranger's program: the embedded defaults work without an agent, and the testing library links.
#include <cstdio>

#include "outlast/outlast.h"
#include "outlast/testing/sim_clock.h"

int main() {
  const auto run = outlast::Run::Join();
  if (!run.ok()) {
    std::fprintf(stderr, "%s\n", run.status().ToString().c_str());
    return 1;
  }
  outlast::testing::SimClock clock;
  clock.Advance(absl::Seconds(1));
  std::printf("rank %d of %d after %s\n", (*run)->rank(), (*run)->world(),
              absl::FormatDuration(clock.Uptime()).c_str());
  return 0;
}
