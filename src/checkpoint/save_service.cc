#include "checkpoint/save_service.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "checkpoint/save_service_nodes.h"
#include "outlast/base/clock.h"
#include "outlast/base/memory.h"

namespace outlast {
namespace {

// A step that all ranks can still see coming when it is announced: they are at most a step apart,
// plus one for the notice.
constexpr int64_t kNoticeSteps = 2;
constexpr absl::Duration kFirstRetry = absl::Milliseconds(20);
constexpr absl::Duration kLastRetry = absl::Seconds(10);
constexpr absl::Duration kRetryOfNodes = absl::Milliseconds(200);
constexpr absl::Duration kFirstCost = absl::Seconds(1);  // of a save, before one was seen

}  // namespace

// A slot without a rank seals nothing.
bool SaveService::is_complete(const Save& save) const {
  for (size_t slot = 0; slot < save.held.size(); ++slot) {
    if (!save.held[slot] && !(nodes_ && nodes_->rank(slot) < 0)) return false;
  }
  return true;
}

SaveService::SaveService(Keeper& keeper, SaveServiceOptions options)
    : keeper_(keeper),
      options_(std::move(options)),
      slots_(keeper.slots()),
      table_parts_(static_cast<size_t>(slots_)),
      tables_(static_cast<size_t>(slots_)),
      started_ns_(MonotonicNanos()),
      io_(std::make_unique<SerialThread>("outlast-root")),
      persist_(
          std::make_unique<SerialThread>("outlast-save", SerialThread::Priority::kBackground)) {
  if (keeper_.peers() != nullptr) nodes_ = std::make_unique<Nodes>(*this);
}

SaveService::~SaveService() {
  *alive_ = false;
  if (auto_timer_) keeper_.loop().Cancel(*auto_timer_);
  if (beat_timer_) keeper_.loop().Cancel(*beat_timer_);
  if (limit_timer_) keeper_.loop().Cancel(*limit_timer_);
  Hurry();
  nodes_.reset();
  EndRestoring();
  scrubber_.reset();
  persist_.reset();
  fetch_.reset();
  if (tier_) {
    if (tier_->is_behind())
      options_.observer.on_note("the last checkpoint is being copied to the remote root");
    tier_->Finish(is_stopped_ ? std::optional(checkpointer_.remote.stop_limit) : std::nullopt);
  }
  io_.reset();
  if (opened_) opened_->root->Release().IgnoreError();
  if (tier_) tier_->Release();
  tier_.reset();
}

bool SaveService::OnMessage(int slot, Message& message) {
  switch (message.kind) {
    case MessageKind::kOpenRoot:
      OnOpenRoot(slot, message);
      return true;
    case MessageKind::kBuffers:
      OnBuffers(slot, message);
      return true;
    case MessageKind::kSealed:
      OnSealed(slot, message);
      return true;
    case MessageKind::kSkipped:
      OnSkipped(slot, message);
      return true;
    case MessageKind::kHeld:
      OnHeld(slot, message);
      return true;
    case MessageKind::kHurry:
      Hurry();
      return true;
    case MessageKind::kFinish:
      OnFinishAsked(slot, message);
      return true;
    case MessageKind::kChoose:
      OnChoose(slot, message);
      return true;
    case MessageKind::kGather:
      OnGather(slot, message);
      return true;
    case MessageKind::kReadRange:
      OnReadRange(slot, message);
      return true;
    case MessageKind::kVote:
      OnVote(slot, message);
      return true;
    default:
      return false;
  }
}

// --- Saves ---

bool SaveService::is_being_saved(int64_t step) const {
  return (queued_ && queued_->step == step) || (writing_ && writing_->step == step);
}

bool SaveService::is_pending(int64_t step) const {
  return collecting_.contains(step) || is_being_saved(step);
}

bool SaveService::is_being_saved(size_t slot, size_t buffer) const {
  const auto holds = [&](const std::optional<Save>& save) {
    return save && save->held[slot]->buffer == static_cast<int>(buffer);
  };
  return holds(writing_) || holds(queued_);
}

void SaveService::OnSealed(int slot, const Message& message) {
  PayloadReader reader(message.payload);
  const auto step = reader.Int<int64_t>();
  const auto buffer = reader.Int<uint32_t>();
  const auto turn = reader.Int<uint32_t>();
  const bool last = reader.Int<uint8_t>() != 0;
  if (!reader.ok() || buffers_.empty() || buffer >= buffers_[static_cast<size_t>(slot)].size())
    return;
  // Of a generation that is over, or skipped by another rank: nobody will complete it.
  if ((message.generation != generation_ && generation_ != 0) || skipped_.contains(step) ||
      (nodes_ && (nodes_->is_void(step) || !nodes_->has_restored()))) {
    buffers_[static_cast<size_t>(slot)][buffer].control().Unpin(BufferPin::kPersist, turn);
    return;
  }
  Save& save = collecting_[step];
  save.step = step;
  save.generation = message.generation;
  save.last = save.last || last;
  save.held.resize(static_cast<size_t>(slots_));
  save.held[static_cast<size_t>(slot)] = Held{static_cast<int>(buffer), turn};
  DropPassed(static_cast<size_t>(slot), step);
  if (nodes_) nodes_->TellHeld();
  if (!is_complete(save)) return;
  Save complete = std::move(save);
  collecting_.erase(step);
  if (nodes_) return nodes_->OnSealedHere(step, std::move(complete));
  skipped_.erase(skipped_.begin(), skipped_.lower_bound(step));
  if (table_->wanted_step() != kNoStep && table_->wanted_step() <= step)
    table_->SetWantedStep(kNoStep);
  QueueSave(std::move(complete));
}

void SaveService::OnSkipped(int slot, const Message& message) {
  PayloadReader reader(message.payload);
  const auto step = reader.Int<int64_t>();
  if (!reader.ok() || (message.generation != generation_ && generation_ != 0)) return;
  constexpr char kWhy[] =
      "a rank had no buffer for it while the former save is written, or was past it already";
  DropPassed(static_cast<size_t>(slot), step);
  if (!nodes_ && table_ != nullptr && table_->wanted_step() == step)
    table_->SetWantedStep(kNoStep);  // soon a later one is
  if (const auto found = collecting_.find(step); found != collecting_.end()) {
    DropCollecting(found, kWhy);
    return;
  }
  ++dropped_;
  if (skipped_.insert(step).second && !nodes_)
    options_.observer.on_note(fmt::format("save of step {} dropped: {}", step, kWhy));
  if (nodes_) nodes_->OnSkippedHere(step);
}

// Of each step that the disk wants, a rank says in turn that it has sealed or skipped it: one that
// speaks of a later step has gone past those that it has not sealed, and they keep no buffer.
void SaveService::DropPassed(size_t slot, int64_t step) {
  for (auto it = collecting_.begin(); it != collecting_.end() && it->first < step;) {
    it = it->second.held[slot] ? std::next(it) : DropCollecting(it, "a rank went past it");
  }
}

// What ranks still say of it keeps nothing either.
SaveService::Collecting::iterator SaveService::DropCollecting(Collecting::iterator partial,
                                                              const char* why) {
  skipped_.insert(partial->first);
  if (nodes_) nodes_->OnSkippedHere(partial->first);
  DropSave(partial->second, why);
  return collecting_.erase(partial);
}

void SaveService::OnHeld(int slot, const Message& message) {
  const auto every = PayloadReader(message.payload).Int<int64_t>();
  if (!nodes_ || message.generation != generation_) return;
  if (nodes_->rank(static_cast<size_t>(slot)) == 0) nodes_->WishMemoryEvery(every);
  nodes_->TellHeld();
}

int64_t SaveService::copied_step() const { return nodes_ ? nodes_->copied_step() : kNoStep; }

ReplicaStore* SaveService::copies() { return nodes_ ? nodes_->copies() : nullptr; }

int64_t SaveService::common_step() const { return nodes_ ? nodes_->common_step() : kNoStep; }

void SaveService::DropSave(Save& save, const char* why) {
  if (nodes_ && save.held.empty()) nodes_->Drop(save.step, why);
  for (size_t slot = 0; slot < save.held.size(); ++slot) {
    if (!save.held[slot]) continue;
    buffers_[slot][static_cast<size_t>(save.held[slot]->buffer)].control().Unpin(
        BufferPin::kPersist, save.held[slot]->turn);
  }
  ++dropped_;
  options_.observer.on_note(fmt::format("save of step {} dropped: {}", save.step, why));
}

// No save begins before the former one is durable; of those that wait, the newest is kept.
void SaveService::QueueSave(Save save) {
  if (save.last) Hurry();
  if (!writing_) return StartSave(std::move(save));
  // One that waits would keep a second buffer of three from memory's snapshots, and with it the
  // newest steps: so only one that somebody waits for does.
  if (!save.last && !finishers_.contains(save.step))
    return DropSave(save, "the former save is still being written");
  if (queued_) {
    save.last = save.last || queued_->last;
    DropSave(*queued_, "a newer step is complete, and the former save is still being written");
  }
  queued_ = std::move(save);
}

PersistRequest SaveService::RequestOf(const Save& save) const {
  PersistRequest request;
  for (size_t slot = 0; slot < save.held.size(); ++slot) {
    request.ranks.push_back({&buffers_[slot][static_cast<size_t>(save.held[slot]->buffer)],
                             save.held[slot]->turn, &assignments_[slot],
                             rank_tables_[slot].aliases});
  }
  request.run_id = keeper_.run_id();
  request.generation = save.generation;
  request.step = save.step;
  request.plan = plan_;
  request.parent = parent_;
  request.committer = options_.committer;
  request.retention = {checkpointer_.keep_last, checkpointer_.keep_every};
  if (tier_) request.elsewhere = tier_->Standing();
  if (scrubber_) request.retention.verified = scrubber_->Verified();
  request.limiter = limiter_.get();
  request.hooks = hooks_;
  return request;
}

void SaveService::StartSave(Save save) {
  if (scrubber_) scrubber_->Pause();
  if (nodes_) {
    cost_.SaveBegan(Clock::Real().Uptime(), NewestStep());
    writing_ = save;
    return nodes_->StartSave(save);
  }
  persist_->Post([this, alive = alive_, &loop = keeper_.loop(), opened = opened_, save,
                  request = RequestOf(save)] {
    auto result = Persist(*opened->root, request);
    const auto committed = result.ok() ? std::optional(*result) : std::nullopt;
    if (committed) committed_step_ = save.step;
    // Moved: two threads that share a Status are a race to TSan, as Debian's Abseil counts unseen.
    loop.Post([this, alive, save, result = std::move(result)] {
      if (*alive) OnSaveEnded(save, result);
    });
    if (committed) {
      Retire(*opened->root, request, *committed,
             tier_ != nullptr ? tier_->InUse() : std::vector<std::string>{});
    }
  });
  cost_.SaveBegan(Clock::Real().Uptime(), NewestStep());
  ArmLimit(save);
  writing_ = std::move(save);
}

void SaveService::ArmLimit(const Save& save) {
  const absl::Duration limit = SaveLimit();
  limit_timer_ = keeper_.loop().RunAfter(limit, [this, save, limit] { GiveUp(save, limit); });
}

absl::Duration SaveService::SaveLimit() const {
  double bytes = 0;
  for (const Assignment& assignment : assignments_)
    bytes += static_cast<double>(assignment.image_bytes());
  double rate = 50e6;
  if (limiter_->bytes_per_second() != 0)
    rate = std::min(rate, static_cast<double>(limiter_->bytes_per_second()));
  return options_.save_floor + absl::Seconds(bytes / rate) + TimeOfHooks(checkpointer_.hooks);
}

// The disk hangs, perhaps for ever. Its thread cannot be called back, so no other save begins; but
// all who wait are told, and if it ends after all, its checkpoint counts.
void SaveService::GiveUp(const Save& save, absl::Duration limit) {
  limit_timer_.reset();
  overdue_ = Error(absl::StatusCode::kDeadlineExceeded,
                   "save of step {} to {}: not durable after its deadline of {}; the disk hangs{}",
                   save.step, opened_->root->path(), absl::FormatDuration(limit),
                   hooks_.empty() ? "" : ", or a hook does");
  options_.observer.on_failed(save.step, overdue_);
  Tell(save.step, SaveOutcome::kFailed, MessageOf(overdue_));
  const bool is_last = writing_ && writing_->last;
  if (is_last || (queued_ && queued_->last))
    keeper_.Dispatch(StopPersisted{is_last ? save.step : queued_->step, false});
  if (finishers_.empty()) return;
  while (!finishers_.empty()) AnswerFinishers(finishers_.begin()->first, overdue_);
  keeper_.Dispatch(FinalSaveFailed{std::string(MessageOf(overdue_))});
}

// Somebody waits for a save: the rate limit rests until it has ended.
void SaveService::Hurry() { limiter_->Lift(); }

void SaveService::OnSaveEnded(const Save& begun, const absl::StatusOr<PersistResult>& result) {
  Save save = begun;
  save.last = writing_->last;  // a stop may have come to wait for it
  writing_.reset();
  cost_.SaveEnded(Clock::Real().Uptime(), NewestStep());
  const bool was_given_up = !std::exchange(overdue_, absl::OkStatus()).ok();
  if (limit_timer_) keeper_.loop().Cancel(*std::exchange(limit_timer_, std::nullopt));
  for (size_t slot = 0; slot < save.held.size(); ++slot) {
    buffers_[slot][static_cast<size_t>(save.held[slot]->buffer)].control().Unpin(
        BufferPin::kPersist, save.held[slot]->turn);
  }
  if (result.ok()) {
    durable_step_ = save.step;
    parent_ = result->checkpoint;
    committed_here_ = true;
    KeepLast();
    options_.observer.on_durable(save.step, *result);
    keeper_.Dispatch(CheckpointCommitted{save.step});
    if (nodes_) nodes_->OnSaved(save.step, absl::OkStatus());
    if (tier_) tier_->OnCommitted(save.step, result->checkpoint, result->bytes);
  } else {
    options_.observer.on_failed(save.step, result.status());
    if (nodes_) nodes_->OnSaved(save.step, result.status());
    if (result.status().code() == absl::StatusCode::kAborted)
      keeper_.Dispatch(RootLost{std::string(MessageOf(result.status()))});
  }
  Tell(save.step, result.ok() ? SaveOutcome::kDurable : SaveOutcome::kFailed,
       MessageOf(result.status()));
  // A hook would say the same of the same bytes.
  const bool is_retried = !result.ok() && finishers_.contains(save.step) &&
                          !retried_.contains(save.step) &&
                          !absl::IsFailedPrecondition(result.status());
  if (nodes_) nodes_->TellOver(save, result, !is_retried);
  if (save.last) is_stopped_ = true;
  if (save.last && !was_given_up) {
    keeper_.Dispatch(StopPersisted{save.step, result.ok()});
  }
  if (result.ok()) {
    AnswerFinishers(save.step, absl::OkStatus());
  } else if (is_retried) {
    retried_.insert(save.step);
    if (nodes_) {
      nodes_->RetryFinish(save.step);
    } else {
      SaveForFinishers(save.step);
    }
  } else if (finishers_.contains(save.step)) {
    AnswerFinishers(save.step, result.status());
    keeper_.Dispatch(FinalSaveFailed{std::string(MessageOf(result.status()))});
  }
  if (!save.last && !(queued_ && queued_->last) && finishers_.empty()) limiter_->Enforce();
  if (queued_ && !writing_) {
    Save next = *std::exchange(queued_, std::nullopt);
    StartSave(std::move(next));
  }
  if (scrubber_ && !writing_) scrubber_->Resume();
  ArmAutoSave();
}

void SaveService::OnFinishAsked(int slot, const Message& message) {
  PayloadReader reader(message.payload);
  const auto step = reader.Int<int64_t>();
  const auto what = reader.Int<FinishAsk>();
  const bool is_durable = durable_step_ == step && !is_pending(step);
  if (is_durable || what == FinishAsk::kQuery) {
    return keeper_.Answer(slot, message.request, absl::OkStatus(),
                          PayloadWriter().Int(static_cast<uint8_t>(is_durable)).bytes());
  }
  // Behind a save that was given up: the disk may come back, so the wait has a time of its own.
  if (writing_ && !limit_timer_ && !nodes_) ArmLimit(*writing_);
  Hurry();
  final_step_ = step;
  finishers_[step].push_back({slot, message.request});
  if (nodes_ || !is_being_saved(step)) SaveForFinishers(step);
}

// The save of a final step failed or was dropped, perhaps on some ranks alone: once all ranks wait
// for it, their buffers hold it, and it is tried again.
void SaveService::SaveForFinishers(int64_t step) {
  if (static_cast<int>(finishers_[step].size()) < members()) return;
  if (const auto partial = collecting_.find(step); partial != collecting_.end()) {
    DropSave(partial->second, "a rank had skipped it; it is collected anew");
    collecting_.erase(partial);
  }
  if (nodes_) return nodes_->OnAllFinish(step);
  const std::optional<Common> common = FindCommon();
  if (!common || common->step != step || !PinAll(*common)) {
    AnswerFinishers(step,
                    Error(absl::StatusCode::kUnavailable,
                          "final save of step {}: no snapshot of it that all ranks have", step));
    keeper_.Dispatch(
        FinalSaveFailed{fmt::format("step {}: no snapshot that all ranks have", step)});
    return;
  }
  Save save{common->step, common->generation, false, {}};
  for (const Held& held : common->held) save.held.emplace_back(held);
  QueueSave(std::move(save));
}

void SaveService::AnswerFinishers(int64_t step, const absl::Status& status) {
  const auto found = finishers_.find(step);
  if (found == finishers_.end()) return;
  const std::vector<Waiter> waiters = std::move(found->second);
  finishers_.erase(found);
  const std::string durable = PayloadWriter().Int(uint8_t{1}).bytes();
  for (const Waiter& waiter : waiters)
    keeper_.Answer(waiter.slot, waiter.request, status, status.ok() ? durable : "");
}

// Begins the wait for the next save by time, from now on.
void SaveService::ArmAutoSave() {
  if (!checkpointer_.every.is_auto() || buffers_.empty() || (nodes_ && !nodes_->is_lead())) return;
  if (auto_timer_) keeper_.loop().Cancel(*auto_timer_);
  if (!interval_) {
    const absl::Duration longest = std::min(
        options_.longest_auto, IntervalOfLoss(checkpointer_.tolerable_loss, keeper_.world()));
    interval_.emplace(IntervalTuner::Bounds{std::min(options_.shortest_auto, longest), longest});
  }
  const absl::Duration run_time = absl::Nanoseconds(MonotonicNanos() - started_ns_);
  IntervalModel model;
  model.mean_between_interruptions =
      MeanBetweenInterruptions(keeper_.world(), run_time, keeper_.faults());
  model.write = cost_.write();
  model.cost = cost_.cost().value_or(std::max(model.write, kFirstCost));
  auto_timer_ = keeper_.loop().RunAfter(interval_->Tune(model), [this] { AskForAutoSave(); });
}

int64_t SaveService::NewestStep() const {
  uint64_t newest = 0;
  for (int slot = 0; slot < slots_; ++slot)
    newest = std::max(newest, LoadWord(keeper_.black_box(slot).header().step));
  return static_cast<int64_t>(newest);
}

// Asks all ranks for a step that none has reached. One that was past it already when it looks says
// that it skipped it, and then a later one is asked for.
void SaveService::AskForAutoSave() {
  auto_timer_.reset();
  if (writing_ || queued_) return;  // its end arms the timer again
  if (nodes_) {
    nodes_->WantAutoSave();
    auto_timer_ = keeper_.loop().RunAfter(kRetryOfNodes, [this] { AskForAutoSave(); });
    return;
  }
  if (table_->wanted_step() == kNoStep) {
    int64_t newest = NewestStep();
    for (const HeldSteps& held : table_->Read()) newest = std::max(newest, held.newest());
    table_->SetWantedStep(newest + kNoticeSteps);
    auto_retry_ = kFirstRetry;
  }
  auto_timer_ = keeper_.loop().RunAfter(auto_retry_, [this] { AskForAutoSave(); });
  auto_retry_ = std::min(2 * auto_retry_, kLastRetry);
}

// --- Generations ---

// The newest snapshot that every slot's buffers hold, by (generation, step).
std::optional<SaveService::Common> SaveService::FindCommon() const {
  using Key = std::pair<uint64_t, int64_t>;
  std::vector<std::map<Key, Held>> held(buffers_.size());
  for (size_t slot = 0; slot < buffers_.size(); ++slot) {
    for (size_t i = 0; i < buffers_[slot].size(); ++i) {
      const auto sealed =
          buffers_[slot][i].ReadSealed(keeper_.run_id(), BootId(), assignments_[slot].layout_hash);
      if (!sealed.ok()) continue;
      held[slot][{sealed->header.generation, sealed->header.step}] = {static_cast<int>(i),
                                                                      sealed->turn};
    }
  }
  if (held.empty()) return std::nullopt;
  for (auto key = held.front().rbegin(); key != held.front().rend(); ++key) {
    Common common{key->first.first, key->first.second, {}};
    for (const auto& slot : held) {
      const auto found = slot.find(key->first);
      if (found != slot.end()) common.held.push_back(found->second);
    }
    if (common.held.size() == held.size()) return common;
  }
  return std::nullopt;
}

bool SaveService::PinAll(const Common& common) {
  size_t pinned = 0;
  for (; pinned < common.held.size(); ++pinned) {
    const Held& held = common.held[pinned];
    if (!buffers_[pinned][static_cast<size_t>(held.buffer)].control().TryPin(BufferPin::kPersist,
                                                                             held.turn))
      break;
  }
  if (pinned == common.held.size()) return true;
  for (size_t slot = 0; slot < pinned; ++slot) {
    buffers_[slot][static_cast<size_t>(common.held[slot].buffer)].control().Unpin(
        BufferPin::kPersist, common.held[slot].turn);
  }
  return false;
}

void SaveService::OnAbort(uint64_t generation) {
  EndRestoring();
  if (nodes_) nodes_->OnAbort(generation);
}

void SaveService::OnWorkerEnded(int) {}

void SaveService::OnCommit(const CommitGeneration& commit) {
  generation_ = commit.generation;
  generation_members_ = commit.members;
  EndRestoring();
  cost_.Forget();
  finishers_.clear();  // their requests were answered by the abort
  final_step_ = 0;
  limiter_->Enforce();
  retried_.clear();
  std::erase_if(buffer_waiters_, [](const Waiter&) { return true; });
  if (nodes_) return nodes_->OnCommit(commit);
  if (!buffers_.empty()) return KeepTheCommonOnly();
  if (making_) return;
  for (std::string& table : tables_) table.clear();
}

// All is quiet: no rank snapshots or saves. Memory is put in order: one common snapshot stays, the
// rest is void, since a later one of the same step would be taken for it.
void SaveService::KeepTheCommonOnly() {
  skipped_.clear();
  for (auto& [step, save] : collecting_) DropSave(save, "its ranks restore");
  collecting_.clear();
  table_->SetWantedStep(kNoStep);
  for (size_t slot = 0; slot < buffers_.size(); ++slot) {
    for (size_t i = 0; i < buffers_[slot].size(); ++i) {
      const BufferControl control = buffers_[slot][i].control();
      const ControlWord word = control.Read();
      if (word.state == BufferState::kFilling) BufferControl(control).Abandon(word.turn);
      // A pin that its worker set for a save that nobody heard of.
      if (word.state == BufferState::kSealed && !is_being_saved(slot, i))
        BufferControl(control).Unpin(BufferPin::kPersist, word.turn);
    }
  }
  base_ = FindCommon();
  for (size_t slot = 0; slot < buffers_.size(); ++slot) {
    HeldSteps held;
    held.buffers = static_cast<int>(buffers_[slot].size());
    for (size_t i = 0; i < buffers_[slot].size(); ++i) {
      if (base_ && base_->held[slot].buffer == static_cast<int>(i)) {
        held.step[i] = base_->step;
      } else {
        const ControlWord word = buffers_[slot][i].control().Read();
        if (word.state == BufferState::kSealed) buffers_[slot][i].control().Discard(word.turn);
      }
    }
    table_->Write(static_cast<int>(slot), held);
  }
}

// A restore found memory's snapshot damaged: all ranks wait for the next choice, so nothing writes.
void SaveService::ForgetMemory() {
  if (!base_) return;
  for (size_t slot = 0; slot < buffers_.size(); ++slot) {
    const Held& held = base_->held[slot];
    buffers_[slot][static_cast<size_t>(held.buffer)].control().Discard(held.turn);
    HeldSteps nothing;
    nothing.buffers = static_cast<int>(buffers_[slot].size());
    table_->Write(static_cast<int>(slot), nothing);
  }
  base_.reset();
}

int SaveService::members() const {
  if (generation_members_.empty()) return slots_;
  return static_cast<int>(std::count_if(generation_members_.begin(), generation_members_.end(),
                                        [&](int slot) { return !keeper_.is_finished(slot); }));
}

// --- Ends ---

// The trainers may still be running: a pin either finds the snapshot that was read, or another one
// is looked for.
void SaveService::OnPersistCommon(const std::string& reason) {
  constexpr int kTries = 100;
  if (!is_saving()) return;
  if (nodes_) return nodes_->OnPersistCommon(reason);
  for (int i = 0; i < kTries; ++i) {
    const std::optional<Common> common = FindCommon();
    if (!common) break;
    if (common->step <= durable_step_) return keeper_.Dispatch(StopPersisted{durable_step_, true});
    // On its way to the disk already, and so pinned: its end tells.
    for (std::optional<Save>* save : {&writing_, &queued_}) {
      if (!*save || !overdue_.ok() || (*save)->step != common->step ||
          (*save)->generation != common->generation)
        continue;
      (*save)->last = true;
      return Hurry();
    }
    if (!PinAll(*common)) continue;
    options_.observer.on_note(
        fmt::format("saving step {} without the trainers: {}", common->step, reason));
    Save save{common->step, common->generation, true, {}};
    for (const Held& held : common->held) save.held.emplace_back(held);
    return QueueSave(std::move(save));
  }
  keeper_.Dispatch(StopPersisted{durable_step_, false});
}

bool SaveService::OnWantSave(const WantSave& want) {
  if (!nodes_ || !opened_) return false;
  nodes_->AwaitSave(want);
  return true;
}

void SaveService::PersistLast(std::function<void(absl::Status)> done) {
  if (!opened_ || buffers_.empty()) return done(absl::OkStatus());
  if (nodes_) return nodes_->PersistLast(std::move(done));
  done(PersistLastOfOneNode());
}

absl::Status SaveService::PersistLastOfOneNode() {
  absl::Status status;
  Hurry();
  persist_.reset();  // waits for the save that is being written; the loop hears no more of it
  if (writing_ && committed_step_ == writing_->step) durable_step_ = writing_->step;
  const std::optional<Common> common = FindCommon();
  if (common && common->step > durable_step_) {
    Save save{common->step, common->generation, true, {}};
    for (const Held& held : common->held) save.held.emplace_back(held);
    const PersistRequest request = RequestOf(save);
    const auto result = Persist(*opened_->root, request);
    if (result.ok()) {
      durable_step_ = save.step;
      options_.observer.on_durable(save.step, *result);
      Retire(*opened_->root, request, *result,
             tier_ != nullptr ? tier_->InUse() : std::vector<std::string>{});
      if (tier_) tier_->OnCommitted(save.step, result->checkpoint, result->bytes);
    }
    status = result.status();
  }
  persist_ = std::make_unique<SerialThread>("outlast-save", SerialThread::Priority::kBackground);
  return status;
}

}  // namespace outlast
