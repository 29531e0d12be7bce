#include "outlast/run/collectives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"
#include "outlast/blackbox/flight_log.h"
#include "outlast/testing/local_world.h"
#include "outlast/testing/time_factor.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::LocalWorld;
using testing::LocalWorldOptions;
using testing::LocalWorldResult;
using testing::TimeFactor;

// One generation over a world of `ranks`, each with a group.
LocalWorldResult InGroups(int ranks, size_t max_bytes,
                          const std::function<absl::Status(Generation&, Group&)>& body) {
  LocalWorld world(ranks);
  return world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(Group group, Group::Make(generation, run, "data", max_bytes));
      return body(generation, group);
    });
  });
}

TEST(AllReduceSum, GivesEveryRankTheSum) {
  const LocalWorldResult result =
      InGroups(4, 1 << 20, [](Generation& generation, Group& group) -> absl::Status {
        const auto rank = static_cast<float>(generation.rank());
        for (const size_t count :
             {size_t{0}, size_t{1}, size_t{3}, size_t{16384}, size_t{16385}, size_t{262144}}) {
          std::vector<float> data(count, rank + 1);
          OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(data));
          EXPECT_EQ(std::count(data.begin(), data.end(), 10.0f),
                    static_cast<long>(count));  // 1 + 2 + 3 + 4
        }
        return absl::OkStatus();
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(AllReduceSum, AddsInTheOrderOfRanks) {
  // In single precision (1e8 + 1) + -1e8 is 0, and (1e8 + -1e8) + 1 is 1.
  const LocalWorldResult result =
      InGroups(3, 4096, [](Generation& generation, Group& group) -> absl::Status {
        constexpr std::array<float, 3> kParts = {1e8f, 1.0f, -1e8f};
        std::array<float, 1> data = {kParts[static_cast<size_t>(generation.rank())]};
        OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(data));
        EXPECT_EQ(data[0], 0.0f);
        return absl::OkStatus();
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(AllReduceSum, GivesTheSameBitsInEveryRunAndOnEveryRank) {
  constexpr size_t kCount = 50'000;
  std::vector<std::vector<float>> sums;
  Mutex mutex;
  for (int round = 0; round < 3; ++round) {
    const LocalWorldResult result =
        InGroups(3, kCount * 4, [&](Generation& generation, Group& group) -> absl::Status {
          std::mt19937 random(static_cast<unsigned>(generation.rank()));
          std::vector<float> data(kCount);
          for (float& value : data)
            value = std::ldexp(static_cast<float>(random()), static_cast<int>(random() % 60) - 60);
          OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(data));
          MutexLock lock(mutex);
          sums.push_back(data);
          return absl::OkStatus();
        });
    EXPECT_EQ(result.exit_code, 0) << result.reason;
  }
  ASSERT_EQ(sums.size(), 9u);
  for (const auto& sum : sums) EXPECT_EQ(std::memcmp(sum.data(), sums[0].data(), kCount * 4), 0);
}

TEST(Collectives, FollowEachOtherWithoutMixing) {
  const int rounds = TimeFactor() > 1 ? 50 : 400;
  const LocalWorldResult result =
      InGroups(3, 4096, [&](Generation& generation, Group& group) -> absl::Status {
        for (int round = 0; round < rounds; ++round) {
          const int root = round % 3;
          std::array<int, 2> word = {generation.rank() == root ? round : -1, 0};
          OUTLAST_RETURN_IF_ERROR(group.Broadcast(std::as_writable_bytes(std::span(word)), root));
          EXPECT_EQ(word[0], round);
          std::array<float, 1> one = {1};
          OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(one));
          EXPECT_EQ(one[0], 3);
          if (round % 4 == 0) OUTLAST_RETURN_IF_ERROR(group.Barrier());
        }
        return absl::OkStatus();
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(Collectives, AWorldOfOneWaitsForNobody) {
  const LocalWorldResult result = InGroups(1, 64, [](Generation&, Group& group) -> absl::Status {
    std::array<float, 2> data = {1, 2};
    OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(data));
    EXPECT_THAT(data, ElementsAre(1, 2));
    OUTLAST_RETURN_IF_ERROR(group.Broadcast(std::as_writable_bytes(std::span(data)), 0));
    return group.Barrier();
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(Collectives, RefuseWhatDoesNotFit) {
  InGroups(1, 64, [](Generation&, Group& group) -> absl::Status {
    std::vector<float> data(17);
    const absl::Status status = group.AllReduceSum(data);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("68 bytes, the group was made for 64"));
    EXPECT_EQ(group.Broadcast({}, 1).code(), absl::StatusCode::kInvalidArgument);
    return absl::OkStatus();
  });
}

TEST(Collectives, NameTheRankThatCalledSomethingElse) {
  const LocalWorldResult result =
      InGroups(2, 64, [](Generation& generation, Group& group) -> absl::Status {
        std::array<float, 2> data = {5, 5};
        const absl::Status status =
            generation.rank() == 0 ? group.AllReduceSum(data) : group.Barrier();
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("rank 1"));
        EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("Barrier"));
        EXPECT_THAT(data, ElementsAre(5, 5));
        return absl::OkStatus();
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(Barrier, TimesOutWhenARankIsAloneAndSaysThatTheGroupIsOfNoUse) {
  const LocalWorldResult result =
      InGroups(2, 64, [](Generation& generation, Group& group) -> absl::Status {
        OUTLAST_RETURN_IF_ERROR(group.Barrier({.timeout = absl::Seconds(20)}));
        if (generation.rank() == 1) {
          OUTLAST_RETURN_IF_ERROR(generation.Get("tried", absl::Seconds(20)).status());
          EXPECT_EQ(group.Barrier().code(), absl::StatusCode::kFailedPrecondition);
          return absl::OkStatus();
        }
        const int64_t start_ns = MonotonicNanos();
        const absl::Status alone = group.Barrier({.timeout = absl::Milliseconds(10)});
        const absl::Duration took = absl::Nanoseconds(MonotonicNanos() - start_ns);
        EXPECT_EQ(alone.code(), absl::StatusCode::kDeadlineExceeded);
        EXPECT_THAT(std::string(MessageOf(alone)), HasSubstr("10ms"));
        EXPECT_GE(took, absl::Milliseconds(10));
        EXPECT_LT(took, absl::Milliseconds(20) * TimeFactor() * 2);
        EXPECT_EQ(group.Barrier().code(), absl::StatusCode::kFailedPrecondition);
        return generation.Put("tried", "");
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(AllReduceSum, AnAbortEndsItAtOnceLeavesTheDataAndTheNextGenerationWorks) {
  LocalWorld world(4);
  std::atomic<int64_t> killed_ns{0};
  std::atomic<int64_t> slowest_ns{0};
  std::atomic<int> sums{0};
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(Group group, Group::Make(generation, run, "data", 4096));
      std::vector<float> data(1000, 1);
      if (generation.number() == 1 && generation.rank() == 3) {
        // The others are inside: their rows say so.
        for (int peer = 0; peer < 3; ++peer) {
          OUTLAST_RETURN_IF_ERROR(generation.Get(std::to_string(peer), absl::Seconds(20)).status());
        }
        Clock::Real().SleepFor(absl::Milliseconds(5));  // so that they sleep in the kernel
        killed_ns = MonotonicNanos();
        return absl::InternalError("a crash");
      }
      OUTLAST_RETURN_IF_ERROR(generation.Put(std::to_string(generation.rank()), "enters"));
      const absl::Status left = group.AllReduceSum(data);
      if (generation.number() > 1) {
        EXPECT_EQ(data[999], 4);
        ++sums;
        return left;
      }
      const int64_t took_ns = MonotonicNanos() - killed_ns;
      if (took_ns > slowest_ns) slowest_ns = took_ns;
      EXPECT_EQ(left.code(), absl::StatusCode::kAborted);
      EXPECT_EQ(std::count(data.begin(), data.end(), 1.0f), 1000);
      return left;
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(sums, 4);
  EXPECT_LT(absl::Nanoseconds(slowest_ns.load()), absl::Milliseconds(30) * TimeFactor());
}

TEST(AllReduceSum, OutlastsKillsInside) {
  constexpr int kKills = 15;
  LocalWorldOptions options;
  options.job.max_restarts = options.job.same_root_limit = options.job.restarts_per_hour_limit =
      1000;
  options.job.progress_steps = 1;
  LocalWorld world(3, options);
  std::atomic<int> kills{0};
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(Group group, Group::Make(generation, run, "data", 1 << 16));
      std::mt19937 random(static_cast<unsigned>(generation.number()));
      const auto at = static_cast<int>(2 + random() % 10);
      for (int step = 1; step < 30; ++step) {
        OUTLAST_RETURN_IF_ERROR(
            run.CompleteStep(static_cast<int64_t>(generation.number()) * 100 + step).status());
        if (step == at && generation.rank() == static_cast<int>(random() % 3) && kills++ < kKills)
          world.KillRank(generation.rank());
        std::vector<float> data(1 << 14, static_cast<float>(step));
        OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(data));
        EXPECT_EQ(data[data.size() - 1], static_cast<float>(3 * step));
      }
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_GE(kills, kKills);
}

TEST(Collectives, TheBlackBoxTellsWhoHasNotEntered) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(Group group, Group::Make(generation, run, "data", 64));
      OUTLAST_RETURN_IF_ERROR(group.Barrier());
      if (generation.rank() == 0) {
        EXPECT_EQ(group.Barrier({.timeout = absl::Milliseconds(1)}).code(),
                  absl::StatusCode::kDeadlineExceeded);
        OUTLAST_RETURN_IF_ERROR(generation.Put("tried", ""));
      }
      OUTLAST_RETURN_IF_ERROR(generation.Get("tried", absl::Seconds(20)).status());
      const auto view = SegmentView::Open(run.black_box().fd());
      const std::vector<CommSnapshot> comms = ReadComms(*view);
      EXPECT_EQ(comms.size(), 1u);
      if (comms.size() != 1) return absl::OkStatus();
      EXPECT_EQ(comms[0].name, "data");
      EXPECT_EQ(comms[0].size, 2u);
      EXPECT_EQ(comms[0].my_rank, static_cast<uint32_t>(generation.rank()));
      EXPECT_EQ(comms[0].api_seq, generation.rank() == 0 ? 2u : 1u);
      EXPECT_EQ(comms[0].started_seq, 1u);
      EXPECT_EQ(comms[0].done_seq, 1u);
      EXPECT_EQ(comms[0].state, generation.rank() == 0 ? CommState::kFailed : CommState::kReady);
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

}  // namespace
}  // namespace outlast
