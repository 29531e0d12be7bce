// The workers of the figures that need no state:
//   outlast_nodes_trainer PAGE train      steps of an all-reduce of 64 KiB and a pause of 5 ms, for
//   ever outlast_nodes_trainer PAGE stubborn   a plain program: rank 0 ignores SIGTERM for ever,
//   rank 1 exits
//                                         with 3; in the second attempt both are done at once
//   outlast_nodes_trainer PAGE idle       a plain program that waits for ever
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "figures/nodes_page.h"
#include "outlast/base/clock.h"
#include "outlast/base/memory.h"
#include "outlast/outlast.h"

namespace outlast::bench {
namespace {

int Number(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : 0;
}

absl::Status Train(NodesPage& page) {
  OUTLAST_ASSIGN_OR_RETURN(const auto run, Run::Join());
  int64_t steps = 0;
  return run->ForEachGeneration([&](Generation& generation) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(auto group, Group::Make(generation, *run, "sums", 64 << 10));
    std::vector<float> values(16 << 10);
    NodeCell& cell = page.cells[generation.rank() % kNodeRanks];
    cell.pid = getpid();
    while (true) {
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(values));
      cell.steps = ++steps;
      if (cell.generation != generation.number()) {
        cell.first_step_ns = MonotonicNanos();
        cell.generation = generation.number();
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
  });
}

int BeStubborn(NodesPage& page) {
  const int rank = Number("RANK"), attempt = Number("TORCHELASTIC_RESTART_COUNT");
  if (rank >= kNodeRanks || attempt > 1) return 2;
  signal(SIGTERM, SIG_IGN);
  NodeCell& cell = page.cells[rank];
  cell.began_ns[attempt] = MonotonicNanos();
  if (attempt == 1) return 0;
  while (rank == 0) pause();
  while (page.cells[0].began_ns[0] == 0) absl::SleepFor(absl::Milliseconds(1));
  cell.failed_ns = MonotonicNanos();
  std::_Exit(3);
}

}  // namespace
}  // namespace outlast::bench

int main(int argc, char** argv) {
  using namespace outlast;
  if (argc != 3) return 2;
  const UniqueFd file(open(argv[1], O_RDWR | O_CLOEXEC));
  const auto memory = Mapping::Shared(file.get(), sizeof(bench::NodesPage));
  if (!memory.ok()) return 2;
  auto& page = *reinterpret_cast<bench::NodesPage*>(memory->data());
  const std::string mode = argv[2];
  if (mode == "stubborn") return bench::BeStubborn(page);
  while (mode == "idle") pause();
  const absl::Status status = bench::Train(page);
  if (!status.ok()) std::fprintf(stderr, "nodes_trainer: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
