// The trainer of the tests of several nodes: nothing but collectives, each sum of which is known.
//   node_trainer LOG UNTIL [KILLED]
//
// Trains until the file UNTIL is there, as rank 0 sees it. LOG gets a line "generation round rank
// world pid" when a generation is entered (round 0) and each 20 rounds, and "done rank pid" at the
// end. In a job with --micro-batches also "share generation rank micro-batches" as it is entered.
// In generation 1 the rank KILLED waits after its last collective until it is killed; the others
// end.
//
// Ends with 0, 1 (the library refused something), 2 (usage), 4 (a wrong sum).
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "outlast/outlast.h"

namespace {

constexpr int kWrongSum = 4;

// One write(2) in append mode: lines of several ranks never mix.
void AppendLine(const std::string& path, const std::string& line) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0 || write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    std::perror(path.c_str());
  if (fd >= 0) close(fd);
}

// False: rank 0 has seen the end.
absl::StatusOr<bool> GoesOn(outlast::Group& group, const outlast::Generation& generation,
                            int64_t round, const std::string& until) {
  const int rank = generation.rank(), world = generation.world();
  const bool is_end = rank == 0 && access(until.c_str(), F_OK) == 0;
  std::vector<float> values(1000, static_cast<float>(round % 1000 + rank));
  values[0] = is_end ? 1 : 0;
  OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(values));
  const auto wanted = static_cast<float>((round % 1000) * world + world * (world - 1) / 2);
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i] == wanted) continue;
    std::fprintf(stderr, "node_trainer: round %lld: sum %f, wanted %f\n",
                 static_cast<long long>(round), static_cast<double>(values[i]),
                 static_cast<double>(wanted));
    std::_Exit(kWrongSum);
  }
  return values[0] == 0;
}

absl::Status Train(const std::string& log, const std::string& until, int killed) {
  OUTLAST_ASSIGN_OR_RETURN(const auto run, outlast::Run::Join());
  return run->ForEachGeneration([&](outlast::Generation& generation) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(auto group, outlast::Group::Make(generation, *run, "sums", 4096));
    const std::string rank = std::to_string(generation.rank());
    const std::string who =
        rank + " " + std::to_string(generation.world()) + " " + std::to_string(getpid()) + "\n";
    if (const int share = generation.micro_batches(); share > 0)
      AppendLine(log, "share " + std::to_string(generation.number()) + " " + rank + " " +
                          std::to_string(share) + "\n");
    for (int64_t round = 0;; ++round) {
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      OUTLAST_ASSIGN_OR_RETURN(const bool goes_on, GoesOn(group, generation, round, until));
      if (!goes_on) break;
      if (round % 20 == 0)
        AppendLine(log,
                   std::to_string(generation.number()) + " " + std::to_string(round) + " " + who);
      absl::SleepFor(absl::Milliseconds(2));
    }
    AppendLine(log, "done " + rank + " " + std::to_string(getpid()) + "\n");
    while (generation.rank() == killed && generation.number() == 1) {
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      absl::SleepFor(absl::Milliseconds(2));
    }
    return absl::OkStatus();
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  const absl::Status status = Train(argv[1], argv[2], argc == 4 ? std::atoi(argv[3]) : -1);
  if (!status.ok()) std::fprintf(stderr, "node_trainer: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
