// The watch inside the agent: an extension of the keeper that polls the black boxes, judges, writes
// the evidence down, has stacks captured, and then, in act mode, tells the job machine.
//
//   kWatch ──> poll ──> finding ──> RUN_DIR/boxes ──> stacks ──> VerdictGiven
//                ^───── recovered, next generation ────┘
//
// Of several nodes each judges its own ranks. Where these may wait for others the agents put their
// looks together (joint_look.h), and each does about a finding what concerns its own ranks: the one
// that holds the first culprit ends the generation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "run/keeper.h"
#include "watch/joint_look.h"
#include "watch/look_reader.h"
#include "watch/look_wire.h"
#include "watch/monitor_state.h"
#include "watch/options.h"

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
  Monitor(Keeper& keeper, WorkerHost& host, MonitorListener listener = {},
          const JobDeadlines& deadlines = {});

  bool OnMessage(int slot, Message& message) override;
  // Goes on with what a former keeper's monitor kept. Before the keeper starts.
  absl::Status GoOn(Kept& kept);
  void OnAbort(uint64_t generation) override;
  void OnQuiet() override {}
  void OnCommit(const CommitGeneration& commit) override;
  void OnWorkerEnded(int slot) override;
  bool is_saving() const override { return false; }
  void OnPersistCommon(const std::string&) override {}
  bool OnWantSave(const WantSave&) override { return false; }

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
  // `then`: the looks at ranks here by which it was judged; of culprits without one, those of now.
  void OnFinding(const Verdict& verdict, absl::Duration took, std::vector<RankLook> then = {});
  // -1: this node does not hold it.
  int SlotOf(int rank) const;
  std::vector<int> SlotsForStacks(const Verdict& verdict) const;
  bool StillHolds(const Verdict& verdict, const std::vector<RankLook>& then);
  void Act(const Verdict& verdict);

  // Several nodes (monitor_nodes.cc).
  void ListenToPeers();
  bool is_lead() const;
  void ArmJoint();
  void TellStall();
  void StepJoint();
  void Hear(const std::string& node, const std::string& bytes);
  void Hear(const std::string& node, const StallTold& told);
  void Hear(const std::string& node, const LookAsked& asked);
  void Hear(const std::string& node, LooksTold told);
  void Hear(const std::string& node, const VerdictFound& found);
  void Tell(const std::string& node, const WatchMessage& message);
  std::optional<LooksTold> LooksHere(const LookAsked& asked);
  void FindJointly(const VerdictFound& found);

  Keeper& keeper_;
  WorkerHost& host_;
  MonitorListener listener_;
  const JobDeadlines deadlines_;
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
  JointLook joint_;                // the lead's
  std::optional<LooksTold> told_;  // the newest looks that this node told
  std::shared_ptr<const bool> alive_ =
      std::make_shared<bool>(true);  // timers and stacks may come after we are gone
};

}  // namespace outlast
