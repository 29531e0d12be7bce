// A job goes on in a world of another size, by the real tool and a real trainer.
#include "tests/fault/ckpt_job.h"

namespace outlast::testing {
namespace {

// What the ranks' digests of each step add up to.
std::map<int64_t, uint32_t> DigestsByStep(CkptJob& job) {
  std::map<int64_t, uint32_t> digests;
  std::istringstream log(job.launched().Read("log"));
  uint64_t generation = 0;
  int64_t step = 0;
  int rank = 0;
  std::string digest;
  while (log >> generation >> step >> rank >> digest)
    digests[step] += static_cast<uint32_t>(std::stoul(digest, nullptr, 16));
  return digests;
}

CkptJob& WithShards(CkptJob& job) {
  job.trainer["--sharded-mb"] = "5";
  job.trainer["--state-mb"] = "3";
  return job;
}

TEST(ReshardedJob, GoesOnInAnyWorldWithTheSameState) {
  CkptJob whole;
  WithShards(whole).trainer["--steps"] = "50";
  ASSERT_EQ(whole.Run(), 0) << whole.Said();
  const std::map<int64_t, uint32_t> wanted = DigestsByStep(whole);
  ASSERT_EQ(wanted.size(), 50u);

  CkptJob job;
  WithShards(job);
  int64_t from = 0;
  for (const int world : {4, 2, 3, 6, 1}) {
    SCOPED_TRACE("a world of " + std::to_string(world));
    job.world = world;
    job.trainer["--steps"] = std::to_string(from + 10);
    ASSERT_EQ(job.Run(), 0) << job.Said();  // the trainer checks each byte that it gets
    for (const Restored& restored : job.Restores()) {
      EXPECT_EQ(restored.step, from);
      EXPECT_EQ(restored.source, from == 0 ? "-" : "disk");
    }
    EXPECT_EQ(job.Restores().size(), static_cast<size_t>(world));
    const std::map<int64_t, uint32_t> found = DigestsByStep(job);
    EXPECT_EQ(found.size(), 10u);
    for (const auto& [step, digest] : found) EXPECT_EQ(digest, wanted.at(step)) << step;
    from += 10;
  }
}

}  // namespace
}  // namespace outlast::testing
