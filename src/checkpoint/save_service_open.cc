// What comes before the first save: the root, its tiers, and the ranks' snapshot buffers.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/machine_memory.h"
#include "checkpoint/buffer_count.h"
#include "checkpoint/made_buffers.h"
#include "checkpoint/save_service_nodes.h"
#include "outlast/base/clock.h"
#include "outlast/base/memory.h"

namespace outlast {
namespace {

constexpr uint32_t kExtraCountBytes = 64;  // before the pairs

BufferLayout LayoutOf(const Assignment& assignment, int64_t extras_bytes) {
  return {.image_bytes = assignment.image_bytes(),
          .replicated_bytes = assignment.replicated_bytes,
          .extra_capacity = static_cast<uint32_t>(extras_bytes) + kExtraCountBytes};
}

BufferRoom RoomFor(const std::vector<Assignment>& assignments, int64_t extras_bytes) {
  BufferRoom room{.memory = MachineMemoryBytes()};
  for (const Assignment& assignment : assignments) {
    room.buffers += LayoutOf(assignment, extras_bytes).buffer_bytes();
    room.state += assignment.data_bytes + assignment.replicated_bytes;
  }
  return room;
}

}  // namespace

void SaveService::OnOpenRoot(int slot, Message& message) {
  PayloadReader reader(message.payload);
  const std::string text(reader.Text());
  const Waiter waiter{slot, message.request};
  if (open_text_.empty()) {
    const auto options = DecodeOptions(text);
    if (!options.ok()) return keeper_.Answer(slot, message.request, options.status());
    checkpointer_ = *options;
    checkpointer_.hooks.own = options_.own_hooks;
    hooks_ = MakeHooks(checkpointer_.hooks);
    limiter_ = std::make_unique<RateLimiter>(checkpointer_.disk_bytes_per_second);
    open_text_ = text;
  } else if (text != open_text_) {
    return keeper_.Answer(
        slot, message.request,
        Error(absl::StatusCode::kInvalidArgument,
              "checkpointer of slot {}: options {}, those of the other ranks are {}", slot, text,
              open_text_));
  }
  if (opened_) return AnswerOpen(waiter);
  if (!open_error_.ok()) return keeper_.Answer(slot, message.request, open_error_);
  openers_.push_back(waiter);
  if (opening_) return;
  opening_ = true;
  io_->Post([this, alive = alive_, &loop = keeper_.loop(), uri = checkpointer_.uri,
             tier_options = TierOptions(), mode = WantedStart(), need = NeedOf(WantedStart()),
             committer = options_.committer, start = options_.start, fits = CheckStart(),
             claims = nodes_ == nullptr] {
    const auto open = [&]() -> absl::StatusOr<std::shared_ptr<Opened>> {
      OUTLAST_RETURN_IF_ERROR(fits);
      if (claims) return OpenToWrite(uri, tier_options, mode, need, committer, start);
      // Which node leads is not known yet; another one's folder is left as it is.
      RootOptions join = tier_options.root;
      join.access = Access::kJoin;
      auto opened = std::make_shared<Opened>();
      OUTLAST_ASSIGN_OR_RETURN(opened->root, Root::Open(uri, std::move(join)));
      opened->resume = mode == StartMode::kResume;
      return opened;
    };
    loop.Post([this, alive, result = open()] {
      if (*alive) OnOpened(result);
    });
  });
}

RootsNeed SaveService::NeedOf(StartMode mode) const {
  const bool needs_nothing = mode == StartMode::kFresh || !options_.start.folder.empty();
  return needs_nothing ? RootsNeed::kNothing : RootsNeed::kACheckpoint;
}

absl::Status SaveService::CheckStart() const {
  if (options_.start.is_latest() || checkpointer_.start != CheckpointerOptions::Start::kFresh)
    return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "--restore-from '{}', and the trainer begins afresh (CheckpointerOptions::start): "
               "at most one wanted",
               options_.start.text());
}

// A run that has saved goes on from its own.
absl::Status SaveService::CheckStartPoint(const Root& root, const StartPoint& point) {
  if (point.is_latest()) return absl::OkStatus();
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, root.List());
  std::set<uint64_t> own;
  for (const ClaimFile& claim : listing.claims) {
    if (claim.claim && claim.claim->run == root.run()) own.insert(claim.number);
  }
  for (const CheckpointInfo& info : listing.checkpoints) {
    if (info.manifest && own.contains(info.manifest->claim)) return absl::OkStatus();
  }
  std::string elsewhere;
  return DecideStartFrom(point, listing, root.path(), &elsewhere).status();
}

StartMode SaveService::WantedStart() const {
  const bool fresh = options_.fresh || checkpointer_.start == CheckpointerOptions::Start::kFresh;
  return fresh ? StartMode::kFresh : StartMode::kResume;
}

// With a claim, and with what a former writer had left whole but for its manifest.
absl::StatusOr<std::shared_ptr<SaveService::Opened>> SaveService::OpenToWrite(
    const std::string& uri, const RemoteTierOptions& options, StartMode mode, RootsNeed need,
    const std::string& committer, const StartPoint& start) {
  auto opened = std::make_shared<Opened>();
  OUTLAST_ASSIGN_OR_RETURN(OpenedTiers tiers, OpenTiers(uri, options, need));
  opened->root = std::move(tiers.root);
  opened->remote = std::move(tiers.remote);
  opened->remote_error = tiers.remote_error;
  opened->remote_is_read_only = tiers.read_only;
  opened->resume = mode == StartMode::kResume;
  opened->root->RollForward({}, {committer, opened->root->claim(), 0}).status().IgnoreError();
  // What only the remote root has is looked for when a rank restores.
  if (options.remote.uri.empty() || !start.folder.empty()) {
    absl::Status found = CheckStartPoint(*opened->root, start);
    if (!found.ok()) {
      opened->root->Release().IgnoreError();
      if (opened->remote != nullptr) opened->remote->Release().IgnoreError();
      return found;
    }
  }
  return opened;
}

RemoteTierOptions SaveService::TierOptions() const {
  RemoteTierOptions tier;
  tier.remote = checkpointer_.remote;
  tier.plugins = options_.plugins;
  tier.root.job_name = options_.job_name.empty() ? checkpointer_.job : options_.job_name;
  tier.root.run = keeper_.run_id();
  tier.root.take_over = options_.take_over ? TakeOver::kYes : TakeOver::kNo;
  tier.root.fences_own_run = nodes_ != nullptr;
  tier.auto_interval = [this](absl::Duration upload_time) {
    IntervalModel model;
    model.mean_between_interruptions = MeanBetweenInterruptions(
        keeper_.world(), absl::Nanoseconds(MonotonicNanos() - started_ns_), keeper_.faults());
    model.cost = model.write = upload_time;
    return std::clamp(OptimalInterval(model), options_.shortest_auto, options_.longest_auto);
  };
  return tier;
}

void SaveService::MakeTier() {
  if (checkpointer_.remote.uri.empty()) return;
  if (!opened_->remote_error.ok()) {
    options_.observer.on_note(fmt::format(
        "the remote root cannot be reached, it is looked for again at each due save: {}",
        MessageOf(opened_->remote_error)));
  }
  if (!opened_->remote_is_read_only.ok()) {
    options_.observer.on_note(
        fmt::format("the remote root can only be read, nothing is saved there: {}",
                    MessageOf(opened_->remote_is_read_only)));
  }
  RemoteObserver observer;
  observer.on_uploaded = [this](int64_t step, const UploadResult& result) {
    options_.observer.on_uploaded(step, result);
    if (!result.retention_error.empty())
      options_.observer.on_note("remote root: old checkpoints stay: " + result.retention_error);
    Tell(step, SaveOutcome::kUploaded, "");
  };
  observer.on_failed = [this](int64_t step, const absl::Status& error) {
    options_.observer.on_upload_failed(step, error);
    Tell(step, SaveOutcome::kUploadFailed, MessageOf(error));
  };
  tier_ = std::make_unique<RemoteTier>(keeper_.loop(), *opened_->root, std::move(opened_->remote),
                                       TierOptions(), std::move(observer));
  MakeFetchThread();
}

// A lead that is one no longer gives it back, with the tier that it works for.
void SaveService::MakeFetchThread() {
  if (!fetch_) fetch_ = std::make_unique<SerialThread>("outlast-fetch");
}

void SaveService::MakeScrubber() {
  if (checkpointer_.scrub_bytes_per_second == 0) return;
  ScrubOptions options;
  options.bytes_per_second = checkpointer_.scrub_bytes_per_second;
  options.on_damaged = [this, alive = alive_, &loop = keeper_.loop()](const std::string& name,
                                                                      const std::string& reason) {
    loop.Post([this, alive, name, reason] {
      if (!*alive) return;
      options_.observer.on_note(fmt::format(
          "checkpoint {} is damaged on disk, and in quarantine from now on: {}", name, reason));
      readers().Post([opened = opened_, name, reason] {
        opened->root->Quarantine(name, reason).IgnoreError();
      });
    });
  };
  scrubber_ = std::make_unique<Scrubber>(*opened_->root, std::move(options));
  scrubber_->Resume();
}

void SaveService::Tell(int64_t step, SaveOutcome outcome, std::string_view error) {
  Message event;
  event.kind = MessageKind::kSaveEvent;
  event.payload = PayloadWriter().Int(step).Int(outcome).Text(error).bytes();
  for (int slot = 0; slot < slots_; ++slot) {
    if (keeper_.is_joined(slot)) keeper_.Send(slot, event);
  }
}

absl::Status SaveService::Adopt(absl::StatusOr<std::shared_ptr<Opened>> opened) {
  OUTLAST_RETURN_IF_ERROR(opened.status());
  opened_ = *std::move(opened);
  if (!nodes_) BeginWriting();
  return absl::OkStatus();
}

// The root's claim is this agent's.
void SaveService::BeginWriting() {
  MakeTier();
  MakeScrubber();
  BeatLater();
}

void SaveService::OnOpened(absl::StatusOr<std::shared_ptr<Opened>> opened) {
  opening_ = false;
  open_error_ = Adopt(std::move(opened));
  if (!open_error_.ok()) {
    open_error_ = Annotate(open_error_, fmt::format("checkpoint root '{}'", checkpointer_.uri));
    // Nothing was trained yet: the job is refused, and no restart would help.
    keeper_.Dispatch(RootRefused{std::string(MessageOf(open_error_))});
  }
  if (opened_) KeepOpened();
  for (const Waiter& waiter : std::exchange(openers_, {})) {
    if (opened_) {
      AnswerOpen(waiter);
    } else {
      keeper_.Answer(waiter.slot, waiter.request, open_error_);
    }
  }
  if (nodes_ && opened_) nodes_->OnOpened();
}

void SaveService::AnswerOpen(const Waiter& waiter) {
  const Id128 job = opened_->root->job();
  PayloadWriter payload;
  for (const std::byte byte : job.bytes) payload.Int(byte);
  payload.Int(static_cast<uint8_t>(opened_->resume));
  keeper_.Answer(waiter.slot, waiter.request, absl::OkStatus(), payload.bytes());
}

void SaveService::BeatLater() {
  beat_timer_ = keeper_.loop().RunAfter(kBeatInterval, [this] {
    // A root that fails to take a beat fails to take a save too, and says so there.
    io_->Post([opened = opened_] { opened->root->Beat().IgnoreError(); });
    if (tier_) tier_->Beat();
    BeatLater();
  });
}

// --- Buffers ---

void SaveService::OnBuffers(int slot, Message& message) {
  PayloadReader reader(message.payload);
  const auto part = reader.Int<uint32_t>();
  const auto parts = reader.Int<uint32_t>();
  const std::string_view bytes = reader.Text();
  std::string& received = table_parts_[static_cast<size_t>(slot)];
  if (part == 0) received.clear();
  received.append(bytes);
  if (part + 1 < parts) return;
  const Waiter waiter{slot, message.request};
  if (!opened_) {
    return keeper_.Answer(slot, message.request,
                          Error(absl::StatusCode::kFailedPrecondition,
                                "buffers of slot {}: the root is not open", slot));
  }
  std::string table = std::exchange(received, {});
  std::string& known = tables_[static_cast<size_t>(slot)];
  if (nodes_ ? nodes_->has_buffers(static_cast<size_t>(slot)) : !buffers_.empty()) {
    if (table == known) return AnswerBuffers(waiter);
    return keeper_.Answer(slot, message.request,
                          Error(absl::StatusCode::kInvalidArgument,
                                "state of slot {}: names, dtypes or shapes differ from those that "
                                "this job's buffers were made for",
                                slot));
  }
  known = std::move(table);
  std::erase_if(buffer_waiters_, [&](const Waiter& other) { return other.slot == slot; });
  buffer_waiters_.push_back(waiter);
  if (nodes_) return nodes_->OnTable(static_cast<size_t>(slot));
  MakeBuffersIfAllAsked();
}

void SaveService::MakeBuffersIfAllAsked() {
  if (making_ || std::any_of(tables_.begin(), tables_.end(),
                             [](const std::string& table) { return table.empty(); }))
    return;
  std::vector<int> ranks(tables_.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  MakeBuffersLater(NeedsOf(EncodeTables(tables_), std::move(ranks)));
}

SaveService::BufferNeeds SaveService::NeedsOf(std::string tables, std::vector<int> ranks) const {
  std::vector<bool> has(ranks.size());
  for (size_t slot = 0; slot < has.size(); ++slot) has[slot] = nodes_ && nodes_->has_buffers(slot);
  return {.tables = std::move(tables),
          .ranks = std::move(ranks),
          .has = std::move(has),
          .job = opened_->root->job(),
          .run = keeper_.run_id(),
          .wanted = checkpointer_.buffers,
          .extras_bytes = checkpointer_.extras_bytes};
}

// All but memory.
absl::Status SaveService::PlanBuffers(const BufferNeeds& needs, MadeBuffers* made) {
  OUTLAST_ASSIGN_OR_RETURN(std::vector<RankTable> tables, DecodeTables(needs.tables));
  SettleAliases(tables);
  OUTLAST_ASSIGN_OR_RETURN(TensorTable table, MergeTables(tables));
  OUTLAST_ASSIGN_OR_RETURN(const Plan plan, MakePlan(std::move(table)));
  made->plan = ToHex(plan.digest);
  made->world = static_cast<int>(tables.size());
  made->rank_tables.resize(needs.ranks.size());
  made->buffers.resize(needs.ranks.size());
  for (size_t slot = 0; slot < needs.ranks.size(); ++slot) {
    Assignment& assignment = made->assignments.emplace_back();
    if (needs.ranks[slot] < 0) continue;
    const auto rank = static_cast<uint32_t>(needs.ranks[slot]);
    OUTLAST_ASSIGN_OR_RETURN(assignment, AssignmentOf(plan, rank));
    made->rank_tables[slot] = std::move(tables.at(rank));
  }
  return absl::OkStatus();
}

absl::Status SaveService::MakeBuffers(const BufferNeeds& needs, MadeBuffers* made) {
  OUTLAST_RETURN_IF_ERROR(PlanBuffers(needs, made));
  OUTLAST_ASSIGN_OR_RETURN(
      const int count,
      BufferCountFor(needs.wanted, RoomFor(made->assignments, needs.extras_bytes)));
  for (size_t slot = 0; slot < needs.ranks.size(); ++slot) {
    if (needs.ranks[slot] < 0 || needs.has[slot]) continue;
    for (int i = 0; i < count; ++i) {
      OUTLAST_ASSIGN_OR_RETURN(
          Buffer buffer,
          Buffer::Create(LayoutOf(made->assignments[slot], needs.extras_bytes),
                         {needs.job, needs.run, static_cast<uint32_t>(needs.ranks[slot]),
                          static_cast<uint32_t>(made->world)}));
      made->buffers[slot].push_back(std::move(buffer));
    }
  }
  const size_t rows = SealTable::BytesFor(made->world);
  OUTLAST_ASSIGN_OR_RETURN(made->table_fd, MakeSealedMemory("outlast-seals", rows));
  OUTLAST_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Shared(made->table_fd.get(), rows));
  made->table = std::make_unique<SealTable>(std::move(mapping), made->world);
  OUTLAST_ASSIGN_OR_RETURN(made->tables_fd,
                           MakeSealedMemory("outlast-tables", needs.tables.size()));
  if (!WriteAll(made->tables_fd.get(), std::as_bytes(std::span(needs.tables))).ok())
    return absl::InternalError("write the table of tensors");
  return absl::OkStatus();
}

void SaveService::MakeBuffersLater(BufferNeeds needs) {
  making_ = true;
  io_->Post([this, alive = alive_, &loop = keeper_.loop(), needs = std::move(needs)] {
    auto made = std::make_shared<MadeBuffers>();
    loop.Post([this, alive, made, has = needs.has, bytes = needs.tables.size(),
               status = MakeBuffers(needs, made.get())] {
      if (!*alive) return;
      if (status.ok()) {
        rank_tables_ = std::move(made->rank_tables);
        plan_ = std::move(made->plan);
        assignments_ = std::move(made->assignments);
        buffers_.resize(made->buffers.size());
        for (size_t slot = 0; slot < has.size(); ++slot) {
          if (!has[slot]) buffers_[slot] = std::move(made->buffers[slot]);
        }
        tables_fd_ = std::move(made->tables_fd);
        tables_bytes_ = bytes;
        // Who stays has it mapped.
        if (std::ranges::find(has, true) == has.end()) {
          table_fd_ = std::move(made->table_fd);
          table_ = std::move(made->table);
        }
      }
      OnBuffersMade(status, has);
    });
  });
}

void SaveService::OnBuffersMade(const absl::Status& status, const std::vector<bool>& had) {
  making_ = false;
  if (nodes_) nodes_->OnBuffersMade(status);
  if (status.ok()) {
    for (size_t slot = 0; slot < buffers_.size(); ++slot) {
      const int row = nodes_ ? nodes_->rank(slot) : static_cast<int>(slot);
      if (row < 0 || had[slot]) continue;
      HeldSteps nothing;
      nothing.buffers = static_cast<int>(buffers_[slot].size());
      table_->Write(row, nothing);
    }
    KeepBuffers();  // before anybody is told of them
    ArmAutoSave();
  } else {
    for (std::string& table : tables_) table.clear();  // the next generation may ask again
  }
  for (const Waiter& waiter : std::exchange(buffer_waiters_, {})) {
    if (status.ok()) {
      AnswerBuffers(waiter);
    } else {
      keeper_.Answer(waiter.slot, waiter.request, Annotate(status, "snapshot buffers"));
    }
  }
}

void SaveService::AnswerBuffers(const Waiter& waiter) {
  const auto& buffers = buffers_[static_cast<size_t>(waiter.slot)];
  std::vector<int> fds{tables_fd_.get(), table_fd_.get()};
  for (const Buffer& buffer : buffers) fds.push_back(buffer.fd());
  PayloadWriter payload;
  payload.Int(tables_bytes_).Int(static_cast<uint32_t>(buffers.size()));
  keeper_.Answer(waiter.slot, waiter.request, absl::OkStatus(), payload.bytes(), fds);
}

}  // namespace outlast
