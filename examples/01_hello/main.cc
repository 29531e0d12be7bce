// The smallest trainer that outlasts kill -9: a counter. Run it by hand, or with several ranks:
//   outlast run -n 4 -- ./01_hello /tmp/hello
// Kill one of its processes with SIGKILL while it counts: the others keep theirs, and the count
// goes on.
#include <array>
#include <chrono>
#include <cstdio>
#include <span>
#include <string>
#include <thread>

#include "outlast/outlast.h"

namespace {

constexpr int64_t kSteps = 100;

absl::StatusOr<int> Count(const std::string& folder) {
  OUTLAST_ASSIGN_OR_RETURN(const auto run, outlast::Run::Join());
  OUTLAST_ASSIGN_OR_RETURN(
      const auto checkpoints,
      outlast::Checkpointer::Open(*run, {.uri = folder, .every = outlast::Every::Steps(20)}));

  std::array<int64_t, 1> sum{};
  const auto state = [&] {
    outlast::StateView view;
    view.regions.push_back(
        {"sum", outlast::DType::kI64, {1}, {}, {1}, std::as_writable_bytes(std::span(sum))});
    return view;
  };

  const auto count = [&](outlast::Generation& generation) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(int64_t step, checkpoints->Restore(state()));
    if (step == 0) sum[0] = 0;  // nothing to restore; this process may have counted before
    std::printf("rank %d of %d: generation %llu begins at step %lld\n", run->rank(), run->world(),
                static_cast<unsigned long long>(generation.number()), static_cast<long long>(step));
    for (; step < kSteps; ++step) {
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the work
      OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
      sum[0] += step;
      OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(step + 1, state()));
    }
    OUTLAST_RETURN_IF_ERROR(checkpoints->Finish(kSteps, state()));
    std::printf("rank %d: the sum is %lld\n", run->rank(), static_cast<long long>(sum[0]));
    return absl::OkStatus();
  };
  OUTLAST_RETURN_IF_ERROR(run->ForEachGeneration(count));
  // Stopped by a signal, and saved: whoever is no agent is told "run it again".
  return run->stopped() && !run->has_agent() ? 80 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: 01_hello CHECKPOINT_FOLDER\n");
    return 2;
  }
  const auto code = Count(argv[1]);
  if (!code.ok()) std::fprintf(stderr, "01_hello: %s\n", code.status().ToString().c_str());
  return code.ok() ? *code : 1;
}
