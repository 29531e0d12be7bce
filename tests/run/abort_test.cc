// Ranks as threads, each with a communicator that blocks like a foreign one: it knows nothing of
// Outlast, and an abort is all that ends a wait in it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>

#include "outlast/base/mutex.h"
#include "outlast/base/status.h"
#include "outlast/run/generation.h"
#include "outlast/run/run.h"
#include "outlast/testing/local_world.h"

namespace outlast {
namespace {

using testing::LocalWorld;
using testing::LocalWorldOptions;
using testing::LocalWorldResult;

constexpr absl::Duration kPatience = absl::Seconds(20);

class FakeCommunicator {
 public:
  // Blocks until somebody aborts it.
  void Collective() {
    MutexLock lock(mutex_);
    while (!aborted_) changed_.Wait(mutex_);
  }
  void Abort() {
    MutexLock lock(mutex_);
    ++aborts_;
    aborted_ = true;
    changed_.NotifyAll();
  }
  int aborts() {
    MutexLock lock(mutex_);
    return aborts_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  int aborts_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The end of a generation may come before the answer to what led to it.
void Say(Generation& generation, const std::string& key) {
  const absl::Status put = generation.Put(key, "");
  EXPECT_TRUE(put.ok() || absl::IsAborted(put)) << put;
}
absl::Status Hear(Generation& generation, std::initializer_list<const char*> keys) {
  for (const char* key : keys) OUTLAST_RETURN_IF_ERROR(generation.Get(key, kPatience).status());
  return absl::OkStatus();
}
std::string Name(const Generation& generation) { return std::to_string(generation.rank()); }

TEST(Abort, OfOneThatNeedsAllPeersReachesThemTogether) {
  // As of a library whose abort returns when all that live have called it.
  FakeCommunicator communicators[2];
  Mutex mutex;
  CondVar changed;
  int inside = 0;
  LocalWorld world(3);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() > 1) return absl::OkStatus();
      if (generation.rank() == 2) {
        OUTLAST_RETURN_IF_ERROR(Hear(generation, {"0", "1"}));
        return absl::InternalError("a crash");
      }
      FakeCommunicator& own = communicators[generation.rank()];
      generation.OnAbort([&] {
        MutexLock lock(mutex);
        ++inside;
        changed.NotifyAll();
        while (inside < 2) changed.Wait(mutex);
        own.Abort();
      });
      Say(generation, Name(generation));
      own.Collective();
      return generation.Check();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(result.spawns, 4) << "both survivors kept their thread";
  EXPECT_EQ(inside, 2);
}

TEST(Abort, ThatThrowsHarmsNobody) {
  FakeCommunicator communicator;
  std::atomic<int> bodies_of_rank_0{0};
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.rank() == 0) ++bodies_of_rank_0;
      if (generation.number() > 1) return absl::OkStatus();
      if (generation.rank() == 1) {
        OUTLAST_RETURN_IF_ERROR(Hear(generation, {"0"}));
        return absl::InternalError("a crash");
      }
      generation.OnAbort([] { throw std::runtime_error("the library is in no state to abort"); });
      generation.OnAbort([] { throw 7; });
      generation.OnAbort([&] { communicator.Abort(); });
      Say(generation, "0");
      communicator.Collective();
      return generation.Check();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(result.spawns, 3);
  EXPECT_EQ(bodies_of_rank_0, 2);
  EXPECT_EQ(result.faults.size(), 1u);
}

TEST(Abort, IsRunOnceWhenTwoPeersDie) {
  FakeCommunicator communicator;
  LocalWorld world(3);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() > 1) return absl::OkStatus();
      if (generation.rank() != 0) {
        Say(generation, Name(generation));
        OUTLAST_RETURN_IF_ERROR(Hear(generation, {"0", "1", "2"}));
        return absl::InternalError("a crash");
      }
      generation.OnAbort([&] { communicator.Abort(); });
      Say(generation, "0");
      communicator.Collective();
      return generation.Check();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(communicator.aborts(), 1);
}

TEST(Abort, ThatTheTrainerAsksForItselfIsNoFault) {
  FakeCommunicator first, second;
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() > 1) return absl::OkStatus();
      if (generation.rank() == 1) {
        OUTLAST_RETURN_IF_ERROR(Hear(generation, {"went on"}));
        return absl::InternalError("a crash");
      }
      generation.OnAbort([&] { first.Abort(); });
      first.Abort();  // to make another one, of other ranks say
      first.Collective();
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      generation.OnAbort([&] { second.Abort(); });
      Say(generation, "went on");
      second.Collective();
      return generation.Check();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  ASSERT_EQ(result.faults.size(), 1u);
  EXPECT_EQ(result.faults[0].rank, 1);
  EXPECT_EQ(first.aborts(), 2) << "the trainer's, and the one at the end";
}

TEST(Abort, OfOneThatIsStuckHoldsUpNoOther) {
  LocalWorldOptions options;
  options.job.soft_abort = absl::Milliseconds(50);
  options.job.abort_term = absl::Milliseconds(10);
  FakeCommunicator communicator;
  std::promise<void> release;
  const auto released = release.get_future().share();
  std::atomic<bool> left_the_other{false};
  LocalWorld world(2, options);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.number() > 1) {
        Say(generation, Name(generation));
        OUTLAST_RETURN_IF_ERROR(Hear(generation, {"0", "1"}));
        if (generation.rank() == 0) release.set_value();  // the test's end, not the abort's
        return absl::OkStatus();
      }
      if (generation.rank() == 1) {
        OUTLAST_RETURN_IF_ERROR(Hear(generation, {"0"}));
        return absl::InternalError("a crash");
      }
      generation.OnAbort([released] { released.wait(); });
      generation.OnAbort([&] { communicator.Abort(); });
      Say(generation, "0");
      communicator.Collective();
      left_the_other = true;
      released.wait();  // the stuck one holds the trainer
      return generation.Check();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_TRUE(left_the_other);
  EXPECT_EQ(result.spawns, 4) << "rank 0 was replaced within the grace";
}

}  // namespace
}  // namespace outlast
