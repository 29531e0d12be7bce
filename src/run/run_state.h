// What a Run and its Generations share: the link, the black box, and where this rank stands between
// two generations.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/id.h"
#include "outlast/base/mutex.h"
#include "outlast/blackbox/progress.h"
#include "outlast/blackbox/segment.h"
#include "outlast/run/environment.h"
#include "outlast/run/run.h"
#include "run/local_keeper.h"
#include "run/socket_link.h"

namespace outlast {

// A membership that the keeper told this rank to enter.
struct Membership {
  uint64_t generation = 0;
  int rank = 0;
  int world = 1;
  std::vector<int> nodes = {};  // by rank; empty: not known
};

// Safe for concurrent use, but for what says otherwise.
class RunState {
 public:
  static absl::StatusOr<std::shared_ptr<RunState>> Join(const RunOptions& options);
  ~RunState();

  const WorkerEnvironment& environment() const { return environment_; }
  bool has_agent() const { return has_agent_; }
  bool has_keeper() const { return socket_link_ != nullptr; }
  const Id128& run_id() const { return run_id_; }
  const std::string& run_dir() const { return run_dir_; }
  int rank() const { return rank_.load(std::memory_order_relaxed); }
  int world() const { return world_.load(std::memory_order_relaxed); }
  Segment& box() { return box_; }
  ProgressWriter& progress() { return progress_; }
  Link& link() { return *link_; }
  LocalKeeper* local_keeper() { return local_keeper_.get(); }

  // The trainer's thread: interns `name` once.
  uint16_t SectionName(std::string_view name);

  // --- Generations. The trainer's thread.
  // Tells the keeper that this rank waits, and waits. kUnavailable: the keeper is gone.
  absl::StatusOr<Membership> WaitForMembership(StagedOutcome outcome, std::string_view message);
  // Where nobody forms generations: the only one.
  Membership OnlyMembership();
  void Leave() { running_.store(0, std::memory_order_release); }
  // Has `work` done with each message of `kind` that comes while the trainer's thread waits for a
  // generation, on that thread; at other times such messages are dropped. Null: no more. The
  // trainer's thread.
  void WhileStaged(MessageKind kind, std::function<void(const Message&)> work);
  void NotifyFinished();
  // ForEachGeneration returned.
  void NotifyLeft() {
    if (local_keeper_ != nullptr) local_keeper_->OnTrainerLeft();
  }
  uint64_t running() const { return running_.load(std::memory_order_acquire); }

  // Two loads where all is well.
  absl::Status Check(uint64_t generation) const {
    if (generation > ended_.load(std::memory_order_acquire) &&
        generation > LoadWord(box_.header().abort_generation)) {
      return absl::OkStatus();
    }
    return WhyEnded(generation);
  }
  // Whether it was aborted, rather than left by an agreed stop.
  bool WasAborted(uint64_t generation) const;
  void AddAbortCallback(uint64_t generation, std::function<void()> callback);
  // One of ours, which cannot block: it runs on the thread that hears of the abort, perhaps after
  // EndCallbacks.
  void AddQuickAbortCallback(uint64_t generation, std::function<void()> callback);
  // Drops the callbacks that did not run, and joins the threads of those that did.
  void EndCallbacks();

  // --- Stopping.
  bool stop_requested() const { return stop_requested_.load(std::memory_order_relaxed); }
  bool stopped() const;
  absl::StatusOr<Run::StepVerdict> CompleteStep(int64_t step);
  void MarkStopped(int64_t step);

  // Ends this rank as a kill of its process would: it hears nothing more and is heard no more. For
  // LocalWorld.
  void Kill();

 private:
  RunState(WorkerEnvironment environment, Segment box);
  static absl::StatusOr<std::shared_ptr<RunState>> Make(WorkerEnvironment environment);
  absl::Status JoinKeeper(absl::Duration timeout);
  void ExplainMissingAgent() const;

  void Read();
  bool ReadOne();
  void WaitForBeat();
  void Handle(Message message);
  void OnGeneration(const Message& message);
  void OnAbort(const Message& message);
  void OnAdopt(const Message& message);
  // The generation is over. The quick callbacks, which the caller calls without the lock.
  [[nodiscard]] std::vector<std::function<void()>> EndGeneration(uint64_t generation,
                                                                 const std::string& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False: the keeper's queue is full; to be tried again.
  bool TellWhereIStand() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerAdoption();
  void OnStop(const Message& message);
  void OnGo(const Message& message);
  bool TakeForStaged(Message& message);
  absl::StatusOr<Membership> WorkUntilOffered();
  bool is_offered() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnKeeperGone();
  // The quick ones, which the caller calls without the lock.
  [[nodiscard]] std::vector<std::function<void()>> StartCallbacks()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunOnThread(std::function<void()> callback) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WhyEnded(uint64_t generation) const;
  void AnswerStop(int64_t stop, bool on_time, int64_t step);
  absl::StatusOr<Run::StepVerdict> WaitForGo(int64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const WorkerEnvironment environment_;
  const bool has_agent_;
  Id128 run_id_;
  std::string run_dir_;
  std::atomic<int> rank_;
  std::atomic<int> world_;
  Segment box_;
  ProgressWriter progress_;
  std::map<std::string, uint16_t, std::less<>> section_names_;
  std::unique_ptr<LocalKeeper> local_keeper_;
  std::unique_ptr<Link> link_;
  SocketLink* socket_link_ = nullptr;  // link_, when there is a keeper

  std::atomic<uint64_t> running_{0};  // the generation whose body runs
  std::atomic<uint64_t> ended_{0};    // this generation and older ones are over for this rank
  std::atomic<bool> stop_requested_{false};
  bool is_joined_ = false;  // the reader's

  mutable Mutex mutex_;
  CondVar changed_;
  std::map<MessageKind, std::function<void(const Message&)>> staged_work_ ABSL_GUARDED_BY(mutex_);
  std::deque<Message> for_staged_ ABSL_GUARDED_BY(mutex_);  // came while it waits
  bool is_waiting_ ABSL_GUARDED_BY(mutex_) = false;  // the trainer's thread, for a generation
  Membership offered_ ABSL_GUARDED_BY(mutex_);
  uint64_t entered_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t aborted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string abort_reason_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> callbacks_
      ABSL_GUARDED_BY(mutex_);  // of the generation that runs
  std::vector<std::thread> callback_threads_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> quick_callbacks_ ABSL_GUARDED_BY(mutex_);
  // A stop: the step that was asked for and that we promised to wait at; one that our first step
  // answers; whether it may be saved; and how far we are.
  std::optional<int64_t> stop_step_ ABSL_GUARDED_BY(mutex_);
  std::optional<int64_t> unanswered_stop_ ABSL_GUARDED_BY(mutex_);
  bool go_ ABSL_GUARDED_BY(mutex_) = false;
  static constexpr int64_t kNoStep = -1;
  int64_t completed_ ABSL_GUARDED_BY(mutex_) = kNoStep;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool killed_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<uint64_t> adoption_ ABSL_GUARDED_BY(mutex_);  // the nonce of one to be answered
  bool quitting_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status keeper_gone_ ABSL_GUARDED_BY(mutex_);
  std::thread reader_;
};

// The state behind a Run.
class RunAccess {
 public:
  static const std::shared_ptr<RunState>& State(Run& run) { return run.state_; }
};

}  // namespace outlast
