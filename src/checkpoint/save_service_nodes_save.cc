// Saves of a job of several nodes: every node's part, and the lead's.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "checkpoint/save_service_nodes.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr size_t kMostSaid = 64;
constexpr size_t kMostVoid = 256;
constexpr int64_t kLongestNotice = 64;      // steps
constexpr int64_t kLongestEvery = 1 << 12;  // due snapshots
constexpr absl::Duration kLastRetry = absl::Milliseconds(100);

std::string TopicOf(int64_t step) { return fmt::format("step {}", step); }

// The newest claim is another run's: then the root is lost, and not to this run's next lead.
bool IsLostToStranger(const Root& root) {
  const auto listing = root.List(Root::Look::kManifests);
  if (!listing.ok() || listing->claims.empty()) return false;
  const ClaimFile& newest = listing->claims.back();
  return newest.number > root.claim() && !(newest.claim && newest.claim->run == root.run());
}

}  // namespace

// --- Saves, on every node

void SaveService::Nodes::OnSealedHere(int64_t step, Save sealed) {
  const SealedTold told{{sealed.generation, step}, sealed.last};
  awaiting_[step] = std::move(sealed);
  council_->TellLead(TopicOf(step), told);
}

void SaveService::Nodes::OnSkippedHere(int64_t step) {
  council_->TellLead(TopicOf(step), SkippedTold{step, "a rank had no free buffer"});
}

void SaveService::Nodes::Unpin(const Save& save) {
  for (size_t slot = 0; slot < save.held.size() && slot < of_.buffers_.size(); ++slot) {
    if (!save.held[slot] || of_.buffers_[slot].empty()) continue;
    of_.buffers_[slot][static_cast<size_t>(save.held[slot]->buffer)].control().Unpin(
        BufferPin::kPersist, save.held[slot]->turn);
  }
}

void SaveService::Nodes::Take(const std::string&, const StepDecided& decided) {
  if (decided.common) {
    common_ = std::max(common_, decided.step);
    WriteOtherRows();
  }
  if (of_.table_ && of_.table_->wanted_step() != kNoStep &&
      of_.table_->wanted_step() <= decided.step)
    of_.table_->SetWantedStep(kNoStep);
  of_.skipped_.erase(decided.step);
  if (decided.saved) return;
  council_->Answered(TopicOf(decided.step));
  void_.insert(decided.step);
  if (void_.size() > kMostVoid) void_.erase(void_.begin());
  for (std::map<int64_t, Save>* saves : {&of_.collecting_, &awaiting_}) {
    const auto found = saves->find(decided.step);
    if (found == saves->end()) continue;
    Unpin(found->second);
    saves->erase(found);
    if (!decided.common && !is_lead()) {
      of_.options_.observer.on_note(
          fmt::format("save of step {} dropped: {}", decided.step, decided.why));
    }
  }
}

// What other nodes' ranks hold, as far as it matters here: the newest step that all hold is not
// overwritten, and one that some rank will never have is.
void SaveService::Nodes::WriteOtherRows() {
  if (!of_.table_ || made_world_ != world_) return;
  for (int rank = 0; rank < world_; ++rank) {
    if (std::ranges::find(ranks_, rank) != ranks_.end()) continue;
    HeldSteps held;
    held.step[0] = common_;
    held.passed = passed_;
    of_.table_->Write(rank, held);
  }
}

void SaveService::Nodes::TellHeld() {
  if (!has_restored_ || !of_.table_) return;
  std::vector<HeldSteps> ranks;
  for (size_t slot = 0; slot < ranks_.size(); ++slot) {
    if (ranks_[slot] < 0) continue;
    if (!has_buffers(slot)) return;
    ranks.push_back(of_.table_->Read(ranks_[slot]));
  }
  HeldTold told = HeldByNode(ranks, common_);
  told.round = round_;
  if (told == held_told_) return;
  held_told_ = told;
  council_->TellLead("held", told);
}

void SaveService::Nodes::Take(const std::string&, const CommonTold& told) {
  if (told.round != round_ || !has_restored_ || !of_.table_) return;
  common_ = std::max(common_, told.common);
  passed_ = std::max(passed_, told.passed);
  of_.table_->SetCadence({0, told.every});
  WriteOtherRows();
}

// The snapshots that all ranks here hold, by slot.
std::optional<SaveService::Save> SaveService::Nodes::Find(const SnapshotKey& key) const {
  Save save{key.step, key.generation, false, {}};
  save.held.resize(ranks_.size());
  for (size_t slot = 0; slot < ranks_.size(); ++slot) {
    if (ranks_[slot] < 0) continue;
    if (!has_buffers(slot)) return std::nullopt;
    for (size_t i = 0; i < of_.buffers_[slot].size(); ++i) {
      const auto sealed = of_.buffers_[slot][i].ReadSealed(of_.keeper_.run_id(), BootId(),
                                                           of_.assignments_[slot].layout_hash);
      if (sealed.ok() && sealed->header.generation == key.generation &&
          sealed->header.step == key.step)
        save.held[slot] = Held{static_cast<int>(i), sealed->turn};
    }
    if (!save.held[slot]) return std::nullopt;
  }
  return save;
}

std::vector<SnapshotKey> SaveService::Nodes::HeldHere() const {
  std::set<SnapshotKey> keys;
  for (size_t slot = 0; slot < ranks_.size(); ++slot) {
    if (ranks_[slot] < 0) continue;
    if (!has_buffers(slot)) return {};
    for (const Buffer& buffer : of_.buffers_[slot]) {
      const auto sealed =
          buffer.ReadSealed(of_.keeper_.run_id(), BootId(), of_.assignments_[slot].layout_hash);
      if (sealed.ok()) keys.insert({sealed->header.generation, sealed->header.step});
    }
  }
  std::vector<SnapshotKey> held;
  for (const SnapshotKey& key : keys) {
    if (Find(key)) held.push_back(key);
  }
  return held;
}

// An announced save is of a step that was sealed and pinned for it, or of one that lies in the
// buffers still (a stop without the trainers, a final save that is tried again).
absl::StatusOr<std::vector<LocalRank>> SaveService::Nodes::Pin(const SaveOrder& order) {
  const SnapshotKey key{order.snapshot_generation, order.step};
  std::optional<Save> save;
  if (const auto found = awaiting_.find(order.step);
      found != awaiting_.end() && found->second.generation == key.generation) {
    save = std::move(found->second);
    awaiting_.erase(found);
  } else if ((save = Find(key))) {
    for (size_t slot = 0; slot < save->held.size(); ++slot) {
      std::optional<Held>& held = save->held[slot];
      if (!held) continue;
      if (of_.buffers_[slot][static_cast<size_t>(held->buffer)].control().TryPin(
              BufferPin::kPersist, held->turn))
        continue;
      for (size_t later = slot; later < save->held.size(); ++later) save->held[later].reset();
      Unpin(*save);
      return Error(absl::StatusCode::kUnavailable, "rank {}: its snapshot of step {} is in use",
                   ranks_[slot], order.step);
    }
  } else {
    return Error(absl::StatusCode::kUnavailable, "its ranks hold no snapshot of step {}",
                 order.step);
  }
  BeginLast();
  WrittenHere& written = written_[order.key.checkpoint];
  for (size_t slot = 0; slot < save->held.size(); ++slot) {
    if (!save->held[slot]) continue;
    const Held& held = *save->held[slot];
    written.pinned.push_back({static_cast<uint32_t>(ranks_[slot]),
                              {&of_.buffers_[slot][static_cast<size_t>(held.buffer)], held.turn,
                               &of_.assignments_[slot], of_.rank_tables_[slot].aliases}});
  }
  return written.pinned;
}

void SaveService::Nodes::Take(const std::string&, const SaveOver& over) {
  council_->Answered(TopicOf(over.step));
  council_->Answered("persist");
  if (over.final) council_->Answered("finish");
  if (is_lead()) {  // it has told its own already
    if (over.last) EndLast(over.outcome);
    return;
  }
  const std::string error(MessageOf(over.outcome));
  if (over.outcome.ok() && over.step > 0 && !over.checkpoint.empty()) {
    of_.durable_step_ = over.step;
    of_.parent_ = over.checkpoint;
    of_.committed_here_ = true;
    of_.options_.observer.on_durable(over.step, {over.checkpoint, over.bytes, over.write_time});
  } else if (!over.outcome.ok()) {
    of_.options_.observer.on_failed(over.step, over.outcome);
  }
  of_.Tell(over.step, over.outcome.ok() ? SaveOutcome::kDurable : SaveOutcome::kFailed, error);
  if (over.last) {
    of_.is_stopped_ = true;
    of_.keeper_.Dispatch(StopPersisted{over.step, over.outcome.ok()});
  }
  if (over.final) of_.AnswerFinishers(over.step, over.outcome);
  if (over.last) EndLast(over.outcome);
}

void SaveService::Nodes::OnAllFinish(int64_t step) {
  council_->TellLead("finish", FinishAsked{{of_.generation_, step}});
}

// The stop that asks for it has unwound the generation already.
void SaveService::Nodes::OnPersistCommon(const std::string& reason) {
  if (council_->is_open()) return council_->TellLead("persist", PersistAsked{HeldHere(), reason});
  if (HeldHere().empty()) return of_.keeper_.Dispatch(StopPersisted{of_.durable_step_, false});
  PersistLast([this](const absl::Status& saved) {
    of_.keeper_.Dispatch(StopPersisted{of_.durable_step_, saved.ok()});
  });
}

void SaveService::Nodes::PersistLast(std::function<void(absl::Status)> done) {
  const std::vector<SnapshotKey> held = HeldHere();
  const bool has_newer =
      std::ranges::any_of(held, [&](const auto& key) { return key.step > of_.durable_step_; });
  if (!has_newer || !ranks_of_.contains(of_.keeper_.node())) return done(absl::OkStatus());
  if (!council_->is_open()) {
    std::set<std::string> nodes;
    for (const auto& [node, ranks] : ranks_of_) nodes.insert(node);
    council_->Enter(council_->self(), council_->lead(), std::move(nodes));
  }
  last_ = Last{std::move(done), Clock::Real().Uptime() + of_.options_.last_patience};
  AskForLast();
}

// Again and again: the other agents come to it when their own trainers have ended.
void SaveService::Nodes::AskForLast() {
  if (!last_) return;
  if (Clock::Real().Uptime() < last_->until) {
    if (!last_->has_begun)
      council_->TellLead("persist", PersistAsked{HeldHere(), "the trainers have ended"});
    of_.keeper_.loop().RunAfter(kLastRetry, [this, alive = alive_] {
      if (*alive) AskForLast();
    });
    return;
  }
  std::vector<std::string> silent;
  if (last_->has_begun || !is_lead()) {
    silent = {council_->lead()};
  } else {
    for (const auto& [node, ranks] : ranks_of_) {
      if (!persist_asked_.contains(node)) silent.push_back(node);
    }
  }
  const std::vector<SnapshotKey> held = HeldHere();
  const absl::Status why = Error(
      absl::StatusCode::kUnavailable,
      "step {} is in memory here, step {} in the root; the agent of node '{}' does not answer, and "
      "without it the agents of several nodes save nothing",
      held.empty() ? 0 : held.back().step, of_.durable_step_, fmt::join(silent, "', '"));
  if (is_lead()) council_->TellAll(SaveOver{of_.durable_step_, "", 0, {}, why, true});
  EndLast(why);
}

// The lead has heard all, and its own limits tell how long a save may take.
void SaveService::Nodes::BeginLast() {
  if (!last_ || std::exchange(last_->has_begun, true)) return;
  const CommitLimits limits = Limits();
  last_->until = Clock::Real().Uptime() + limits.announce + limits.write + limits.receipts +
                 limits.collect + limits.hooks + limits.link + of_.options_.last_patience;
}

void SaveService::Nodes::EndLast(const absl::Status& outcome) {
  persist_asked_.clear();
  if (last_) std::exchange(last_, std::nullopt)->done(outcome);
}

// Writers of an unwound generation are fenced off.
uint64_t SaveService::Nodes::SaveGeneration() const {
  return of_.generation_ <= aborted_ ? std::max(of_.generation_, aborted_) + 1 : of_.generation_;
}

// --- Saves, at the lead

void SaveService::Nodes::Take(const std::string& node, const SealedTold& told) {
  if (!is_lead()) return;
  const auto said = said_.find(told.snapshot.step);
  if (said != said_.end()) return council_->Tell(node, said->second);  // it had not heard
  Decide(tally_.Sealed(node, told));
}

void SaveService::Nodes::Take(const std::string& node, const SkippedTold& told) {
  if (!is_lead()) return;
  const auto said = said_.find(told.step);
  if (said != said_.end()) return council_->Tell(node, said->second);
  Decide(tally_.Skipped(told.step, told.why));
}

void SaveService::Nodes::Decide(const std::vector<SealTally::Verdict>& verdicts) {
  for (const SealTally::Verdict& verdict : verdicts) {
    if (wanted_step_ != kNoStep && verdict.step >= wanted_step_) wanted_step_ = kNoStep;
    if (!verdict.complete) {
      ++of_.dropped_;
      of_.options_.observer.on_note(
          fmt::format("save of step {} dropped: {}", verdict.step, verdict.why));
      Say({verdict.step, false, false, verdict.why});
      continue;
    }
    held_tally_.Common(verdict.step);
    Say({verdict.step, true, true, ""});
    CopyCommon(verdict.step);
    of_.QueueSave({verdict.step, verdict.sealed.snapshot.generation, verdict.sealed.last, {}});
  }
}

void SaveService::Nodes::Take(const std::string& node, const HeldTold& told) {
  const bool is_restored =
      judged_ && judged_->restored && judged_->at.round == at_.round && told.round == at_.round;
  if (!is_lead() || !is_restored) return;
  if (held_tally_.Told(node, told) && node == council_->self()) pace_.OnSeal();
  SayCommon();
}

void SaveService::Nodes::WishMemoryEvery(int64_t every) {
  if (every > 0) wished_every_ = every;
}

void SaveService::Nodes::SayCommon() {
  const int64_t common = held_tally_.common();
  if (common_told_ && common > common_told_->common) pace_.OnCommon();
  const CommonTold told{at_.round, common, held_tally_.passed(),
                        std::min(wished_every_ * pace_.every(), kLongestEvery)};
  if (common_told_ == told) return;
  common_told_ = told;
  council_->TellAll(told);
  CopyCommon(common);
}

void SaveService::Nodes::Say(const StepDecided& decided) {
  said_[decided.step] = decided;
  if (said_.size() > kMostSaid) said_.erase(said_.begin());
  council_->TellAll(decided);
}

// All hold the step, but it is not written.
void SaveService::Nodes::Drop(int64_t step, const std::string& why) {
  Say({step, true, false, why});
}

CommitLimits SaveService::Nodes::Limits() const {
  uint64_t bytes = 0;
  for (const Assignment& assignment : of_.assignments_) bytes += assignment.image_bytes();
  const double all = static_cast<double>(bytes) * static_cast<double>(ranks_of_.size());
  CommitLimits limits =
      CommitLimits::WithBytes(bytes * ranks_of_.size(), TimeOfHooks(of_.checkpointer_.hooks));
  if (const uint64_t rate = of_.limiter_->bytes_per_second(); rate != 0)
    limits.write += absl::Seconds(all / static_cast<double>(rate));
  return limits;
}

void SaveService::Nodes::StartSave(const Save& save) {
  const PersistRequest persist = of_.RequestOf(save);
  TeamSaveRequest request;
  request.generation = SaveGeneration();
  for (const auto& [node, ranks] : ranks_of_) request.parts.push_back({node, ranks});
  request.run_id = persist.run_id;
  request.step = save.step;
  request.snapshot_generation = save.generation;
  request.world = static_cast<uint32_t>(world_);
  request.plan = of_.plan_;
  request.parent = persist.parent;
  request.committer = persist.committer;
  request.elsewhere = persist.elsewhere;
  request.hooks = of_.hooks_;
  request.limits = Limits();
  absl::Status started =
      Error(absl::StatusCode::kUnavailable, "save of step {}: the root is not open yet", save.step);
  if (lead_) {
    started = lead_->Start(std::move(request),
                           [this, save, generation = of_.generation_](const auto& result) {
                             OnSaveDone(save, generation, result);
                           });
  }
  if (started.ok()) return;
  of_.keeper_.loop().Post([this, alive = alive_, save, started] {
    if (*alive) OnSaveDone(save, of_.generation_, started);
  });
}

void SaveService::Nodes::OnSaveDone(const Save& save, uint64_t generation,
                                    absl::StatusOr<PersistResult> result) {
  if (result.ok()) {
    disk_->Post([opened = of_.opened_, request = of_.RequestOf(save), committed = *result,
                 in_use = of_.tier_ ? of_.tier_->InUse() : std::vector<std::string>{}] {
      Retire(*opened->root, request, committed, in_use);
    });
  } else if (absl::IsAborted(result.status())) {
    // Neither a generation's end nor this run's next lead is a loss of the root.
    const absl::Status ended =
        MakeStatus(absl::StatusCode::kUnavailable, MessageOf(result.status()));
    if (generation <= aborted_) return End(save, ended);
    disk_->Post([this, alive = alive_, &loop = of_.keeper_.loop(), opened = of_.opened_, save,
                 ended, lost = result.status()] {
      loop.Post([this, alive, save, why = IsLostToStranger(*opened->root) ? lost : ended] {
        if (*alive) End(save, why);
      });
    });
    return;
  }
  End(save, result);
}

void SaveService::Nodes::End(const Save& save, const absl::StatusOr<PersistResult>& result) {
  if (of_.writing_ && of_.writing_->step == save.step) return of_.OnSaveEnded(save, result);
  if (!result.ok()) return;
  // Linked after it was given up: it counts all the same.
  of_.durable_step_ = save.step;
  of_.parent_ = result->checkpoint;
  of_.committed_here_ = true;
  of_.options_.observer.on_durable(save.step, *result);
  OnSaved(save.step, absl::OkStatus());
  TellOver(save, result, true);
}

void SaveService::Nodes::TellOver(const Save& save, const absl::StatusOr<PersistResult>& result,
                                  bool is_final) {
  SaveOver over;
  over.step = save.step;
  over.last = save.last;
  over.final = is_final;
  over.outcome = result.status();
  if (result.ok()) {
    over.checkpoint = result->checkpoint;
    over.bytes = result->bytes;
    over.write_time = result->write_time;
  }
  last_over_ = over;
  if (council_->is_open()) council_->TellAll(over);
}

void SaveService::Nodes::Take(const std::string& node, const FinishAsked& asked) {
  if (!is_lead()) return;
  const int64_t step = asked.snapshot.step;
  if (of_.durable_step_ == step && !of_.is_being_saved(step)) {
    return council_->Tell(node, SaveOver{step, of_.parent_.value_or(""), 0, {}, absl::OkStatus()});
  }
  of_.Hurry();
  of_.final_step_ = step;
  of_.finishers_.try_emplace(step);
  finish_asked_[step].insert(node);
  if (!of_.is_being_saved(step)) RetryFinish(step);
}

// Once all ranks wait for the step, all buffers hold it.
void SaveService::Nodes::RetryFinish(int64_t step) {
  if (finish_asked_[step].size() < active_.size()) return;
  of_.QueueSave({step, of_.generation_, false, {}});
}

void SaveService::Nodes::Take(const std::string& node, const PersistAsked& asked) {
  if (!is_lead()) return;
  persist_asked_[node] = asked.held;
  if (persist_asked_.size() < ranks_of_.size()) return;
  BeginLast();
  const std::optional<SnapshotKey> common = NewestCommon(std::exchange(persist_asked_, {}));
  const auto tell = [&](const absl::Status& outcome) {
    SaveOver over{of_.durable_step_, of_.parent_.value_or(""), 0, {}, outcome, true};
    if (!outcome.ok()) over.checkpoint.clear();
    council_->TellAll(over);
    of_.keeper_.Dispatch(StopPersisted{of_.durable_step_, outcome.ok()});
  };
  if (!common)
    return tell(Error(absl::StatusCode::kUnavailable, "no snapshot that all ranks have"));
  if (common->step <= of_.durable_step_) return tell(absl::OkStatus());
  for (std::optional<Save>* save : {&of_.writing_, &of_.queued_}) {
    if (!*save || (*save)->step != common->step || (*save)->generation != common->generation)
      continue;
    (*save)->last = true;
    return of_.Hurry();
  }
  of_.options_.observer.on_note(
      fmt::format("saving step {} without the trainers: {}", common->step, asked.reason));
  of_.QueueSave({common->step, common->generation, true, {}});
}

// A step that no rank has reached when word of it comes. Who missed it says nothing: so when this
// node's ranks are well past it, a later one is wanted, with more notice.
void SaveService::Nodes::Want(int64_t notice) {
  if (!council_->is_open() || !has_restored_) return;
  const int64_t newest = of_.NewestStep();
  if (wanted_step_ != kNoStep && newest <= wanted_step_ + notice_) return;
  if (wanted_step_ != kNoStep) {
    notice_ = std::min(2 * notice_, kLongestNotice);
    Decide(tally_.Skipped(wanted_step_, "a rank was past it when it was asked for"));
  }
  wanted_step_ = newest + notice;
  council_->TellAll(StepWanted{wanted_step_});
}

void SaveService::Nodes::AwaitSave(const WantSave& want) {
  of_.options_.observer.on_note(fmt::format("a step is saved now: {}", want.reason));
  const bool is_pushed = awaited_save_.has_value();
  awaited_save_ = AwaitedSave{.number = want.number};
  if (!is_pushed) PushAwaitedSave();
}

// A save that is under way ends first: then a newer step is chosen than could be now.
void SaveService::Nodes::PushAwaitedSave() {
  constexpr absl::Duration kPause = absl::Milliseconds(20);
  if (!awaited_save_) return;
  if (!is_lead()) return EndAwaitedSave(0, absl::UnavailableError("the generation ended"));
  of_.Hurry();
  if (has_restored_) {
    // Long steps are too dear for more notice than one; a rank that missed it is noticed.
    const bool is_first = awaited_save_->from == kNoStep;
    if (is_first) awaited_save_->from = of_.NewestStep();
    if (!of_.writing_) Want(is_first ? 1 : notice_);
  }
  of_.keeper_.loop().RunAfter(kPause, [this, alive = alive_] {
    if (*alive) PushAwaitedSave();
  });
}

void SaveService::Nodes::OnSaved(int64_t step, const absl::Status& outcome) {
  const bool is_it = awaited_save_ && awaited_save_->from != kNoStep && step > awaited_save_->from;
  if (is_it) EndAwaitedSave(step, outcome);
}

void SaveService::Nodes::EndAwaitedSave(int64_t step, const absl::Status& outcome) {
  if (!awaited_save_) return;
  const AwaitedSave ended = *std::exchange(awaited_save_, std::nullopt);
  of_.keeper_.Dispatch(WantedSaveEnded{.number = ended.number,
                                       .durable = outcome.ok(),
                                       .step = outcome.ok() ? step : 0,
                                       .detail = std::string(MessageOf(outcome))});
}

void SaveService::Nodes::Take(const std::string&, const StepWanted& wanted) {
  if (of_.table_) of_.table_->SetWantedStep(wanted.step);
}

}  // namespace outlast
