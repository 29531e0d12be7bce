#include "outlast/checkpoint/checkpointer.h"

#include <map>
#include <memory>
#include <utility>

#include "base/error.h"
#include "checkpoint/checkpointer_impl.h"
#include "checkpoint/hooks.h"
#include "checkpoint/save_service.h"
#include "run/keeper.h"
#include "run/link.h"

namespace outlast {
namespace {

constexpr absl::Duration kOpenTimeout = absl::Seconds(60);
constexpr absl::Duration kBuffersTimeout = absl::Seconds(120);

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

}  // namespace

uint64_t StateBytes(const StateView& state) {
  uint64_t bytes = 0;
  for (const Region& region : state.regions) bytes += region.bytes.size();
  return bytes;
}

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
  options.on_changed = [this](int64_t step, uint64_t) { DistrustUpdates(step); };
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
absl::Status Checkpointer::BeforeUpdate(std::string_view region) {
  return impl_->BeforeUpdate(region);
}
absl::Status Checkpointer::SaveIfDue(int64_t step, const StateView& state) {
  return impl_->SaveIfDue(step, state);
}
absl::Status Checkpointer::Release() { return impl_->Release(); }
absl::Status Checkpointer::Release(std::string_view region) { return impl_->Release(region); }
absl::Status Checkpointer::Finish(int64_t step, const StateView& state) {
  return impl_->Finish(step, state);
}
CheckpointStats Checkpointer::stats() const { return impl_->stats(); }

}  // namespace outlast
