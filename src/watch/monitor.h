// The watch inside the agent: an extension of the keeper that polls the black boxes, judges, writes
// the evidence down, has stacks captured, and then, in act mode, tells the job machine.
//
//   kWatch ──> poll ──> finding ──> RUN_DIR/boxes ──> stacks ──> VerdictGiven
//                ^───── recovered, next generation ────┘
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "run/keeper.h"
#include "watch/look_reader.h"
#include "watch/monitor_state.h"

namespace outlast {

// For consoles, reports and ledgers. Called on the loop's thread; may be empty.
struct MonitorListener {
  // `folder`: the evidence; empty when there is no RUN_DIR, or it could not be written.
  std::function<void(const Verdict& verdict, const std::string& folder)> on_finding;
  std::function<void(const Verdict& verdict)> on_recovered;
};

// Attach it to `keeper`, and detach it before it goes if the keeper goes on. Both and `host` are
// borrowed; the destructor touches neither. Belongs to the keeper's loop.
class Monitor final : public KeeperExtension {
 public:
  Monitor(Keeper& keeper, WorkerHost& host, MonitorListener listener = {});

  bool OnMessage(int slot, Message& message) override;
  void OnAbort(uint64_t generation) override;
  void OnQuiet() override {}
  void OnCommit(const CommitGeneration& commit) override;
  void OnWorkerEnded(int slot) override;
  bool is_saving() const override { return false; }
  void OnPersistCommon(const std::string&) override {}

  bool is_watching() const { return state_ != nullptr; }
  // A look at a slot for people, as the rank that it holds; its pace is left out while nothing is
  // watched.
  RankLook Peek(int slot);

 private:
  void Begin(const WatchdogOptions& options);
  void ArmFor(const CommitGeneration& commit);
  void Schedule();
  void PollNow();
  LookReader* ReaderOf(int slot);
  RankLook LookAt(int rank, int slot, int64_t now_ns);
  void OnFinding(const Verdict& verdict, absl::Duration took);
  // Of a rank that this node holds.
  int SlotOf(int rank) const;
  std::vector<int> SlotsForStacks(const Verdict& verdict) const;
  bool StillHolds(const Verdict& verdict, const std::vector<RankLook>& then);
  void Act(const Verdict& verdict);

  Keeper& keeper_;
  WorkerHost& host_;
  MonitorListener listener_;
  WatchdogOptions options_;
  std::string encoded_options_;
  bool has_told_of_difference_ = false;
  std::unique_ptr<MonitorState> state_;             // null until somebody asked
  std::optional<CommitGeneration> commit_;          // the generation that stands
  std::vector<std::optional<LookReader>> readers_;  // by slot
  std::vector<char> ended_;                         // by slot: the process that was there is gone
  bool is_scheduled_ = false;
  absl::Duration due_;
  int findings_ = 0;
  bool is_capturing_ = false;  // our own tracer is attached: no polls
  FreezeReason frozen_ = FreezeReason::kNone;
  std::shared_ptr<const bool> alive_ =
      std::make_shared<bool>(true);  // timers and stacks may come after we are gone
};

}  // namespace outlast
