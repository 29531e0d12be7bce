// The trainer of the torture cases.
//   torture_trainer leave FOLDER         rank 0 exits with 0 in generation 1 without having
//   finished torture_trainer steps FOLDER         steps of 1 ms until the file FOLDER/until is
//   there; FOLDER/log
//                                        gets "generation rank pid" once a rank has made 5 steps
//                                        more
//   torture_trainer PHASE FOLDER         the same with saves to FOLDER/root, but stands in PHASE
//   (init,
//                                        warmup, evaluation, save) until it is asked to stop:
//                                        FOLDER/PHASE appears when it does. In the phase "long" it
//                                        stands whatever it is asked
//
// Ends with 0, 1 (the library refused something) or 2 (usage).
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outlast/outlast.h"

namespace {

constexpr int64_t kStandsAt = 10;
constexpr uint64_t kDiskRate = 4 << 20;  // a save takes half a second

// One write(2) in append mode: lines of several ranks never mix.
void AppendLine(const std::string& path, const std::string& line) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0 || write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    std::perror(path.c_str());
  if (fd >= 0) close(fd);
}

class Trainer {
 public:
  Trainer(std::string mode, std::string folder)
      : mode_(std::move(mode)), folder_(std::move(folder)), state_(1 << 18) {}

  absl::Status Train() {
    if (mode_ == "init") {
      AppendLine(folder_ + "/init", "here\n");
      absl::SleepFor(absl::Seconds(600));  // whoever has not joined is ended by the signal itself
    }
    OUTLAST_ASSIGN_OR_RETURN(run_, outlast::Run::Join());
    if (mode_ == "leave") return run_->ForEachGeneration([&](auto& one) { return Leave(one); });
    if (mode_ != "steps") {
      OUTLAST_ASSIGN_OR_RETURN(
          checkpoints_, outlast::Checkpointer::Open(*run_, {.uri = folder_ + "/root",
                                                            .every = outlast::Every::Steps(5),
                                                            .disk_bytes_per_second = kDiskRate}));
    }
    return run_->ForEachGeneration([&](auto& one) { return Steps(one); });
  }

 private:
  // Rank 1 hangs in the first generation: it waits for what nobody gives.
  absl::Status Leave(outlast::Generation& generation) {
    if (generation.number() > 1) return absl::OkStatus();
    const std::string rank = std::to_string(generation.rank());
    OUTLAST_RETURN_IF_ERROR(generation.Put(rank, ""));
    OUTLAST_RETURN_IF_ERROR(generation.Get("0", absl::Seconds(60)).status());
    OUTLAST_RETURN_IF_ERROR(generation.Get("1", absl::Seconds(60)).status());
    if (generation.rank() == 0) std::_Exit(0);
    return generation.Get("never", absl::Hours(1)).status();
  }

  void StandIn(const char* phase) {
    if (mode_ != phase) return;
    AppendLine(folder_ + "/" + phase, "here\n");
    while (!run_->StopRequested()) absl::SleepFor(absl::Milliseconds(1));
  }

  absl::Status Steps(outlast::Generation& generation) {
    OUTLAST_ASSIGN_OR_RETURN(int64_t step, Restore(generation));
    StandIn("warmup");
    OUTLAST_ASSIGN_OR_RETURN(auto group, outlast::Group::Make(generation, *run_, "sums", 64));
    for (const int64_t first = step;; ++step) {
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      std::vector<float> sum = {access((folder_ + "/until").c_str(), F_OK) == 0 ? 1.0f : 0.0f};
      OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(sum));
      if (sum[0] > 0) return absl::OkStatus();
      absl::SleepFor(absl::Milliseconds(1));
      if (step == kStandsAt) StandIn("evaluation");
      if (step == kStandsAt && mode_ == "long") {
        AppendLine(folder_ + "/long", "here\n");
        absl::SleepFor(absl::Seconds(600));
      }
      OUTLAST_RETURN_IF_ERROR(Complete(step + 1));
      if (step + 1 == kStandsAt) StandIn("save");  // it is on its way
      if (step == first + 5) {
        AppendLine(folder_ + "/log", std::to_string(generation.number()) + " " +
                                         std::to_string(generation.rank()) + " " +
                                         std::to_string(getpid()) + "\n");
      }
    }
  }

  std::vector<outlast::Region> State() {
    const auto size = static_cast<int64_t>(state_.size());
    return {{.name = "state",
             .dtype = outlast::DType::kF32,
             .global = {size},
             .offset = {0},
             .extent = {size},
             .bytes = std::as_writable_bytes(std::span(state_))}};
  }
  absl::StatusOr<int64_t> Restore(const outlast::Generation& generation) {
    if (!checkpoints_) return static_cast<int64_t>(generation.number()) * 1000;
    return checkpoints_->Restore({.regions = State()});
  }
  absl::Status Complete(int64_t step) {
    if (!checkpoints_) return run_->CompleteStep(step).status();
    OUTLAST_RETURN_IF_ERROR(checkpoints_->BeforeUpdate());
    state_[0] += 1;
    return checkpoints_->SaveIfDue(step, {.regions = State()});
  }

  const std::string mode_, folder_;
  std::unique_ptr<outlast::Run> run_;
  std::unique_ptr<outlast::Checkpointer> checkpoints_;
  std::vector<float> state_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const absl::Status status = Trainer(argv[1], argv[2]).Train();
  if (!status.ok()) std::fprintf(stderr, "torture_trainer: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
