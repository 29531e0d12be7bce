// A byte-level language model that trains on with data-parallel ranks while its processes are
// killed and stopped:
//   outlast run -n 4 -- 02_trainer --checkpoints /tmp/ckpt
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>

#include "options.h"
#include "outlast/data/consumption_log.h"
#include "outlast/outlast.h"
#include "trainer.h"

namespace {

// What rank 0 writes for people and for the demo's checks.
class Record {
 public:
  Record(const std::string& folder, int rank) : folder_(rank == 0 ? folder : "") {
    if (!folder_.empty()) losses_.open(folder_ + "/losses.tsv", std::ios::app);
  }
  void Step(const outlast::Run& run, uint64_t generation, int64_t step, double loss) {
    if (losses_.is_open())
      losses_ << run.run_id().hex() << '\t' << generation << '\t' << step << '\t' << loss
              << std::endl;
  }
  void Result(double loss, double entropy, uint32_t digest) {
    std::printf("final loss %.6f nats a byte (%a), unigram entropy %.6f, state %08x\n", loss, loss,
                entropy, digest);
    if (folder_.empty()) return;
    char line[160];
    std::snprintf(line, sizeof line, "%a %.6f %.6f %08x\n", loss, loss, entropy, digest);
    std::ofstream(folder_ + "/result.txt") << line;
  }

 private:
  std::string folder_;
  std::ofstream losses_;
};

// The program's exit code. A stop that was asked for and saved is no end: without `outlast run`,
// which has codes of its own, it is told by 80, "run it again".
absl::StatusOr<int> Train(const TrainerOptions& options) {
  OUTLAST_ASSIGN_OR_RETURN(const auto run, outlast::Run::Join());
  OUTLAST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Make(options));
  OUTLAST_ASSIGN_OR_RETURN(
      const auto checkpoints,
      outlast::Checkpointer::Open(*run, {.uri = options.checkpoints,
                                         .every = outlast::Every::Steps(options.checkpoint_every),
                                         .snapshot_every = outlast::Every::Steps(1),
                                         .keep_last = 3,
                                         .remote = {.uri = options.remote},
                                         .restore_ahead = true}));
  OUTLAST_ASSIGN_OR_RETURN(
      const auto watchdog,
      outlast::Watchdog::Start(*run, {.poll = absl::Seconds(options.watch_poll),
                                      .floor = absl::Seconds(options.watch_floor),
                                      .looks_apart = absl::Seconds(options.watch_poll)}));
  OUTLAST_ASSIGN_OR_RETURN(
      const auto meter,
      outlast::Meter::Start(*run, {.flops = outlast::FlopsOf(trainer->mlp_shape())}));
  Record record(options.log, run->rank());
  std::optional<outlast::ConsumptionLog> consumption;
  if (!options.log.empty()) {
    OUTLAST_ASSIGN_OR_RETURN(consumption,
                             outlast::ConsumptionLog::Open(options.log + "/consumption.log"));
  }

  const absl::Status status =
      run->ForEachGeneration([&](outlast::Generation& generation) -> absl::Status {
        OUTLAST_ASSIGN_OR_RETURN(auto group, outlast::Group::Make(generation, *run, "gradients",
                                                                  trainer->gradient_bytes()));
        OUTLAST_ASSIGN_OR_RETURN(int64_t step, checkpoints->Restore(trainer->State()));
        if (step == 0) trainer->Initialize();
        if (step > 0) OUTLAST_RETURN_IF_ERROR(trainer->TakeExtras(checkpoints->restored_extras()));

        for (; step < options.steps; ++step) {
          OUTLAST_RETURN_IF_ERROR(generation.Check());
          auto scope = meter->Step(step);
          scope.Enter(outlast::Phase::kData);
          OUTLAST_ASSIGN_OR_RETURN(const std::vector<int64_t> ids,
                                   trainer->NextIds(generation.rank(), generation.world()));
          if (consumption) {
            OUTLAST_RETURN_IF_ERROR(consumption->Append(
                {run->run_id(), generation.number(), step, generation.rank(), ids}));
          }
          OUTLAST_RETURN_IF_ERROR(trainer->ForwardBackward(ids, group, scope));
          scope.Enter(outlast::Phase::kCheckpointSnapshot);
          OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
          scope.Enter(outlast::Phase::kOptimizer);
          OUTLAST_RETURN_IF_ERROR(trainer->OptimizerStep(step));
          scope.Enter(outlast::Phase::kCheckpointSnapshot);
          OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(step + 1, trainer->State()));
          record.Step(*run, generation.number(), step, trainer->loss());
        }
        if (step > options.steps) {
          return outlast::MakeStatus(absl::StatusCode::kInvalidArgument,
                                     "--steps " + std::to_string(options.steps) + ": " +
                                         options.checkpoints + " is at step " +
                                         std::to_string(step) + " already");
        }
        OUTLAST_RETURN_IF_ERROR(checkpoints->Finish(options.steps, trainer->State()));
        if (run->rank() == 0)
          record.Result(trainer->loss(), trainer->unigram_entropy(), trainer->StateDigest());
        return absl::OkStatus();
      });
  OUTLAST_RETURN_IF_ERROR(status);
  if (!run->stopped() || run->has_agent()) return 0;
  std::fprintf(stderr, "02_trainer: stopped and saved; the same command goes on from there\n");
  return 80;
}

}  // namespace

int main(int argc, char** argv) {
  const std::optional<TrainerOptions> options = ParseOptions(argc, argv);
  if (!options) return 2;
  const absl::StatusOr<int> code = Train(*options);
  if (!code.ok()) std::fprintf(stderr, "02_trainer: %s\n", code.status().ToString().c_str());
  return code.value_or(1);
}
