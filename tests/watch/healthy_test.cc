// No verdict over a healthy job, ever: a million simulated steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <random>

#include "tests/watch/sim_job.h"

namespace outlast {
namespace {

using ::testing::IsEmpty;

#ifdef OUTLAST_SANITIZED
constexpr uint64_t kSteps = 1'000'000 / 20;
#else
constexpr uint64_t kSteps = 1'000'000;
#endif

// The healthy matrix: log-normal step times (median 0.2 s), a first step 20 times as long on one
// rank, garbage collection for 2 s, evaluation on all ranks or on one (undeclared), saves of
// minutes with a declared limit on one rank, saves that report progress, long work outside any
// section.
SimJob::Extra HealthyExtra(int rank, uint64_t step, std::mt19937_64& random) {
  const auto chance = [&](double share) {
    return std::uniform_real_distribution<>(0, 1)(random) < share;
  };
  if (step % 5'000 == 0) return {.seconds = 45, .phase = Phase::kEval, .name = "eval"};
  if (rank == 0 && step % 3'001 == 0)
    return {.seconds = 60 + 40 * std::uniform_real_distribution<>(0, 1)(random),
            .phase = Phase::kEval,
            .name = "sample"};
  if (rank == 1 && step % 4'003 == 0)
    return {.seconds = 550, .phase = Phase::kCheckpointWrite, .name = "save", .limit_seconds = 600};
  if (rank == 2 && step % 7'001 == 0)
    return {.seconds = 900,
            .phase = Phase::kUser,
            .name = "export",
            .limit_seconds = 5,
            .makes_progress = true};
  if (rank == 3 && step % 9'001 == 0) return {.seconds = 250, .in_section = false};
  if (chance(1e-4)) return {.seconds = 2, .in_section = false};
  return {};
}

TEST(HealthyMatrix, GivesNoVerdictInAMillionSteps) {
  const uint64_t seed = std::getenv("OUTLAST_TEST_SEED") != nullptr
                            ? std::strtoull(std::getenv("OUTLAST_TEST_SEED"), nullptr, 10)
                            : 4;
  std::mt19937_64 random(seed);
  SimJob job(4);
  std::lognormal_distribution<> own_work(std::log(0.2), 0.35);
  job.work = [&](int rank, uint64_t step) {
    return own_work(random) * (step == 1 && rank == 1 ? 20 : 1);
  };
  job.extra = [&](int rank, uint64_t step) { return HealthyExtra(rank, step, random); };
  SimWatch watch(job, WatchdogOptions{}, 4);
  while (job.step() < kSteps && watch.findings.empty()) watch.Poll(1);
  EXPECT_THAT(watch.findings, IsEmpty())
      << "seed " << seed << ", step " << job.step() << ": " << watch.findings[0].verdict.reason;
}

}  // namespace
}  // namespace outlast
