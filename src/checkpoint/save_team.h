// One save by the agents of several nodes: the *lead*, the agent of rank 0, commits, and every
// agent, the lead's own too, writes what its ranks have sealed. The nodes share the root's folder.
//
//   lead ── Announce(order) ──> all          each node: pin, write shards and receipts
//   node ── RankWritten | Progress | Failed ──> lead        (commit.h decides)
//   lead: hooks, MANIFEST.json; then ── Outcome ──> all     each node: unpin
//
// Messages travel over Peers (kPeerSaves), begin with version, kind, generation and checkpoint, and
// may be lost when a connection breaks: whoever is up again is told anew, and answers anew.
//
// Not here: who is lead, which step all have sealed, and what is restored from; and a remote root
// alone, without a shared folder.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/serial_thread.h"
#include "checkpoint/commit.h"
#include "checkpoint/persist.h"
#include "checkpoint/root.h"

namespace outlast {

// --- Messages

struct SaveAnnounced {
  SaveOrder order;
};
struct SaveRankWritten {
  SaveKey save;
  WrittenRank written;
  uint64_t file_bytes = 0;
};
struct SaveProgressed {
  SaveKey save;
  uint64_t bytes = 0;  // written so far
};
struct SavePartFailed {
  SaveKey save;
  int32_t rank = -1;
  absl::Status why;
};
struct SaveOutcomeTold {
  SaveKey save;
  absl::Status outcome;
};
using SaveTeamMessage =
    std::variant<SaveAnnounced, SaveRankWritten, SaveProgressed, SavePartFailed, SaveOutcomeTold>;

std::string Encode(const SaveTeamMessage& message);
// kInvalidArgument: cut or malformed. kUnimplemented: another version, named.
absl::StatusOr<SaveTeamMessage> DecodeSaveTeamMessage(std::string_view bytes);

// --- A node's part

struct LocalRank {
  uint32_t rank = 0;
  PersistRank from;
};

struct SaveMemberOptions {
  std::string root;  // path of the folder that all see
  std::function<void(const SaveTeamMessage&)> send_to_lead;
  // The plan of this node's buffers, as 64 hex digits.
  std::function<std::string()> plan;
  // This node's ranks' snapshots of the order's step, pinned; or why not.
  std::function<absl::StatusOr<std::vector<LocalRank>>(const SaveOrder&)> pin;
  // It is over here: unpin what `pin` gave (nothing, if that failed). Nobody reads it any more.
  std::function<void(const SaveOrder&, const absl::Status& outcome)> over;
  RateLimiter* limiter = nullptr;
};

// Belongs to its loop's thread; writes on one of its own.
class SaveMember {
 public:
  SaveMember(EventLoop& loop, SaveMemberOptions options);
  // Waits for the rank that is being written.
  ~SaveMember();

  void OnMessage(const SaveTeamMessage& message);
  // Generation `generation` and older are unwound: once this returns, no receipt of theirs is
  // begun, and none is under way unless the disk hangs (1 s).
  void OnAbort(uint64_t generation, const std::string& reason);

 private:
  struct Part {
    SaveOrder order;
    std::vector<LocalRank> ranks;
    std::vector<SaveTeamMessage> said;  // told again to a lead that asks again
    bool is_writing = false;
    std::optional<absl::Status> outcome;
    std::atomic<uint64_t> bytes{0};
    uint64_t told_bytes = 0;
  };
  void Begin(const SaveOrder& order);
  void Say(Part& part, SaveTeamMessage message);
  void Write(const std::shared_ptr<Part>& part);
  void OnWritten(const std::shared_ptr<Part>& part);
  void End(const std::shared_ptr<Part>& part, const absl::Status& outcome);
  void TellProgressLater();

  EventLoop& loop_;
  const SaveMemberOptions options_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::shared_ptr<WriteFence> fence_ = std::make_shared<WriteFence>();
  std::shared_ptr<Part> part_;
  std::optional<SaveOrder> next_;  // begins when `part_`, which is over, is written no more
  std::optional<EventLoop::TimerId> progress_timer_;
  std::unique_ptr<SerialThread> writer_;
};

// --- The lead

struct TeamSaveRequest {
  uint64_t generation = 0;  // of the agents
  std::vector<CommitPart> parts;
  Id128 run_id;
  int64_t step = 0;
  uint64_t snapshot_generation = 0;
  uint32_t world = 0;
  std::string plan;
  std::optional<std::string> parent;
  std::string committer;
  std::vector<std::string> elsewhere;
  Hooks hooks;
  CommitLimits limits;
};

// Belongs to its loop's thread. `root` has the claim, with fences_own_run, and outlives it; calls
// on it are made on `disk`, which blocks.
class SaveLead {
 public:
  using Send = std::function<void(const std::string& node, const SaveTeamMessage& message)>;
  using Done = std::function<void(const absl::StatusOr<PersistResult>& result)>;
  SaveLead(EventLoop& loop, Root& root, SerialThread& disk, Send send);
  ~SaveLead();

  // One at a time: kFailedPrecondition while another is under way. `done` comes once, or a second
  // time with OK if a manifest that was given up is linked after all.
  absl::Status Start(TeamSaveRequest request, Done done);
  bool is_saving() const { return save_ != nullptr && !save_->machine->is_over(); }
  CommitPhase phase() const { return save_ ? save_->machine->phase() : CommitPhase::kAborted; }

  void OnMessage(const std::string& node, const SaveTeamMessage& message);
  void OnUp(const std::string& node);
  void OnLost(const std::string& node, const std::string& why);
  void OnAbort(uint64_t generation, const std::string& reason);

 private:
  struct Save {
    TeamSaveRequest request;
    Done done;
    std::optional<Commit> machine;
    SaveOrder order;
    std::vector<HookResult> hooks;
    std::optional<SaveOutcomeTold> outcome;
    PersistResult result;
    int64_t started_ns = 0;
  };
  using SavePtr = std::shared_ptr<Save>;
  void Step(const SavePtr& save, const CommitEvent& event);
  void Do(const SavePtr& save, const std::vector<CommitAction>& actions);
  void MakeFolder(const SavePtr& save);
  void AskHooks(const SavePtr& save);
  void Link(const SavePtr& save);
  void Tell(const SavePtr& save, const TellOutcome& told);
  void Arm(const SavePtr& save);
  template <typename Work, typename Then>
  void OnDisk(const SavePtr& save, Work work, Then then);

  EventLoop& loop_;
  Root& root_;
  SerialThread& disk_;
  const Send send_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  SavePtr save_;
  std::optional<EventLoop::TimerId> timer_;
};

}  // namespace outlast
