// The keeper of a world of one without an agent: a thread of the trainer's own process.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/base/id.h"
#include "run/keeper_thread.h"
#include "run/signals.h"

namespace outlast {

class LocalKeeper final : public WorkerHost {
 public:
  static absl::StatusOr<std::unique_ptr<LocalKeeper>> Start();
  ~LocalKeeper() override;

  Keeper& keeper() { return thread_->keeper(); }
  // The worker's end of the socket, and a descriptor of its black box: once.
  UniqueFd TakeSocket() { return std::move(socket_); }
  UniqueFd TakeBlackBox() { return std::move(black_box_); }

  // Makes an extension on the loop's thread and keeps it attached until the end of this.
  void Adopt(const std::function<std::unique_ptr<KeeperExtension>(Keeper&)>& make);

  // The trainer is out of ForEachGeneration for good: from now on nothing ends its process but a
  // second SIGINT.
  void OnTrainerLeft() { trainer_left_.store(true); }

  void Spawn(SpawnRequest request) override;
  void Kill(const KillWorker& kill) override;
  void Forward(const ForwardSignal&) override {}
  void CaptureStacks(const outlast::CaptureStacks& request, std::function<void()> done) override;
  void OnFault(const RecordFault& record) override;
  void OnCommit(const CommitGeneration&) override {}
  void OnEnter(int, uint64_t) override {}
  void OnFinish(const FinishJob& finish) override;

 private:
  void OnSignals();
  void EndWorker(int slot, uint64_t incarnation, const ProcessEnd& end);

  std::optional<StopSignals> signals_;
  int stop_signal_ = 0;  // the loop's thread
  bool spawned_ = false;
  std::atomic<bool> trainer_left_{false};
  UniqueFd socket_;
  UniqueFd black_box_;
  std::vector<std::unique_ptr<KeeperExtension>> extensions_;  // the loop's thread
  std::unique_ptr<KeeperThread> thread_;
};

}  // namespace outlast
