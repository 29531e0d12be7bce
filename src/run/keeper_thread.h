// A keeper with a loop and a thread of its own, for a process that has no agent.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "run/keeper.h"

namespace outlast {

class KeeperThread {
 public:
  // The loop runs; the job does not yet. `host` must outlive this; the keeper calls it on the
  // loop's thread.
  static absl::StatusOr<std::unique_ptr<KeeperThread>> Make(WorkerHost& host,
                                                            KeeperOptions options);
  // The job is `machine`'s.
  static absl::StatusOr<std::unique_ptr<KeeperThread>> Make(WorkerHost& host, KeeperOptions options,
                                                            std::unique_ptr<JobMachine> machine);
  // Starts the job: returns when the first workers were spawned.
  absl::Status Start();
  ~KeeperThread() { Stop(); }
  // Stops the loop and joins the thread. May be called twice.
  void Stop();

  // Use it on the loop's thread: loop().Post.
  Keeper& keeper() { return *keeper_; }
  EventLoop& loop() { return *loop_; }
  // Runs `work` on the loop's thread and waits for it. Not from that thread.
  void RunOnLoop(const std::function<void()>& work);

 private:
  KeeperThread() = default;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Keeper> keeper_;
  std::thread thread_;
};

}  // namespace outlast
