// The checkpointer of one rank, in three files: what it is made of and its buffers
// (checkpointer.cc), its saves (checkpointer_save.cc) and its restores (checkpointer_restore.cc).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/channel.h"
#include "checkpoint/reader.h"
#include "checkpoint/save_wire.h"
#include "checkpoint/seal_table.h"
#include "checkpoint/snapshotter.h"
#include "outlast/base/memory.h"
#include "outlast/base/mutex.h"
#include "outlast/checkpoint/checkpointer.h"
#include "outlast/run/run.h"
#include "run/wire.h"

namespace outlast {

// How long a remote root may take to be opened, and to be looked through for a checkpoint.
inline constexpr absl::Duration kOpenRemoteTimeout = absl::Minutes(5);

// Of all regions.
uint64_t StateBytes(const StateView& state);

// What is counted, apart from the checkpointer: the link's reader may still call in while that
// goes.
class SaveTally {
 public:
  void OnSaveEvent(const Message& message, int rank) {
    PayloadReader reader(message.payload);
    const auto step = reader.Int<int64_t>();
    const auto outcome = reader.Int<SaveOutcome>();
    const std::string error(reader.Text());
    MutexLock lock(mutex_);
    switch (outcome) {
      case SaveOutcome::kDurable:
        stats_.durable_step = std::max(stats_.durable_step, step);
        return;
      case SaveOutcome::kUploaded:
        stats_.remote_step = std::max(stats_.remote_step, step);
        return;
      case SaveOutcome::kUploadFailed:
        ++stats_.failed_uploads;
        return;
      case SaveOutcome::kFailed:
        break;
    }
    ++stats_.failed_saves;
    // Once a run, by rank 0: the agent's events hold them all.
    if (!std::exchange(reported_failure_, true) && rank == 0) {
      PrintToStderr("outlast: a checkpoint could not be saved, training goes on: {}\n", error);
    }
  }
  void Change(const std::function<void(CheckpointStats&)>& change) {
    MutexLock lock(mutex_);
    change(stats_);
  }
  CheckpointStats stats() const {
    MutexLock lock(mutex_);
    return stats_;
  }

 private:
  mutable Mutex mutex_;
  CheckpointStats stats_ ABSL_GUARDED_BY(mutex_);
  bool reported_failure_ ABSL_GUARDED_BY(mutex_) = false;
};

class Checkpointer::Impl {
 public:
  Impl(Run& run, CheckpointerOptions options) : run_(run), options_(std::move(options)) {}
  ~Impl() {
    if (options_.restore_ahead) run_.WhileStaged(MessageKind::kAhead, nullptr);
  }

  absl::Status Open();
  absl::StatusOr<int64_t> Restore(const StateView& state, const RestoreOptions& options);
  absl::Status BeforeUpdate();
  absl::Status BeforeUpdate(std::string_view region);
  absl::Status SaveIfDue(int64_t step, const StateView& state);
  absl::Status Release();
  absl::Status Release(std::string_view region);
  absl::Status Finish(int64_t step, const StateView& state);
  CheckpointStats stats() const;
  const Extras& extras() const { return extras_; }
  const std::vector<Extras>& saved_extras() const { return saved_extras_; }
  const MatchReport& report() const { return report_; }

 private:
  // The snapshot that the trainer's stable regions still hold, if any: nothing was updated since.
  struct Live {
    uint64_t generation = 0;
    int64_t step = 0;
    bool operator==(const Live&) const = default;
  };

  struct JobPlan {
    std::vector<RankTable> ranks;
    Plan plan;
  };
  absl::StatusOr<JobPlan> ReadJobPlan() const;
  void LeaveOldBuffers();
  absl::Status EnsureBuffers(const StateView& state);
  absl::Status MakeSnapshotter(const Message& answer, const StateView& state);
  absl::Status RestoreFrom(uint32_t attempt, const Message& chosen, const RestoreChoice& choice,
                           const StateView& state, const RestoreOptions& options);
  absl::Status RestoreFromReplica(const Message& chosen, const RestoreChoice& choice,
                                  const StateView& state) const;
  absl::Status RestoreFromFiles(uint32_t attempt, const Message& chosen,
                                const RestoreChoice& choice, const StateView& state,
                                const RestoreOptions& options);
  absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenChosen(uint32_t attempt,
                                                               const Message& chosen,
                                                               const RestoreChoice& choice,
                                                               const StateView& state);
  absl::Duration ReadLimit(RestoreSource source, const StateView& state) const;
  absl::StatusOr<bool> ReadTogether(uint32_t attempt, const RestoreChoice& choice,
                                    const CheckpointReader& reader, const StateView& state,
                                    Widening widening);
  absl::StatusOr<Message> Gather(uint32_t attempt, Share share, absl::Duration timeout);
  void RestoreAhead(const Message& message);
  absl::Status CheckBeforeUpdate() const;
  absl::StatusOr<std::optional<uint32_t>> NumberOf(std::string_view region) const;
  void FinishSnapshot();
  void FinishRegion(std::optional<uint32_t> number);
  // kMust: waits for a free buffer, and copies at once.
  enum class Urgency : uint8_t { kMaySkip, kMust };
  absl::Status Snapshot(int64_t step, const StateView& state, Snapshotter::Want want,
                        Urgency urgency);
  bool HasTableOf(const StateView& state) const;
  bool HasMemoryOf(const StateView& state) const;
  void KeepRegions(const StateView& state);
  bool IsSnapshotDue(int64_t step) const;
  bool IsDiskDue(int64_t step);
  bool IsWanted(int64_t step);
  void TellSkipped(int64_t step, uint64_t generation);
  void ConsiderCadence(int64_t step);
  void DistrustUpdates(int64_t step);
  void AddStall(int64_t started_ns);

  Run& run_;
  const CheckpointerOptions options_;
  Id128 job_;
  std::unique_ptr<SealTable> table_;
  int made_rank_ = 0, made_world_ = 0;  // that the buffers and the table are of
  Mapping tables_;                      // of all ranks' tensors, as the keeper holds them
  std::vector<TensorRow> own_rows_;     // what the buffers were made for, by region
  std::vector<Shape> own_strides_;
  std::vector<TensorRow> job_rows_;  // of all ranks, aliases too; without boxes
  std::unique_ptr<Snapshotter> snapshotter_;
  std::optional<Snapshotter::Borrowed> share_;  // of a restore from files, until all have it
  Extras extras_;
  std::vector<Extras> saved_extras_;
  MatchReport report_;
  int64_t state_step_ = 0;  // of the trainer's state, as it was restored or saved last
  absl::Status CheckStep(int64_t step, std::string_view call) const;
  std::optional<Live> live_;
  std::optional<Live> ahead_;   // what was brought back before the body asked
  StateView state_;             // restore_ahead: the regions as they were given last
  std::optional<Live> disk_;    // the newest snapshot that the disk was to get
  std::optional<Live> missed_;  // the newest step that the keeper wanted too late
  bool updates_are_announced_ =
      false;  // BeforeUpdate was called since the last save: copies may be lazy
  // A region was seen to change without that: no copy is lazy any more.
  std::atomic<bool> distrusts_updates_{false};
  uint64_t updates_ = 0;
  int64_t window_started_ns_ = 0, window_stall_ns_ = 0, window_steps_ = 0;
  // Of several nodes: how far apart snapshots should be, as rank 0 finds; 0: it has not looked yet.
  std::atomic<int64_t> wished_every_{0};

  std::shared_ptr<SaveTally> tally_ = std::make_shared<SaveTally>();
};

}  // namespace outlast
