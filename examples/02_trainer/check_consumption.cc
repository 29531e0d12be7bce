// Proves from a consumption log that training took each sample exactly once, and counts the steps
// that faults cost:
//   check_consumption --log FOLDER --checkpoints X --steps 300 --batch 64 --seed 1
#include <cstdio>
#include <optional>

#include "corpus.h"
#include "options.h"
#include "outlast/base/status.h"
#include "outlast/data/consumption_check.h"
#include "outlast/data/consumption_log.h"

namespace {

absl::Status Check(const TrainerOptions& options) {
  const std::string text = ReadTexts(options.texts);
  outlast::ConsumptionPlan plan;
  plan.data = {.samples = SampleCount(static_cast<int64_t>(text.size()), Window{}),
               .batch = options.batch,
               .seed = options.seed};
  plan.steps = options.steps;
  OUTLAST_ASSIGN_OR_RETURN(const auto lines,
                           outlast::ReadConsumptionLog(options.log + "/consumption.log"));
  OUTLAST_ASSIGN_OR_RETURN(const outlast::ConsumptionReport report,
                           outlast::CheckConsumption(lines, plan));
  std::printf(
      "%lld steps consumed %lld samples, each exactly once; %lld steps were lost and run again\n",
      static_cast<long long>(report.steps), static_cast<long long>(report.consumed),
      static_cast<long long>(report.superseded_steps()));
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const std::optional<TrainerOptions> options = ParseOptions(argc, argv);
  if (!options) return 2;
  const absl::Status status = Check(*options);
  if (!status.ok()) std::fprintf(stderr, "check_consumption: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
