// Threads that play the processes of a job's ranks.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/event_loop.h"
#include "outlast/base/mutex.h"
#include "outlast/elastic/fault.h"
#include "outlast/run/environment.h"
#include "outlast/run/run.h"

namespace outlast {
class RunState;
}

namespace outlast::testing {

// A rank "dies" when its body returns an error (exit code 1), or by Kill. One that does not return
// within 100 ms of a kill counts as dead nevertheless; its thread is joined at the end.
class RankThreads {
 public:
  using Body = std::function<absl::Status(outlast::Run&)>;
  using OnEnd = std::function<void(int slot, uint64_t incarnation, const ProcessEnd& end)>;

  // `on_end` is called on `loop`, which must outlive this.
  RankThreads(EventLoop& loop, OnEnd on_end) : loop_(loop), on_end_(std::move(on_end)) {}
  ~RankThreads() { Join(); }

  // Any thread. `body` must outlive the rank's thread; the environment's descriptors are the
  // thread's to close.
  void Spawn(int slot, const WorkerEnvironment& environment, const Body& body);
  // The slot's newest process. On the loop's thread.
  void Kill(int slot, const ProcessEnd& end);
  // The same, unless it is another incarnation by now.
  void Kill(int slot, uint64_t incarnation, const ProcessEnd& end);
  void KillAll();
  // All threads that ever were; not on the loop's thread.
  void Join();

 private:
  struct Rank {
    int slot = 0;
    uint64_t incarnation = 0;
    std::thread thread;
    Mutex mutex;
    std::shared_ptr<RunState> state ABSL_GUARDED_BY(mutex);  // while its Run lives
    bool killed ABSL_GUARDED_BY(mutex) = false;
    bool reported ABSL_GUARDED_BY(mutex) = false;
    ProcessEnd end ABSL_GUARDED_BY(mutex);
  };

  void Main(Rank& rank, const WorkerEnvironment& environment, const Body& body);
  static absl::Status RunBody(Rank& rank, const WorkerEnvironment& environment, const Body& body);
  void End(Rank& rank, const ProcessEnd& end);
  void Report(Rank& rank);
  Rank* Present(int slot);
  std::vector<Rank*> All();

  EventLoop& loop_;
  const OnEnd on_end_;
  Mutex mutex_;
  std::list<Rank> ranks_ ABSL_GUARDED_BY(mutex_);  // oldest first; grows only
};

}  // namespace outlast::testing
