// Ranks as threads over a real keeper: what a Run promises its trainer.
#include "outlast/run/generation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <future>
#include <set>
#include <thread>

#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"
#include "outlast/blackbox/progress.h"
#include "outlast/run/collectives.h"
#include "outlast/run/run.h"
#include "outlast/testing/local_world.h"
#include "outlast/testing/time_factor.h"
#include "run/shared_memory.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::LocalWorld;
using testing::LocalWorldOptions;
using testing::LocalWorldResult;
using testing::TimeFactor;

constexpr absl::Duration kPatience = absl::Seconds(20);

TEST(ForEachGeneration, GivesEachRankItsPlace) {
  Mutex mutex;
  std::set<int> ranks;
  LocalWorld world(4);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) {
      EXPECT_EQ(generation.number(), 1u);
      EXPECT_EQ(generation.world(), 4);
      EXPECT_EQ(generation.rank(), run.rank());
      for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(generation.node_of(rank), 0);
      EXPECT_EQ(run.generation(), 1u);
      EXPECT_TRUE(generation.Check().ok());
      MutexLock lock(mutex);
      ranks.insert(generation.rank());
      return absl::OkStatus();
    });
  });

  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_THAT(ranks, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(result.spawns, 4);
}

TEST(ForEachGeneration, SurvivorsKeepTheirThreadAndTheDeadSlotIsRefilled) {
  LocalWorld world(3);
  std::atomic<int> entered_second{0};
  Mutex mutex;
  std::set<std::thread::id> threads_of_survivors;
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    const std::thread::id thread = std::this_thread::get_id();
    int memory = 0;  // of the process
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      EXPECT_EQ(std::this_thread::get_id(), thread);
      ++memory;
      if (generation.number() == 1) {
        OUTLAST_RETURN_IF_ERROR(generation.Put(std::to_string(generation.rank()), "here"));
        for (const char* peer : {"0", "1", "2"})
          OUTLAST_RETURN_IF_ERROR(generation.Get(peer, kPatience).status());
        if (generation.rank() == 1) world.KillRank(1);
        const auto never = generation.Get("never", kPatience);
        EXPECT_THAT(never.status().code(),
                    ::testing::AnyOf(absl::StatusCode::kAborted, absl::StatusCode::kCancelled));
        EXPECT_FALSE(generation.Check().ok());
        return never.status();
      }
      EXPECT_EQ(memory, generation.rank() == 1 ? 1 : 2);
      ++entered_second;
      MutexLock lock(mutex);
      if (generation.rank() != 1) threads_of_survivors.insert(thread);
      return absl::OkStatus();
    });
  });

  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(result.generation, 2u);
  EXPECT_EQ(entered_second, 3);
  EXPECT_EQ(threads_of_survivors.size(), 2u);
  EXPECT_EQ(result.spawns, 4);
  ASSERT_EQ(result.faults.size(), 1u);
  EXPECT_EQ(result.faults[0].rank, 1);
  EXPECT_EQ(result.faults[0].end.signal, SIGKILL);
}

// Everybody's body: waits in Get for a key that nobody puts.
absl::Status WaitForEver(Generation& generation) {
  return generation.Get("never", absl::Hours(1)).status();
}

// Rank 0 says that it is there, and rank 1 crashes after that: else it might crash before rank 0
// has joined. What rank 0 is answered is open: the crash may end its generation, or the job, before
// the answer arrives. That its word arrived is for rank 1 to see.
void SayThere(Generation& generation) { (void)generation.Put("rank 0", "there"); }
absl::Status CrashWhenRank0IsThere(Generation& generation) {
  EXPECT_TRUE(generation.Get("rank 0", kPatience).ok());
  return absl::InternalError("a crash");
}

TEST(ForEachGeneration, UnwindsSurvivorsWithinMillisecondsOfADeath) {
  LocalWorld world(3);
  std::atomic<int64_t> killed_ns{0};
  std::atomic<int64_t> slowest_ns{0};
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() > 1) return absl::OkStatus();
      if (generation.rank() == 2) {
        for (const char* peer : {"0", "1"})
          OUTLAST_RETURN_IF_ERROR(generation.Get(peer, kPatience).status());
        killed_ns = MonotonicNanos();
        return absl::InternalError("a crash");
      }
      OUTLAST_RETURN_IF_ERROR(generation.Put(std::to_string(generation.rank()), "waits"));
      const absl::Status left = WaitForEver(generation);
      const int64_t took_ns = MonotonicNanos() - killed_ns;
      if (took_ns > slowest_ns) slowest_ns = took_ns;
      EXPECT_EQ(left.code(), absl::StatusCode::kAborted);
      EXPECT_THAT(std::string(MessageOf(left)), HasSubstr("generation 1"));
      EXPECT_THAT(std::string(MessageOf(generation.Check())), HasSubstr("rank 2: exit code 1"));
      return left;
    });
  });

  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_LT(absl::Nanoseconds(slowest_ns.load()), absl::Milliseconds(50) * TimeFactor());
  ASSERT_EQ(result.faults.size(), 1u);
  EXPECT_EQ(result.faults[0].end.code, 1);
}

TEST(Generation, OnAbortReleasesASurvivorThatIsBlockedElsewhere) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() > 1) return absl::OkStatus();
      if (generation.rank() == 1) return CrashWhenRank0IsThere(generation);
      SayThere(generation);
      std::promise<void> foreign;  // a call that knows nothing of Outlast
      generation.OnAbort([&] { foreign.set_value(); });
      foreign.get_future().wait();
      return generation.Check();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(result.spawns, 3);
}

TEST(Generation, OnAbortRunsAtOnceWhenTheGenerationHasEnded) {
  LocalWorld world(2);
  std::atomic<int> calls{0};
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() > 1) return absl::OkStatus();
      if (generation.rank() == 1) return CrashWhenRank0IsThere(generation);
      generation.OnAbort([&] { ++calls; });
      SayThere(generation);
      const absl::Status left = WaitForEver(generation);
      std::promise<void> late;
      generation.OnAbort([&] { late.set_value(); });
      late.get_future().wait();
      return left;
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(calls, 1);  // and not again in the next generation
}

TEST(Generation, ASurvivorWhoseCallbackBlocksIsReplacedWithinTheGrace) {
  LocalWorldOptions options;
  options.job.soft_abort = absl::Milliseconds(50);
  options.job.abort_term = absl::Milliseconds(10);
  LocalWorld world(2, options);
  std::promise<void> release;
  const auto released = release.get_future().share();
  std::atomic<int> processes_of_rank_0{0};
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    if (run.rank() == 0) ++processes_of_rank_0;
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() > 1) {
        OUTLAST_RETURN_IF_ERROR(generation.Put(std::to_string(generation.rank()), "again"));
        OUTLAST_RETURN_IF_ERROR(
            generation.Get(generation.rank() == 0 ? "1" : "0", kPatience).status());
        if (generation.rank() == 0) release.set_value();  // the test's end, not the callback's
        return absl::OkStatus();
      }
      if (generation.rank() == 1) return CrashWhenRank0IsThere(generation);
      generation.OnAbort([released] { released.wait(); });
      SayThere(generation);
      return WaitForEver(generation);
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(processes_of_rank_0, 2);
  EXPECT_EQ(result.generation, 2u);
}

TEST(ForEachGeneration, AnAbortedThatNobodyCausedIsAFaultOfThatRank) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() > 1) return absl::OkStatus();
      if (generation.rank() == 1) {
        OUTLAST_RETURN_IF_ERROR(generation.Get("rank 0", kPatience).status());
        return absl::AbortedError("I had enough");
      }
      SayThere(generation);
      return WaitForEver(generation);
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(result.spawns, 2);  // both kept their threads
  ASSERT_EQ(result.faults.size(), 1u);
  EXPECT_EQ(result.faults[0].rank, 1);
}

// Whoever is started anew may wait for it in a collective.
TEST(ForEachGeneration, AFinishedRankTakesPartAgainWhereAPeerIsRefilled) {
  LocalWorld world(2);
  std::atomic<int> bodies_of_rank_0{0}, left_by_rank_0{0};
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    const absl::Status left = run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.rank() == 0) {
        ++bodies_of_rank_0;
        return absl::OkStatus();
      }
      if (generation.number() > 1) return absl::OkStatus();
      while (left_by_rank_0 == 0) std::this_thread::yield();
      return absl::InternalError("a crash after the peer has left");
    });
    if (run.rank() == 0) ++left_by_rank_0;
    return left;
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(bodies_of_rank_0, 2);
  EXPECT_EQ(result.spawns, 4);
}

TEST(ForEachGeneration, SameFaultAgainAndAgainEndsTheJobForAHuman) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.rank() == 1) return CrashWhenRank0IsThere(generation);
      SayThere(generation);
      return WaitForEver(generation);
    });
  });
  EXPECT_EQ(result.exit_code, 82) << result.reason;
  EXPECT_EQ(result.faults.size(), 3u);
}

TEST(ForEachGeneration, OutlastsManyKillsAtRandomMoments) {
  constexpr int kRanks = 3;
  constexpr int kKills = 20;
  LocalWorldOptions options;
  options.job.max_restarts = options.job.same_root_limit = options.job.restarts_per_hour_limit =
      1000;
  options.job.progress_steps = 1;  // no back-off
  LocalWorld world(kRanks, options);
  std::atomic<int> kills{0};
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      for (int step = 1; kills < kKills; ++step) {
        OUTLAST_RETURN_IF_ERROR(
            run.CompleteStep(static_cast<int64_t>(generation.number()) * 10 + step).status());
        const std::string key = std::to_string(step) + "/";
        OUTLAST_RETURN_IF_ERROR(generation.Put(key + std::to_string(generation.rank()), "x"));
        if (step == 3 && generation.rank() == static_cast<int>(generation.number() % kRanks)) {
          ++kills;
          world.KillRank(generation.rank());
        }
        for (int peer = 0; peer < kRanks; ++peer) {
          OUTLAST_RETURN_IF_ERROR(generation.Get(key + std::to_string(peer), kPatience).status());
        }
      }
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_GE(result.generation, 1u + kKills - 1);
}

TEST(Generation, PutIsIdempotentAndNeverOverwrites) {
  LocalWorld world(1);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      EXPECT_TRUE(generation.Put("id", "one").ok());
      EXPECT_TRUE(generation.Put("id", "one").ok());
      EXPECT_EQ(generation.Put("id", "two").code(), absl::StatusCode::kAlreadyExists);
      EXPECT_EQ(generation.Get("id", absl::ZeroDuration()).value(), "one");
      EXPECT_TRUE(generation.Put("large", std::string(64 << 10, 'x')).ok());
      EXPECT_EQ(generation.Get("large", kPatience)->size(), 64u << 10);
      EXPECT_EQ(generation.Put("larger", std::string((64 << 10) + 1, 'x')).code(),
                absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(generation.Put("", "x").code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(generation.Put(std::string(257, 'k'), "x").code(),
                absl::StatusCode::kInvalidArgument);
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(Generation, GetTellsWhatNobodyPut) {
  LocalWorld world(1);
  world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      const absl::Status late = generation.Get("unique id", absl::Milliseconds(5)).status();
      EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
      EXPECT_THAT(std::string(MessageOf(late)), HasSubstr("key 'unique id' of generation 1"));
      return absl::OkStatus();
    });
  });
}

TEST(Generation, KeysOfAnOlderGenerationAreGone) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() == 1) {
        OUTLAST_RETURN_IF_ERROR(generation.Put(std::to_string(generation.rank()), "old"));
        OUTLAST_RETURN_IF_ERROR(generation.Get("0", kPatience).status());
        if (generation.rank() == 1) return absl::InternalError("a crash");
        return WaitForEver(generation);
      }
      EXPECT_EQ(generation.Get("1", absl::ZeroDuration()).status().code(),
                absl::StatusCode::kDeadlineExceeded);
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(result.generation, 2u);
}

TEST(Generation, RanksShareZeroedMemoryByName) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(const Mapping memory, generation.SharedMemory("board", 8192));
      EXPECT_EQ(memory.size(), 8192u);
      if (generation.rank() == 0) {
        EXPECT_EQ(memory.data()[8191], std::byte{0});
        memory.data()[8191] = std::byte{5};
        OUTLAST_RETURN_IF_ERROR(generation.Put("written", ""));
      }
      OUTLAST_RETURN_IF_ERROR(generation.Get("written", kPatience).status());
      EXPECT_EQ(memory.data()[8191], std::byte{5});
      EXPECT_EQ(generation.SharedMemory("board", 4096).status().code(),
                absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(generation.SharedMemory("huge", size_t{1} << 60).status().code(),
                absl::StatusCode::kResourceExhausted);
      EXPECT_EQ(Group::Make(generation, run, "huge", ~size_t{0} / 2).status().code(),
                absl::StatusCode::kInvalidArgument);
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(SlotMemory, IsTheSlotsOwnAndOutlivesItsProcess) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) -> absl::Status {
    // As a program would: made before the first generation.
    OUTLAST_ASSIGN_OR_RETURN(const Mapping memory, run.SlotMemory("weights", 3 << 20));
    const auto own = static_cast<std::byte>(run.rank() + 1);
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() == 1) {
        EXPECT_THAT(memory.bytes(), ::testing::Each(std::byte{0}));
        std::ranges::fill(memory.bytes(), own);
        OUTLAST_RETURN_IF_ERROR(generation.Put(std::to_string(generation.rank()), "filled"));
        for (const char* peer : {"0", "1"})
          OUTLAST_RETURN_IF_ERROR(generation.Get(peer, kPatience).status());
        if (generation.rank() == 1) world.KillRank(1);
        return generation.Get("never", kPatience).status();
      }
      EXPECT_THAT(memory.bytes(), ::testing::Each(own));
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(result.generation, 2u);
}

TEST(SlotMemory, RefusesAnotherSizeAndMoreThanThereIs) {
  LocalWorld world(1);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) -> absl::Status {
    EXPECT_TRUE(run.SlotMemory("weights", 8192).ok());
    EXPECT_TRUE(run.SlotMemory("weights", 8192).ok());
    EXPECT_TRUE(run.SlotMemory("moments", 4096).ok());
    EXPECT_THAT(run.SlotMemory("weights", 4096).status().message(),
                ::testing::HasSubstr("'weights': 4096 bytes asked for"));
    EXPECT_EQ(run.SlotMemory("none", 0).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(run.SlotMemory(std::string(300, 'x'), 4096).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(run.SlotMemory("huge", size_t{1} << 60).status().code(),
              absl::StatusCode::kResourceExhausted);
    return run.ForEachGeneration([](Generation&) { return absl::OkStatus(); });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

uint64_t AvailableBytes() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  uint64_t kib = 0;
  while (file >> word && word != "MemAvailable:") {
  }
  file >> kib;
  return kib * 1024;
}

// As two ranks may ask before either has touched a page of what it got.
TEST(SlotMemory, IsNotPromisedTwice) {
  LocalWorld world(2);
  const uint64_t most = AvailableBytes() / 10 * 7;
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      const auto ask = [&] {
        return AskForMemory(run.link(), "most", most, SharedScope::kSlot, 0).status();
      };
      if (generation.rank() == 0) {
        EXPECT_TRUE(ask().ok());
        return generation.Put("asked", "yes");
      }
      OUTLAST_RETURN_IF_ERROR(generation.Get("asked", kPatience).status());
      EXPECT_EQ(ask().code(), absl::StatusCode::kResourceExhausted);
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(Run, SectionsShowInTheBlackBox) {
  LocalWorld world(1);
  world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation&) -> absl::Status {
      auto eval = run.Section("eval", {.phase = Phase::kEval, .limit = absl::Minutes(20)});
      eval.Progress(17);
      const auto view = SegmentView::Open(run.black_box().fd());
      const ProgressSnapshot seen = ReadProgress(*view, static_cast<uint64_t>(MonotonicNanos()));
      EXPECT_EQ(seen.phase, Phase::kEval);
      EXPECT_EQ(seen.generation, 1u);
      EXPECT_EQ(seen.sections.size(), 1u);
      if (seen.sections.empty()) return absl::OkStatus();
      EXPECT_EQ(seen.sections[0].name, "eval");
      EXPECT_EQ(seen.sections[0].limit_ns, 1'200'000'000'000u);
      EXPECT_EQ(seen.sections[0].progress, 17u);
      return absl::OkStatus();
    });
  });
}

}  // namespace
}  // namespace outlast
