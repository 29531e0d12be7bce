#include "outlast/checkpoint/checkpointer.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "checkpoint/hooks.h"
#include "checkpoint/reader.h"
#include "checkpoint/remote_reads.h"
#include "checkpoint/save_service.h"
#include "checkpoint/save_wire.h"
#include "checkpoint/snapshotter.h"
#include "outlast/base/clock.h"
#include "outlast/base/memory.h"
#include "outlast/run/run.h"
#include "run/keeper.h"
#include "run/link.h"

namespace outlast {
namespace {

constexpr absl::Duration kOpenTimeout = absl::Seconds(60);
constexpr absl::Duration kOpenRemoteTimeout = absl::Minutes(5);
constexpr absl::Duration kBuffersTimeout = absl::Seconds(120);
constexpr absl::Duration kChooseTimeout = absl::Seconds(60);
constexpr absl::Duration kVoteTimeout = absl::Seconds(150);
constexpr absl::Duration kFreeBufferTimeout = absl::Seconds(60);
// Of several nodes: how long a snapshot that the disk wants waits for word of other nodes' ranks.
constexpr absl::Duration kWordTimeout = absl::Seconds(3);
constexpr double kLargestStallShare = 0.01;  // of a step: above it, memory snapshots are spaced
constexpr int64_t kCadenceWindow = 32;       // snapshots between two looks at the share

absl::Status CheckOptions(const CheckpointerOptions& options) {
  const auto refuse = [](std::string_view what, auto found, std::string_view wanted) {
    return Error(absl::StatusCode::kInvalidArgument, "checkpointer option {}: {}, {} wanted", what,
                 found, wanted);
  };
  if (options.uri.empty()) return refuse("uri", "''", "a path or file:///path");
  if (options.every.steps() < 0) return refuse("every", options.every.steps(), "at least 1 step");
  if (options.snapshot_every.steps() < 0)
    return refuse("snapshot_every", options.snapshot_every.steps(), "at least 1 step");
  if (options.tolerable_loss <= absl::ZeroDuration())
    return refuse("tolerable_loss", absl::FormatDuration(options.tolerable_loss),
                  "a positive time");
  if (options.keep_last < 1) return refuse("keep_last", options.keep_last, "at least 1");
  if (options.keep_every < 0)
    return refuse("keep_every", options.keep_every, "0 (none) or a number of steps");
  if (options.remote.every.steps() < 0)
    return refuse("remote.every", options.remote.every.steps(), "at least 1 step");
  if (options.remote.keep_last < 1)
    return refuse("remote.keep_last", options.remote.keep_last, "at least 1");
  if (options.remote.keep_every < 0)
    return refuse("remote.keep_every", options.remote.keep_every, "0 (none) or a number of steps");
  if (options.remote.stop_limit < absl::ZeroDuration() ||
      options.remote.stop_limit > absl::Hours(24)) {
    return refuse("remote.stop_limit", absl::FormatDuration(options.remote.stop_limit),
                  "0 to 24 hours");
  }
  if (!options.remote.uri.empty() && options.remote.uri == options.uri)
    return refuse("remote.uri", options.remote.uri, "another place than uri");
  if (options.buffers != 0 && options.buffers != 2 && options.buffers != 3)
    return refuse("buffers", options.buffers, "0 (auto), 2 or 3");
  if (options.extras_bytes < 0 || options.extras_bytes > static_cast<int64_t>(kMaxExtrasBytes))
    return refuse("extras_bytes", options.extras_bytes, "0 to 16 MiB");
  if (options.stall_limit <= absl::ZeroDuration())
    return refuse("stall_limit", absl::FormatDuration(options.stall_limit), "a positive time");
  return CheckHookOptions(options.hooks);
}

// The job's tensors and aliases, without boxes.
std::vector<TensorRow> RowsByName(const TensorTable& table, std::span<const RankTable> ranks) {
  std::map<std::string_view, const TensorRow*> rows;
  for (const TensorRow& row : table.rows) rows.emplace(row.name, &row);
  for (const RankTable& rank : ranks) {
    for (const auto& [name, of] : rank.aliases) rows.emplace(name, rows.at(of));
  }
  std::vector<TensorRow> named;
  named.reserve(rows.size());
  for (const auto& [name, row] : rows)
    named.push_back({std::string(name), row->dtype, row->global, {}});
  return named;
}

uint64_t StateBytes(const StateView& state) {
  uint64_t bytes = 0;
  for (const Region& region : state.regions) bytes += region.bytes.size();
  return bytes;
}

// The share of a restore that a rank reads, in its buffer.
std::vector<Region> RegionsOf(const Assignment& share, const Buffer& buffer) {
  std::vector<Region> regions;
  const auto add = [&](const PlannedItem& item, std::span<std::byte> part, uint64_t begin) {
    regions.push_back({item.box.name, item.box.dtype, item.box.global, item.box.offset,
                       item.box.extent, part.subspan(begin, item.box.end - item.box.begin)});
  };
  for (const PlannedItem& item : share.image)
    add(item, buffer.image(), share.header.size() + item.box.begin);
  for (const PlannedItem& item : share.replicated) add(item, buffer.replicated(), item.box.begin);
  return regions;
}

}  // namespace

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
  absl::Status SaveIfDue(int64_t step, const StateView& state);
  absl::Status Release();
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
  uint64_t updates_ = 0;
  int64_t window_started_ns_ = 0, window_stall_ns_ = 0, window_steps_ = 0;
  // Of several nodes: how far apart snapshots should be, as rank 0 finds; 0: it has not looked yet.
  std::atomic<int64_t> wished_every_{0};

  std::shared_ptr<SaveTally> tally_ = std::make_shared<SaveTally>();
};

absl::Status Checkpointer::Impl::Open() {
  OUTLAST_RETURN_IF_ERROR(CheckOptions(options_));
  // Without an agent the process's own keeper saves, and what memory holds dies with the process.
  const bool saves_itself = run_.AttachToLocalKeeper(
      [plugins = options_.plugins, hooks = options_.hooks.own](Keeper& keeper) {
        SaveServiceOptions options;
        options.plugins = plugins;
        options.own_hooks = hooks;
        return std::make_unique<SaveService>(keeper, std::move(options));
      });
  if (!saves_itself && !options_.hooks.own.empty()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "checkpointer option hooks.own: '{}' cannot run in the agent, another process; a "
                 "program (hooks.programs) wanted",
                 options_.hooks.own[0]->name());
  }
  run_.link().OnMessage(MessageKind::kSaveEvent,
                        [tally = tally_, rank = run_.rank()](const Message& message) {
                          tally->OnSaveEvent(message, rank);
                        });
  const std::string payload = PayloadWriter().Text(EncodeOptions(options_)).bytes();
  OUTLAST_ASSIGN_OR_RETURN(
      Message answer,
      run_.link().Call(MessageKind::kOpenRoot, 0, payload,
                       options_.remote.uri.empty() ? kOpenTimeout : kOpenRemoteTimeout));
  PayloadReader reader(answer.payload);
  for (std::byte& byte : job_.bytes) byte = reader.Int<std::byte>();
  if (!reader.ok()) return Error(absl::StatusCode::kInternal, "answer to an open: malformed");
  run_.black_box().SetJobId(job_);
  if (options_.restore_ahead) {
    run_.WhileStaged(MessageKind::kAhead,
                     [this](const Message& message) { RestoreAhead(message); });
  }
  return absl::OkStatus();
}

// Quick, since each save asks: no text is built.
bool Checkpointer::Impl::HasTableOf(const StateView& state) const {
  if (state.regions.size() != own_rows_.size()) return false;
  for (size_t i = 0; i < own_rows_.size(); ++i) {
    const Region& region = state.regions[i];
    const TensorRow& row = own_rows_[i];
    const Box& box = row.boxes.front().box;
    if (region.name != row.name || region.dtype != row.dtype || region.global != row.global ||
        region.extent != box.extent || OffsetOf(region) != box.offset ||
        region.strides != own_strides_[i]) {
      return false;
    }
  }
  return true;
}

// In a job of several nodes a generation may give this process another place, and with it another
// share to keep.
void Checkpointer::Impl::LeaveOldBuffers() {
  if (snapshotter_ == nullptr || (made_rank_ == run_.rank() && made_world_ == run_.world())) return;
  share_.reset();
  snapshotter_.reset();
  table_.reset();
  live_ = ahead_ = disk_ = std::nullopt;
}

absl::Status Checkpointer::Impl::EnsureBuffers(const StateView& state) {
  LeaveOldBuffers();
  if (snapshotter_ != nullptr) {
    if (HasTableOf(state)) return absl::OkStatus();
    return Error(absl::StatusCode::kInvalidArgument,
                 "state of rank {}: names, dtypes, shapes or strides differ from those that its "
                 "snapshot buffers were made for",
                 run_.rank());
  }
  OUTLAST_RETURN_IF_ERROR(state.Validate());
  OUTLAST_ASSIGN_OR_RETURN(const RankTable table,
                           TableOfRank(state, static_cast<uint32_t>(run_.rank())));
  const std::string bytes = EncodeTable(table);
  const size_t parts = std::max<size_t>(1, (bytes.size() + kTablePartBytes - 1) / kTablePartBytes);
  for (size_t part = 0; part < parts; ++part) {
    const std::string payload =
        PayloadWriter()
            .Int(static_cast<uint32_t>(part))
            .Int(static_cast<uint32_t>(parts))
            .Text(std::string_view(bytes).substr(part * kTablePartBytes, kTablePartBytes))
            .bytes();
    if (part + 1 < parts) {
      OUTLAST_RETURN_IF_ERROR(
          run_.link().Notify(MessageKind::kBuffers, run_.generation(), payload));
      continue;
    }
    OUTLAST_ASSIGN_OR_RETURN(
        const Message answer,
        run_.link().Call(MessageKind::kBuffers, run_.generation(), payload, kBuffersTimeout));
    OUTLAST_RETURN_IF_ERROR(MakeSnapshotter(answer, state));
  }
  own_rows_.clear();
  own_strides_.clear();
  for (const Region& region : state.regions) {
    own_rows_.push_back({std::string(region.name),
                         region.dtype,
                         region.global,
                         {{0, {OffsetOf(region), region.extent}}}});
    own_strides_.push_back(region.strides);
  }
  return absl::OkStatus();
}

// Made anew for whoever needs it: of a large job it is large.
absl::StatusOr<Checkpointer::Impl::JobPlan> Checkpointer::Impl::ReadJobPlan() const {
  JobPlan job;
  OUTLAST_ASSIGN_OR_RETURN(
      job.ranks, DecodeTables({reinterpret_cast<const char*>(tables_.data()), tables_.size()}));
  SettleAliases(job.ranks);
  OUTLAST_ASSIGN_OR_RETURN(TensorTable table, MergeTables(job.ranks));
  OUTLAST_ASSIGN_OR_RETURN(job.plan, MakePlan(std::move(table)));
  return job;
}

absl::Status Checkpointer::Impl::MakeSnapshotter(const Message& answer, const StateView& state) {
  PayloadReader reader(answer.payload);
  const auto tables_bytes = reader.Int<uint64_t>();
  const auto count = reader.Int<uint32_t>();
  if (!reader.ok() || answer.fds.size() != count + 2 || count == 0)
    return Error(absl::StatusCode::kInternal, "answer with buffers: malformed");
  OUTLAST_ASSIGN_OR_RETURN(Mapping rows,
                           Mapping::Shared(answer.fds[1].get(), SealTable::BytesFor(run_.world())));
  table_ = std::make_unique<SealTable>(std::move(rows), run_.world());
  made_rank_ = run_.rank();
  made_world_ = run_.world();
  OUTLAST_ASSIGN_OR_RETURN(tables_, Mapping::SharedReadOnly(answer.fds[0].get(), tables_bytes));
  OUTLAST_ASSIGN_OR_RETURN(const JobPlan job, ReadJobPlan());
  job_rows_ = RowsByName(job.plan.table, job.ranks);
  OUTLAST_ASSIGN_OR_RETURN(Assignment assignment,
                           AssignmentOf(job.plan, static_cast<uint32_t>(run_.rank())));
  std::vector<Buffer> buffers;
  for (size_t i = 2; i < answer.fds.size(); ++i) {
    OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, Duplicate(answer.fds[i].get()));
    OUTLAST_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Open(std::move(fd)));
    buffers.push_back(std::move(buffer));
  }
  Snapshotter::Options options;
  options.job_id = job_;
  options.run_id = run_.run_id();
  options.rank = static_cast<uint32_t>(run_.rank());
  options.world = static_cast<uint32_t>(run_.world());
  options.stall_limit = options_.stall_limit;
  options.is_aborted = [this](uint64_t generation) {
    return run_.generation() != generation || run_.is_aborted();
  };
  options.on_wanted_sealed = [this](int64_t step, uint64_t generation, int buffer, uint32_t turn,
                                    bool last) {
    const std::string payload = PayloadWriter()
                                    .Int(step)
                                    .Int(static_cast<uint32_t>(buffer))
                                    .Int(turn)
                                    .Int(static_cast<uint8_t>(last))
                                    .bytes();
    run_.link()
        .Notify(MessageKind::kSealed, generation, payload)
        .IgnoreError();  // a lost keeper ends this process anyway
  };
  options.on_wanted_skipped = [this](int64_t step, uint64_t generation) {
    TellSkipped(step, generation);
  };
  options.on_memory_sealed = [this](uint64_t generation) {
    if (!table_->is_led()) return;
    run_.link()
        .Notify(MessageKind::kHeld, generation, PayloadWriter().Int(wished_every_.load()).bytes())
        .IgnoreError();
  };
  OUTLAST_ASSIGN_OR_RETURN(snapshotter_,
                           Snapshotter::Make(std::move(options), *table_, std::move(buffers),
                                             std::move(assignment), state));
  return absl::OkStatus();
}

// --- Restore ---

absl::StatusOr<int64_t> Checkpointer::Impl::Restore(const StateView& state,
                                                    const RestoreOptions& options) {
  SectionScope section = run_.Section("restore", {.phase = Phase::kRestore});
  if (snapshotter_ != nullptr) snapshotter_->GiveUp();  // nothing of an aborted step is sealed
  OUTLAST_RETURN_IF_ERROR(EnsureBuffers(state));
  KeepRegions(state);
  absl::Duration choose_timeout = kChooseTimeout;
  if (!options_.remote.uri.empty()) choose_timeout += kOpenRemoteTimeout;
  // Of several nodes, the choice may come with what another one's agent has of this rank.
  choose_timeout += absl::Seconds(static_cast<double>(StateBytes(state)) / 50e6);
  for (uint32_t attempt = 0;; ++attempt) {
    OUTLAST_ASSIGN_OR_RETURN(
        const Message chosen,
        run_.link().Call(MessageKind::kChoose, run_.generation(),
                         PayloadWriter().Int(attempt).bytes(), choose_timeout));
    OUTLAST_ASSIGN_OR_RETURN(const RestoreChoice choice, RestoreChoice::Decode(chosen.payload));
    const absl::Status status = RestoreFrom(attempt, chosen, choice, state, options);
    const bool mismatch = status.code() == absl::StatusCode::kInvalidArgument;
    const std::string vote = PayloadWriter()
                                 .Int(attempt)
                                 .Int(static_cast<uint8_t>(status.ok()))
                                 .Int(static_cast<uint8_t>(mismatch))
                                 .Text(MessageOf(status))
                                 .bytes();
    const auto counted = run_.link().Call(MessageKind::kVote, run_.generation(), vote,
                                          kVoteTimeout + ReadLimit(choice.source, state));
    share_.reset();  // all have voted, so nobody looks into it any more
    OUTLAST_RETURN_IF_ERROR(counted.status());
    if (mismatch) return status;
    if (PayloadReader(counted->payload).Int<uint8_t>() == 0) continue;
    updates_are_announced_ = false;
    state_step_ = choice.step;
    return choice.step;
  }
}

absl::Status Checkpointer::Impl::RestoreFrom(uint32_t attempt, const Message& chosen,
                                             const RestoreChoice& choice, const StateView& state,
                                             const RestoreOptions& options) {
  std::string source;
  saved_extras_.clear();
  report_ = {};
  if (choice.is_of_memory()) {
    const Live wanted{choice.generation, choice.step};
    const bool is_live = live_ == wanted;
    const bool was_brought_back = std::exchange(ahead_, std::nullopt) == wanted;
    const bool is_served = choice.served_by != RestoreChoice::kNobody;
    live_.reset();
    if (is_served) {
      OUTLAST_RETURN_IF_ERROR(RestoreFromReplica(chosen, choice, state));
    } else if (!was_brought_back) {
      OUTLAST_RETURN_IF_ERROR(
          snapshotter_->Restore(static_cast<int>(choice.buffer), choice.turn, state,
                                is_live ? Belief::kUntouched : Belief::kNothing));
    }
    OUTLAST_ASSIGN_OR_RETURN(extras_, snapshotter_->ReadExtras(static_cast<int>(choice.buffer)));
    live_ = wanted;
    source = is_served                               ? "replica"
             : is_live                               ? "live"
             : choice.source == RestoreSource::kPeer ? "peer"
                                                     : "memory";
  } else {
    live_ = ahead_ = std::nullopt;
    extras_.clear();
    if (choice.is_of_files()) {
      OUTLAST_RETURN_IF_ERROR(RestoreFromFiles(attempt, chosen, choice, state, options));
      source = choice.source == RestoreSource::kRemote ? "remote" : "disk";
    }
  }
  tally_->Change([&](CheckpointStats& stats) {
    stats.restored_from = source;
    // A save of a later step was of a history that is given up.
    stats.durable_step =
        choice.is_of_files() ? choice.step : std::min(stats.durable_step, choice.step);
  });
  return absl::OkStatus();
}

absl::Status Checkpointer::Impl::RestoreFromReplica(const Message& chosen,
                                                    const RestoreChoice& choice,
                                                    const StateView& state) const {
  if (chosen.fds.size() != 1)
    return Error(absl::StatusCode::kInternal, "choice of a replica: {} descriptors, 1 wanted",
                 chosen.fds.size());
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, Duplicate(chosen.fds[0].get()));
  OUTLAST_ASSIGN_OR_RETURN(const Buffer buffer, Buffer::Open(std::move(fd)));
  OUTLAST_ASSIGN_OR_RETURN(const JobPlan job, ReadJobPlan());
  OUTLAST_ASSIGN_OR_RETURN(const Assignment own,
                           AssignmentOf(job.plan, static_cast<uint32_t>(run_.rank())));
  OUTLAST_ASSIGN_OR_RETURN(const Assignment theirs, AssignmentOf(job.plan, choice.served_by));
  OUTLAST_ASSIGN_OR_RETURN(const CopyPlan plan,
                           MakeReplicaPlan(own, theirs, buffer.layout(), state));
  OUTLAST_ASSIGN_OR_RETURN(const Buffer::Sealed sealed,
                           buffer.ReadSealed(run_.run_id(), BootId(), theirs.layout_hash));
  if (sealed.turn != choice.served_turn) {
    return Error(absl::StatusCode::kDataLoss, "snapshot of rank {}: turn {}, wanted {}",
                 choice.served_by, sealed.turn, choice.served_turn);
  }
  OUTLAST_RETURN_IF_ERROR(CopyBack(buffer, plan, choice.step, state, Belief::kNothing));
  // What is on its way to disk, or is saved when the job ends now, is this rank's own buffer.
  return snapshotter_->Mend(static_cast<int>(choice.buffer), choice.turn, state);
}

// On the trainer's thread, between two bodies. What fails here fails again, and is told, when the
// body asks.
void Checkpointer::Impl::RestoreAhead(const Message& message) {
  const auto choice = RestoreChoice::Decode(message.payload);
  if (!choice.ok() || snapshotter_ == nullptr || state_.regions.empty()) return;
  const Live wanted{choice->generation, choice->step};
  const auto belief = live_ == wanted ? Belief::kUntouched : Belief::kNothing;
  SectionScope section = run_.Section("restore", {.phase = Phase::kRestore});
  snapshotter_->GiveUp();
  const absl::Status restored =
      snapshotter_->Restore(static_cast<int>(choice->buffer), choice->turn, state_, belief);
  if (belief == Belief::kNothing) live_.reset();
  if (restored.ok()) ahead_ = wanted;
}

void Checkpointer::Impl::KeepRegions(const StateView& state) {
  if (!options_.restore_ahead || HasMemoryOf(state)) return;
  ahead_.reset();  // it was brought back into other memory
  state_.regions = state.regions;
}

bool Checkpointer::Impl::HasMemoryOf(const StateView& state) const {
  return std::ranges::equal(state.regions, state_.regions, [](const Region& a, const Region& b) {
    return a.bytes.data() == b.bytes.data();
  });
}

absl::StatusOr<Message> Checkpointer::Impl::Gather(uint32_t attempt, Share share,
                                                   absl::Duration timeout) {
  const auto buffer = static_cast<uint32_t>(share_ ? share_->index() : 0);
  return run_.link().Call(MessageKind::kGather, run_.generation(),
                          PayloadWriter().Int(attempt).Int(share).Int(buffer).bytes(), timeout);
}

// Each byte is read by one rank of the node, into a free buffer of its own; the others copy it from
// there. False: nothing is shared, or somebody has no free buffer. The error's message is empty
// where a mate could not read its share: that one tells why.
absl::StatusOr<bool> Checkpointer::Impl::ReadTogether(uint32_t attempt, const RestoreChoice& choice,
                                                      const CheckpointReader& reader,
                                                      const StateView& state, Widening widening) {
  if (choice.mates.size() < 2) return false;
  OUTLAST_ASSIGN_OR_RETURN(const JobPlan job, ReadJobPlan());
  std::vector<Assignment> assignments;
  for (const uint32_t rank : choice.mates) {
    OUTLAST_ASSIGN_OR_RETURN(Assignment assignment, AssignmentOf(job.plan, rank));
    assignments.push_back(std::move(assignment));
  }
  if (std::ranges::all_of(assignments, [](const Assignment& a) { return a.replicated.empty(); }))
    return false;
  const auto self = std::ranges::find(choice.mates, static_cast<uint32_t>(run_.rank()));
  if (self == choice.mates.end())
    return Error(absl::StatusCode::kInternal, "rank {} restores with others", run_.rank());
  const auto own = static_cast<size_t>(self - choice.mates.begin());
  const std::vector<Assignment> shares = SharesOfNode(assignments);
  share_ = snapshotter_->Borrow();
  absl::Status read = absl::OkStatus();
  if (share_) {
    read = reader.ReadRegions(RegionsOf(shares[own], share_->buffer()), IoMode::kDirect, widening);
  }
  // A share that cannot be a state is no damage: each then reads its own.
  const bool cannot = !share_ || absl::IsInvalidArgument(read);
  const Share share = cannot ? Share::kCannot : read.ok() ? Share::kReady : Share::kFailed;
  OUTLAST_ASSIGN_OR_RETURN(const Message gathered,
                           Gather(attempt, share, kVoteTimeout + ReadLimit(choice.source, state)));
  const auto all = PayloadReader(gathered.payload).Int<Share>();
  if (all == Share::kCannot) return false;
  OUTLAST_RETURN_IF_ERROR(read);
  if (all != Share::kReady) return MakeStatus(absl::StatusCode::kUnavailable, "");
  if (gathered.fds.size() != shares.size())
    return Error(absl::StatusCode::kInternal, "shares of a restore: {} descriptors, {} wanted",
                 gathered.fds.size(), shares.size());
  for (size_t mate = 0; mate < shares.size(); ++mate) {
    OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, Duplicate(gathered.fds[mate].get()));
    OUTLAST_ASSIGN_OR_RETURN(const Buffer buffer, Buffer::Open(std::move(fd)));
    OUTLAST_ASSIGN_OR_RETURN(const CopyPlan plan,
                             MakeSharePlan(assignments[own], shares[mate], buffer.layout(), state));
    CopyOut(buffer, plan, state);
  }
  return true;
}

// What the slowest rank may take to read.
absl::Duration Checkpointer::Impl::ReadLimit(RestoreSource source, const StateView& state) const {
  const auto bytes = static_cast<double>(StateBytes(state));
  if (source != RestoreSource::kRemote) return absl::Seconds(bytes / 50e6);
  return kOpenRemoteTimeout + absl::Seconds(bytes * run_.world() / 5e6);
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> Checkpointer::Impl::OpenChosen(
    uint32_t attempt, const Message& chosen, const RestoreChoice& choice, const StateView& state) {
  if (choice.source != RestoreSource::kRemote) return CheckpointReader::Open(choice.folder);
  if (!choice.error.empty()) return MakeStatus(absl::StatusCode::kUnavailable, choice.error);
  if (chosen.fds.size() != 2) {
    return Error(absl::StatusCode::kInternal,
                 "choice of a remote checkpoint: {} descriptors, 2 wanted", chosen.fds.size());
  }
  const RangeLink ranges(run_.link(), run_.generation(), attempt,
                         ReadLimit(RestoreSource::kRemote, state));
  return ranges.OpenReader(choice.folder, chosen.fds[0].get(), chosen.fds[1].get());
}

absl::Status Checkpointer::Impl::RestoreFromFiles(uint32_t attempt, const Message& chosen,
                                                  const RestoreChoice& choice,
                                                  const StateView& state,
                                                  const RestoreOptions& options) {
  const auto opened = OpenChosen(attempt, chosen, choice, state);
  // Whatever is wrong with it is damage to this job: another source may be whole.
  if (absl::IsInvalidArgument(opened.status()))
    return MakeStatus(absl::StatusCode::kDataLoss, MessageOf(opened.status()));
  OUTLAST_RETURN_IF_ERROR(opened.status());
  const std::unique_ptr<CheckpointReader>& reader = *opened;
  // Every rank compares what all of them expect: so all come to the same end, before any byte of
  // any state is changed.
  std::vector<WantedTensor> wanted;
  wanted.reserve(job_rows_.size());
  for (const TensorRow& row : job_rows_) wanted.push_back({row.name, row.dtype, row.global});
  MatchReport report = reader->Match(wanted, options.widening);
  if (options.strictness == Strictness::kStrict)
    OUTLAST_RETURN_IF_ERROR(report.ToStatus(reader->manifest().checkpoint));
  bool is_read = false;
  if (run_.world() > 1 && report.missing.empty() && report.mismatched.empty()) {
    OUTLAST_ASSIGN_OR_RETURN(is_read,
                             ReadTogether(attempt, choice, *reader, state, options.widening));
  }
  if (!is_read) {
    OUTLAST_RETURN_IF_ERROR(
        reader->ReadState(state, Strictness::kMatching, IoMode::kDirect, options.widening)
            .status());
  }
  tally_->Change([&](CheckpointStats& stats) {
    stats.restore_read_bytes = static_cast<int64_t>(reader->bytes_read());
  });
  report_ = std::move(report);
  const auto rank = static_cast<uint32_t>(run_.rank());
  const uint32_t world = reader->manifest().world;
  OUTLAST_ASSIGN_OR_RETURN(extras_, reader->ExtrasOf(rank < world ? rank : 0));
  if (world == static_cast<uint32_t>(run_.world())) return absl::OkStatus();
  for (const Receipt& receipt : reader->receipts()) saved_extras_.push_back(receipt.extra);
  return absl::OkStatus();
}

// --- Save ---

void Checkpointer::Impl::AddStall(int64_t started_ns) {
  const int64_t stall = MonotonicNanos() - started_ns;
  window_stall_ns_ += stall;
  tally_->Change([&](CheckpointStats& stats) { stats.stall_ns += stall; });
}

absl::Status Checkpointer::Impl::BeforeUpdate() {
  if (run_.is_aborted()) {
    if (snapshotter_ != nullptr) snapshotter_->GiveUp();
    return Error(absl::StatusCode::kAborted, "generation {} ended before an update",
                 run_.generation());
  }
  updates_are_announced_ = true;
  ++updates_;
  if (snapshotter_ != nullptr && snapshotter_->is_running()) {
    SectionScope section = run_.Section("snapshot", {.phase = Phase::kCheckpointSnapshot});
    const int64_t started = MonotonicNanos();
    snapshotter_->Finish();
    AddStall(started);
    // An abort while the copy ended: the trainer must not update a state that its peers take as it
    // is.
    if (run_.is_aborted())
      return Error(absl::StatusCode::kAborted, "generation {} ended before an update",
                   run_.generation());
  }
  live_ = ahead_ = std::nullopt;
  return absl::OkStatus();
}

void Checkpointer::Impl::TellSkipped(int64_t step, uint64_t generation) {
  run_.link()
      .Notify(MessageKind::kSkipped, generation, PayloadWriter().Int(step).bytes())
      .IgnoreError();  // a lost keeper ends this process anyway
}

// By the keeper. One that it asked for when this rank was past it already is answered too, so that
// the other ranks do not keep theirs; of several nodes the lead finds that out for itself.
bool Checkpointer::Impl::IsWanted(int64_t step) {
  const int64_t wanted = table_->wanted_step();
  if (wanted == step) return true;
  if (wanted == kNoStep || wanted > step || table_->is_led()) return false;
  const Live missed{run_.generation(), wanted};
  if (std::exchange(missed_, missed) != missed) TellSkipped(wanted, run_.generation());
  return false;
}

bool Checkpointer::Impl::IsDiskDue(int64_t step) {
  if (IsWanted(step)) return true;
  return !options_.every.is_auto() && step % options_.every.steps() == 0;
}

bool Checkpointer::Impl::IsSnapshotDue(int64_t step) const {
  const bool is_auto = options_.snapshot_every.is_auto();
  const SealTable::Cadence cadence = table_->cadence();
  if (table_->is_led()) {
    // Of two cadences one's steps are the other's too, so that ranks that hear of a change at
    // different times still have steps in common.
    return step % (cadence.every * (is_auto ? 1 : options_.snapshot_every.steps())) == 0;
  }
  if (!is_auto) return step % options_.snapshot_every.steps() == 0;
  return step < cadence.from || step % cadence.every == 0;
}

// Each step while that costs under 1 % of it; else so seldom that it does. Rank 0 decides from its
// own stalls, for all, from a step that none has reached.
void Checkpointer::Impl::ConsiderCadence(int64_t step) {
  if (run_.rank() != 0 || !options_.snapshot_every.is_auto()) return;
  if (++window_steps_ < kCadenceWindow) return;
  const int64_t now = MonotonicNanos();
  const int64_t every = table_->cadence().every;
  if (window_started_ns_ != 0) {
    const double step_ns =
        static_cast<double>(now - window_started_ns_) / static_cast<double>(window_steps_);
    const double stall_ns = static_cast<double>(window_stall_ns_) /
                            static_cast<double>(window_steps_) * static_cast<double>(every);
    const auto wanted = static_cast<int64_t>(
        std::clamp(std::ceil(stall_ns / (kLargestStallShare * step_ns)), 1.0, 1024.0));
    const int64_t wished = wished_every_.load();
    const int64_t now_every = wished > 0 ? wished : every;
    if (wanted > now_every * 2 || wanted * 2 < now_every) {
      if (table_->is_led()) {
        wished_every_ = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(wanted)));
      } else {
        table_->SetCadence({step + 3, wanted});
      }
    }
  }
  window_started_ns_ = now;
  window_stall_ns_ = 0;
  window_steps_ = 0;
}

absl::Status Checkpointer::Impl::Snapshot(int64_t step, const StateView& state,
                                          Snapshotter::Want want, Urgency urgency) {
  const bool must = urgency == Urgency::kMust;
  Snapshotter::Request request;
  request.step = step;
  request.generation = run_.generation();
  request.update_stamp = updates_;
  request.want = want;
  // Of several nodes the agents agree on what is saved.
  request.may_be_left_out = want == Snapshotter::Want::kDisk && !must && !table_->is_led();
  request.mode =
      updates_are_announced_ && !must ? Snapshotter::Mode::kLazy : Snapshotter::Mode::kEager;
  updates_are_announced_ = false;
  ahead_.reset();
  const int64_t started = MonotonicNanos();
  // The save that holds the last free buffer must not be slow on purpose.
  if (must && options_.disk_bytes_per_second != 0)
    OUTLAST_RETURN_IF_ERROR(run_.link().Notify(MessageKind::kHurry, request.generation, ""));
  const absl::Duration began = Clock::Real().Uptime();
  const absl::Duration deadline = began + kFreeBufferTimeout;
  // What other nodes' ranks hold is heard late: with very short steps all buffers may wait for it.
  const auto may_wait_for_word = [&] {
    return want != Snapshotter::Want::kMemory && table_->is_led() &&
           Clock::Real().Uptime() < began + kWordTimeout && snapshotter_->awaits_others();
  };
  while (true) {
    OUTLAST_ASSIGN_OR_RETURN(const bool begun, snapshotter_->Begin(request, state));
    if (begun) break;
    if (run_.is_aborted())
      return Error(absl::StatusCode::kAborted, "generation {} ended", request.generation);
    if (!must && may_wait_for_word()) {
      Clock::Real().SleepFor(absl::Microseconds(100));
      continue;
    }
    if (!must) {
      tally_->Change([](CheckpointStats& stats) { ++stats.skipped; });
      if (want != Snapshotter::Want::kMemory) TellSkipped(step, request.generation);
      return absl::OkStatus();
    }
    if (Clock::Real().Uptime() > deadline) {
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "snapshot of step {}: no buffer was free for {}", step,
                   absl::FormatDuration(kFreeBufferTimeout));
    }
    Clock::Real().SleepFor(absl::Milliseconds(1));  // until the save that pins them has ended
  }
  KeepRegions(state);
  live_ = Live{request.generation, step};
  if (want != Snapshotter::Want::kMemory) disk_ = live_;
  AddStall(started);
  return absl::OkStatus();
}

// A state that is further along must never be saved under an older step's name.
absl::Status Checkpointer::Impl::CheckStep(int64_t step, std::string_view call) const {
  if (step >= state_step_) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "{} of step {}: the state is of step {} already, at least that wanted", call, step,
               state_step_);
}

absl::Status Checkpointer::Impl::SaveIfDue(int64_t step, const StateView& state) {
  OUTLAST_RETURN_IF_ERROR(CheckStep(step, "SaveIfDue"));
  OUTLAST_RETURN_IF_ERROR(EnsureBuffers(state));
  // A trainer that did not announce its update may have changed what is still being copied.
  if (snapshotter_->is_running() && !updates_are_announced_) snapshotter_->GiveUp();
  state_step_ = step;
  OUTLAST_ASSIGN_OR_RETURN(const Run::StepVerdict verdict, run_.CompleteStep(step));
  if (verdict == Run::StepVerdict::kSaveAndStop) {
    OUTLAST_RETURN_IF_ERROR(Snapshot(step, state, Snapshotter::Want::kDiskLast, Urgency::kMust));
    run_.MarkStopped(step);
    return absl::OkStatus();
  }
  if (run_.is_aborted())
    return Error(absl::StatusCode::kAborted, "generation {} ended", run_.generation());
  ConsiderCadence(step);
  const bool disk = IsDiskDue(step);
  if (!disk && !IsSnapshotDue(step)) {
    live_.reset();
    return absl::OkStatus();
  }
  return Snapshot(step, state, disk ? Snapshotter::Want::kDisk : Snapshotter::Want::kMemory,
                  Urgency::kMaySkip);
}

absl::Status Checkpointer::Impl::Release() {
  if (snapshotter_ != nullptr) snapshotter_->Finish();
  live_.reset();
  return absl::OkStatus();
}

absl::Status Checkpointer::Impl::Finish(int64_t step, const StateView& state) {
  OUTLAST_RETURN_IF_ERROR(CheckStep(step, "Finish"));
  SectionScope section = run_.Section("finish", {.phase = Phase::kCheckpointWrite});
  OUTLAST_RETURN_IF_ERROR(EnsureBuffers(state));
  const bool is_sealed = !snapshotter_->is_running() || snapshotter_->Finish();
  IsWanted(step);  // one that was missed is answered here too: no SaveIfDue comes any more
  const absl::Duration deadline =
      absl::Seconds(120) + 2 * TimeOfHooks(options_.hooks) +
      absl::Seconds(static_cast<double>(StateBytes(state)) * run_.world() / 50e6);
  const auto ask = [&](FinishAsk what) -> absl::StatusOr<bool> {
    const std::string payload = PayloadWriter().Int(step).Int(what).bytes();
    OUTLAST_ASSIGN_OR_RETURN(
        const Message answer,
        run_.link().Call(MessageKind::kFinish, run_.generation(), payload, deadline));
    return PayloadReader(answer.payload).Int<uint8_t>() != 0;
  };
  OUTLAST_ASSIGN_OR_RETURN(bool is_durable, ask(FinishAsk::kQuery));
  if (is_durable) return absl::OkStatus();
  // The last step's snapshot may have been for memory alone, or none at all: then the disk gets one
  // of its own.
  if (!is_sealed || disk_ != Live{run_.generation(), step}) {
    OUTLAST_RETURN_IF_ERROR(Snapshot(step, state, Snapshotter::Want::kDisk, Urgency::kMust));
  }
  const auto waited = ask(FinishAsk::kWait);
  return waited.ok() ? absl::OkStatus()
                     : Annotate(waited.status(), fmt::format("final save of step {}", step));
}

CheckpointStats Checkpointer::Impl::stats() const {
  CheckpointStats stats = tally_->stats();
  if (snapshotter_ != nullptr) stats.sealed = snapshotter_->sealed();
  return stats;
}

// --- The public face ---

Checkpointer::Checkpointer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpointer::~Checkpointer() = default;

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Open(Run& run,
                                                                 CheckpointerOptions options) {
  auto impl = std::make_unique<Impl>(run, std::move(options));
  OUTLAST_RETURN_IF_ERROR(impl->Open());
  return std::unique_ptr<Checkpointer>(new Checkpointer(std::move(impl)));
}

absl::StatusOr<int64_t> Checkpointer::Restore(const StateView& state,
                                              const RestoreOptions& options) {
  return impl_->Restore(state, options);
}
const MatchReport& Checkpointer::restored_report() const { return impl_->report(); }
const std::vector<Extras>& Checkpointer::saved_extras() const { return impl_->saved_extras(); }
const Extras& Checkpointer::restored_extras() const { return impl_->extras(); }
absl::Status Checkpointer::BeforeUpdate() { return impl_->BeforeUpdate(); }
absl::Status Checkpointer::SaveIfDue(int64_t step, const StateView& state) {
  return impl_->SaveIfDue(step, state);
}
absl::Status Checkpointer::Release() { return impl_->Release(); }
absl::Status Checkpointer::Finish(int64_t step, const StateView& state) {
  return impl_->Finish(step, state);
}
CheckpointStats Checkpointer::stats() const { return impl_->stats(); }

}  // namespace outlast
