#include "checkpoint/save_service_nodes.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/base/digest.h"
#include "outlast/base/memory.h"
#include "outlast/elastic/messages.h"

namespace outlast {
namespace {

constexpr size_t kTablesPartBytes = 1 << 20;
constexpr size_t kMostSaid = 64;
constexpr absl::Duration kRetry = absl::Milliseconds(100);
constexpr size_t kMostVoid = 256;
constexpr int64_t kFirstNotice = 2, kLongestNotice = 64;  // steps

std::string DigestOf(std::string_view bytes) {
  std::string hex;
  for (const std::byte byte : Sha256(bytes)) hex += fmt::format("{:02x}", byte);
  return hex;
}

// Manifests of a root, by folder.
using Heads = std::vector<std::pair<std::string, Manifest>>;
Heads HeadsOf(const Root& root) {
  Heads heads;
  const auto listing = root.List(Root::Look::kManifests);
  if (!listing.ok()) return heads;
  for (const CheckpointInfo& info : listing->checkpoints) {
    if (info.state == CheckpointState::kCommitted && info.manifest)
      heads.emplace_back(info.name, *info.manifest);
  }
  return heads;
}

// The newest claim is another run's: then the root is lost, and not to this run's next lead.
bool IsLostToStranger(const Root& root) {
  const auto listing = root.List(Root::Look::kManifests);
  if (!listing.ok() || listing->claims.empty()) return false;
  const ClaimFile& newest = listing->claims.back();
  return newest.number > root.claim() && !(newest.claim && newest.claim->run == root.run());
}

}  // namespace

SaveService::Nodes::Nodes(SaveService& service) : of_(service) {
  ranks_.assign(static_cast<size_t>(of_.slots_), -1);
  made_for_ = ranks_;
  council_ = std::make_unique<SaveCouncil>(
      of_.keeper_.loop(), *of_.keeper_.peers(),
      SaveCouncil::Ears{
          .on_message = [this](const std::string& node,
                               const CouncilMessage& message) { Hear(node, message); },
          .on_team =
              [this](const std::string& node, const SaveTeamMessage& message) {
                const bool is_of_lead = std::holds_alternative<SaveAnnounced>(message) ||
                                        std::holds_alternative<SaveOutcomeTold>(message);
                if (is_of_lead && member_) member_->OnMessage(message);
                if (!is_of_lead && lead_) lead_->OnMessage(node, message);
              },
          .on_up =
              [this](const std::string& node) {
                if (is_lead() && lead_) lead_->OnUp(node);
              },
          .on_lost =
              [this](const std::string& node, const std::string& why) {
                if (is_lead() && lead_) lead_->OnLost(node, why);
              },
      });
}

SaveService::Nodes::~Nodes() {
  *alive_ = false;
  council_->Leave();
  lead_.reset();
  member_.reset();
  disk_.reset();
}

void SaveService::Nodes::Hear(const std::string& node, const CouncilMessage& message) {
  std::visit([&](const auto& one) { Take(node, one); }, message);
}

// --- Generations

void SaveService::Nodes::OnCommit(const CommitGeneration& commit) {
  const std::shared_ptr<const control::Commit> job = commit.job;
  std::set<std::string> nodes;
  ranks_of_.clear();
  active_.clear();
  for (const RankRun& run : job->map.runs) {
    nodes.insert(run.node);
    for (int i = 0; i < run.count; ++i) {
      ranks_of_[run.node].push_back(static_cast<uint32_t>(run.first_rank + i));
      if (std::ranges::find(job->finished, run.first_rank + i) == job->finished.end())
        active_.insert(run.node);
    }
  }
  world_ = job->map.world;
  for (size_t slot = 0; slot < ranks_.size(); ++slot)
    ranks_[slot] = commit.RankOf(static_cast<int>(slot));

  has_restored_ = false;
  round_ = 0;
  common_ = passed_ = kNoStep;
  void_.clear();
  of_.skipped_.clear();
  parts_.clear();
  tables_.clear();
  known_by_.clear();
  tally_ = SealTally(nodes);
  said_.clear();
  last_over_.reset();
  finish_asked_.clear();
  persist_asked_.clear();
  at_ = {};
  asked_.clear();
  votes_.clear();
  chosen_.reset();
  judged_.reset();
  wants_choice_ = false;
  wanted_step_ = kNoStep;
  notice_ = kFirstNotice;

  LeaveOldBuffers();
  CleanUp();
  // A spare is told of no group.
  if (!nodes.contains(of_.keeper_.node())) return council_->Leave();
  council_->Enter(of_.keeper_.node(), job->map.runs.front().node, std::move(nodes));
  if (!is_lead()) GiveUpLead();
  TakeLead();
  TellTables();
}

// Buffers are laid out for a rank of a world.
void SaveService::Nodes::LeaveOldBuffers() {
  const bool is_other_world = world_ != made_world_;
  bool keeps = false;
  for (size_t slot = 0; slot < ranks_.size(); ++slot) {
    if (!is_other_world && made_for_[slot] == ranks_[slot]) {
      keeps = keeps || ranks_[slot] >= 0;
      continue;
    }
    made_for_[slot] = -1;
    of_.tables_[slot].clear();
    if (slot < of_.buffers_.size()) left_.push_back(std::move(of_.buffers_[slot]));
  }
  if (written_.empty()) left_.clear();
  if (!keeps) {
    known_.clear();
    of_.buffers_.clear();
    of_.base_.reset();
  }
}

// All is quiet: what was begun is not ended any more, and nobody saves what was pinned for it.
void SaveService::Nodes::CleanUp() {
  if (of_.table_) of_.table_->SetWantedStep(kNoStep);
  for (auto& buffers : of_.buffers_) {
    for (Buffer& buffer : buffers) {
      const ControlWord word = buffer.control().Read();
      if (word.state == BufferState::kFilling) buffer.control().Abandon(word.turn);
      // A pin that its worker set for a save that nobody heard of.
      const bool is_written = std::ranges::any_of(written_, [&](const auto& save) {
        return std::ranges::any_of(
            save.second.pinned, [&](const LocalRank& one) { return one.from.buffer == &buffer; });
      });
      if (word.state == BufferState::kSealed && !is_written)
        buffer.control().Unpin(BufferPin::kPersist, word.turn);
    }
  }
}

void SaveService::Nodes::OnAbort(uint64_t generation) {
  const std::string reason = "the generation ended";
  aborted_ = std::max(aborted_, generation);
  if (lead_) lead_->OnAbort(generation, reason);
  if (member_) member_->OnAbort(generation, reason);
  council_->Leave();
  has_restored_ = false;
  for (const auto& [step, save] : std::exchange(of_.collecting_, {})) Unpin(save);
  for (const auto& [step, save] : std::exchange(awaiting_, {})) Unpin(save);
  if (const auto queued = std::exchange(of_.queued_, std::nullopt); queued && queued->last)
    of_.keeper_.Dispatch(StopPersisted{queued->step, false});
}

// --- The root

void SaveService::Nodes::OnOpened() {
  MakeMember();
  TakeLead();
}

void SaveService::Nodes::TakeLead() {
  if (!is_lead() || has_claim_ || is_taking_ || !of_.opened_) return;
  is_taking_ = true;
  of_.io_->Post([this, alive = alive_, &loop = of_.keeper_.loop(), uri = of_.checkpointer_.uri,
                 options = of_.TierOptions(), mode = of_.WantedStart(),
                 committer = of_.options_.committer] {
    auto opened = OpenToWrite(uri, options, mode, committer);
    Heads heads;
    if (opened.ok()) heads = HeadsOf(*(*opened)->root);
    loop.Post([this, alive, opened = std::move(opened), heads = std::move(heads)] {
      if (*alive) OnLeadOpened(opened, heads);
    });
  });
}

void SaveService::Nodes::OnLeadOpened(absl::StatusOr<std::shared_ptr<Opened>> opened,
                                      const Heads& heads) {
  is_taking_ = false;
  if (!opened.ok()) {
    const absl::Status why =
        Annotate(opened.status(), fmt::format("checkpoint root '{}'", of_.checkpointer_.uri));
    of_.keeper_.Dispatch(RootRefused{std::string(MessageOf(why))});
    if (wants_choice_) TellNoChoice(why);
    return;
  }
  has_claim_ = true;
  of_.opened_ = *std::move(opened);
  // What a former lead of this run committed last, and could not tell any more.
  bool is_newer = true;
  while (is_newer && of_.parent_) {
    is_newer = false;
    for (const auto& [name, manifest] : heads) {
      if (manifest.parent != of_.parent_) continue;
      of_.parent_ = name;
      of_.durable_step_ = manifest.step;
      of_.committed_here_ = is_newer = true;
      break;
    }
  }
  disk_ = std::make_unique<SerialThread>("outlast-commit");
  lead_ =
      std::make_unique<SaveLead>(of_.keeper_.loop(), *of_.opened_->root, *disk_,
                                 [this](const std::string& node, const SaveTeamMessage& message) {
                                   council_->TellTeam(node, message);
                                 });
  of_.BeginWriting();
  of_.ArmAutoSave();
  if (!is_lead()) return GiveUpLead();
  if (std::exchange(wants_choice_, false)) ChooseIfAllAsked();
}

// Another agent has rank 0 now, and takes a claim over this one's.
void SaveService::Nodes::GiveUpLead() {
  if (!has_claim_) return;
  has_claim_ = false;
  lead_.reset();
  disk_.reset();
  of_.writing_.reset();
  of_.queued_.reset();
  of_.scrubber_.reset();
  of_.fetch_.reset();
  of_.tier_.reset();
  if (of_.beat_timer_) of_.keeper_.loop().Cancel(*std::exchange(of_.beat_timer_, std::nullopt));
  if (of_.auto_timer_) of_.keeper_.loop().Cancel(*std::exchange(of_.auto_timer_, std::nullopt));
}

void SaveService::Nodes::MakeMember() {
  if (member_) return;
  SaveMemberOptions options;
  options.root = of_.opened_->root->path();
  options.send_to_lead = [this](const SaveTeamMessage& message) {
    council_->TellTeamLead(message);
  };
  options.plan = [this] { return of_.plan_; };
  options.pin = [this](const SaveOrder& order) { return Pin(order); };
  options.over = [this](const SaveOrder& order, const absl::Status&) {
    const auto found = written_.find(order.key.checkpoint);
    if (found == written_.end()) return;
    for (const LocalRank& one : found->second.pinned)
      BufferControl(one.from.buffer->control()).Unpin(BufferPin::kPersist, one.from.turn);
    written_.erase(found);
    if (written_.empty()) left_.clear();
    if (of_.finishers_.empty() && written_.empty()) of_.limiter_->Enforce();
  };
  options.limiter = of_.limiter_.get();
  member_ = std::make_unique<SaveMember>(of_.keeper_.loop(), std::move(options));
}

// --- Tables and buffers

bool SaveService::Nodes::has_buffers(size_t slot) const {
  return slot < of_.buffers_.size() && !of_.buffers_[slot].empty() && made_for_[slot] >= 0 &&
         made_for_[slot] == ranks_[slot] && made_world_ == world_;
}

void SaveService::Nodes::OnTable(size_t) { TellTables(); }

// Once all ranks of this node have told theirs.
void SaveService::Nodes::TellTables() {
  TablesTold told{known_, {}};
  for (size_t slot = 0; slot < ranks_.size(); ++slot) {
    if (ranks_[slot] < 0) continue;
    if (of_.tables_[slot].empty()) return;
    told.tables[static_cast<uint32_t>(ranks_[slot])] = of_.tables_[slot];
  }
  size_t bytes = 0;
  for (const auto& [rank, table] : told.tables) bytes += table.size();
  if (bytes > kTablesPartBytes * 3) {
    return RefuseTables(Error(absl::StatusCode::kResourceExhausted,
                              "the ranks of node '{}' have tables of {} bytes, at most {} fit a "
                              "message between agents",
                              council_->self(), bytes, kTablesPartBytes * 3));
  }
  council_->TellLead("tables", told);
}

void SaveService::Nodes::Take(const std::string& node, const TablesTold& told) {
  if (!is_lead()) return;
  known_by_[node] = told.known;
  for (const auto& [rank, table] : told.tables) {
    if (rank < static_cast<uint32_t>(world_)) tables_[rank] = table;
  }
  AssembleTables();
}

void SaveService::Nodes::AssembleTables() {
  if (static_cast<int>(tables_.size()) < world_ || known_by_.size() < ranks_of_.size()) return;
  std::vector<std::string> tables;
  size_t bytes = 0;
  for (const auto& [rank, table] : tables_) {
    tables.push_back(table);
    bytes += table.size();
  }
  const std::string all = EncodeTables(tables);
  const std::string digest = DigestOf(all);
  absl::Status refused;
  if (bytes > kMaxTablesBytes) {
    refused = Error(absl::StatusCode::kResourceExhausted,
                    "tables of all {} ranks: {} bytes, at most {} cross between agents", world_,
                    bytes, kMaxTablesBytes);
  }
  for (const auto& [node, known] : known_by_) {
    if (known.empty() || known == digest) continue;
    refused = Error(absl::StatusCode::kInvalidArgument,
                    "state of a rank: names, dtypes or shapes differ from those that the buffers "
                    "of node '{}' were made for",
                    node);
  }
  for (const auto& [node, known] : known_by_) {
    if (!refused.ok() || known == digest) {
      council_->Tell(node, AllTables{digest, 0, 1, "", refused});
      continue;
    }
    const size_t parts = (all.size() + kTablesPartBytes - 1) / kTablesPartBytes;
    for (size_t part = 0; part < parts; ++part) {
      council_->Tell(
          node, AllTables{digest, static_cast<uint32_t>(part), static_cast<uint32_t>(parts),
                          all.substr(part * kTablesPartBytes, kTablesPartBytes), absl::OkStatus()});
    }
  }
}

void SaveService::Nodes::Take(const std::string&, const AllTables& all) {
  if (!all.refused.ok()) return RefuseTables(all.refused);
  council_->Answered("tables");
  if (all.bytes.empty()) {  // those that it told are those that it has
    if (all.digest != known_) return;
    for (const Waiter& waiter : std::exchange(of_.buffer_waiters_, {})) of_.AnswerBuffers(waiter);
    return;
  }
  if (all.part == 0) parts_.clear();
  parts_ += all.bytes;
  if (parts_.size() > kMaxTablesBytes + (1 << 20)) return parts_.clear();
  if (all.part + 1 < all.parts || of_.making_) return;
  const std::string tables = std::exchange(parts_, {});
  if (DigestOf(tables) != all.digest) {
    return RefuseTables(Error(absl::StatusCode::kDataLoss,
                              "tables of all ranks, {} bytes: not those of digest {}",
                              tables.size(), all.digest.substr(0, 16)));
  }
  if (all.digest == known_ && !AnyLacksBuffers()) return;
  wanted_digest_ = all.digest;
  making_ranks_ = ranks_;
  making_world_ = world_;
  MakeBuffers(tables);
}

// A disk that hangs may hold up a writer of an ended generation, who reads the plan that there was.
void SaveService::Nodes::MakeBuffers(const std::string& tables) {
  if (written_.empty()) return of_.MakeBuffersLater(of_.NeedsOf(tables, ranks_));
  of_.keeper_.loop().RunAfter(kRetry, [this, alive = alive_, generation = of_.generation_, tables] {
    if (*alive && generation == of_.generation_) MakeBuffers(tables);
  });
}

bool SaveService::Nodes::AnyLacksBuffers() const {
  for (size_t slot = 0; slot < ranks_.size(); ++slot) {
    if (ranks_[slot] >= 0 && !has_buffers(slot)) return true;
  }
  return false;
}

void SaveService::Nodes::OnBuffersMade(const absl::Status& status) {
  if (!status.ok()) return;
  // A generation that began meanwhile asks again where it has other places for the ranks.
  known_ = wanted_digest_;
  made_for_ = making_ranks_;
  made_world_ = making_world_;
  of_.table_->SetLed();
  if (made_for_ != ranks_ || made_world_ != world_) LeaveOldBuffers();
}

void SaveService::Nodes::RefuseTables(const absl::Status& why) {
  council_->Answered("tables");
  for (const Waiter& waiter : std::exchange(of_.buffer_waiters_, {})) {
    of_.tables_[static_cast<size_t>(waiter.slot)].clear();
    of_.keeper_.Answer(waiter.slot, waiter.request, Annotate(why, "snapshot buffers"));
  }
}

// --- Saves, on every node

namespace {
std::string TopicOf(int64_t step) { return fmt::format("step {}", step); }
}  // namespace

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
  if (decided.common) common_ = std::max(common_, decided.step);
  if (!decided.common) passed_ = std::max(passed_, decided.step + 1);
  WriteOtherRows();
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
  if (is_lead()) return;  // it has told its own already
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
}

void SaveService::Nodes::OnAllFinish(int64_t step) {
  council_->TellLead("finish", FinishAsked{{of_.generation_, step}});
}

// The agents agree only while a generation stands.
void SaveService::Nodes::OnPersistCommon(const std::string& reason) {
  if (!council_->is_open()) return of_.keeper_.Dispatch(StopPersisted{of_.durable_step_, false});
  council_->TellLead("persist", PersistAsked{HeldHere(), reason});
}

// The other agents may be gone, so nothing can be saved any more.
absl::Status SaveService::Nodes::PersistLast() const {
  const std::vector<SnapshotKey> held = HeldHere();
  if (held.empty() || held.back().step <= of_.durable_step_) return absl::OkStatus();
  return Error(absl::StatusCode::kUnavailable,
               "step {} is in memory, step {} in the root: after the trainers' end the agents of "
               "several nodes save nothing more",
               held.back().step, of_.durable_step_);
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
    Say({verdict.step, true, true, ""});
    of_.QueueSave({verdict.step, verdict.sealed.snapshot.generation, verdict.sealed.last, {}});
  }
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
  request.generation = of_.generation_;
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
void SaveService::Nodes::WantSave() {
  if (!council_->is_open() || !has_restored_) return;
  const int64_t newest = of_.NewestStep();
  if (wanted_step_ != kNoStep && newest <= wanted_step_ + notice_) return;
  if (wanted_step_ != kNoStep) {
    notice_ = std::min(2 * notice_, kLongestNotice);
    Decide(tally_.Skipped(wanted_step_, "a rank was past it when it was asked for"));
  }
  wanted_step_ = newest + notice_;
  council_->TellAll(StepWanted{wanted_step_});
}

void SaveService::Nodes::Take(const std::string&, const StepWanted& wanted) {
  if (of_.table_) of_.table_->SetWantedStep(wanted.step);
}

// --- Restore, on every node

void SaveService::Nodes::NextRound() {
  ++round_;
  has_restored_ = false;
}

void SaveService::Nodes::OnAllChoose() {
  council_->TellLead("restore", RestoreAsked{{round_, of_.restoring_.attempt}, HeldHere()});
}

void SaveService::Nodes::Take(const std::string&, const RestoreChosen& chosen) {
  if (chosen.at != RestoreTry{round_, of_.restoring_.attempt} || of_.restoring_.choice) return;
  if (static_cast<int>(of_.restoring_.choosers.size()) < of_.members()) return;
  council_->Answered("restore");
  std::optional<SnapshotKey> kept;
  absl::Status refused = chosen.refused;
  if (refused.ok() && chosen.source == RestoreSource::kMemory) {
    kept = chosen.snapshot;
    if (!Find(*kept)) {
      refused = Error(absl::StatusCode::kInternal, "snapshot of step {}: gone from node '{}'",
                      kept->step, council_->self());
    }
  }
  if (!refused.ok()) {
    for (const Waiter& waiter : std::exchange(of_.restoring_.choosers, {}))
      of_.keeper_.Answer(waiter.slot, waiter.request, refused);
    return;
  }
  RestoreChoice choice{.source = chosen.source, .step = chosen.snapshot.step};
  if (kept) choice.generation = kept->generation;
  if (!chosen.checkpoint.empty()) choice.folder = of_.opened_->root->PathOf(chosen.checkpoint);
  KeepOnly(kept);
  of_.restoring_.choice = std::move(choice);
  of_.AnswerChoosers();
}

// All ranks wait for the choice: memory is put in order, so that a later snapshot of the same step
// is not taken for this one.
void SaveService::Nodes::KeepOnly(const std::optional<SnapshotKey>& key) {
  std::optional<Save> kept;
  if (key) kept = Find(*key);
  of_.base_.reset();
  if (kept) {
    of_.base_ = Common{key->generation, key->step, {}};
    for (const auto& held : kept->held) of_.base_->held.push_back(held.value_or(Held{}));
  }
  common_ = kept ? key->step : kNoStep;
  passed_ = kNoStep;
  WriteOtherRows();
  for (size_t slot = 0; slot < ranks_.size(); ++slot) {
    if (!has_buffers(slot)) continue;
    HeldSteps held;
    held.buffers = static_cast<int>(of_.buffers_[slot].size());
    for (size_t i = 0; i < of_.buffers_[slot].size(); ++i) {
      if (kept && kept->held[slot]->buffer == static_cast<int>(i)) {
        held.step[i] = key->step;
      } else {
        BufferControl control = of_.buffers_[slot][i].control();
        const ControlWord word = control.Read();
        if (word.state == BufferState::kSealed) control.Discard(word.turn);
      }
    }
    of_.table_->Write(ranks_[slot], held);
  }
}

void SaveService::Nodes::OnAllVoted() {
  RestoreVoted voted{{round_, of_.restoring_.attempt},
                     !of_.restoring_.failed,
                     of_.restoring_.mismatch,
                     of_.restoring_.passed_over};
  council_->TellLead("vote", voted);
}

void SaveService::Nodes::Take(const std::string&, const RestoreJudged& judged) {
  if (judged.at != RestoreTry{round_, of_.restoring_.attempt} || !of_.restoring_.choice) return;
  council_->Answered("vote");
  const auto voters = std::exchange(of_.restoring_.voters, {});
  if (!judged.mismatch.empty()) {
    of_.restoring_.done = true;
    const absl::Status status = Error(absl::StatusCode::kInvalidArgument, "{}", judged.mismatch);
    for (const auto& [slot, waiter] : voters) of_.keeper_.Answer(slot, waiter.request, status);
    return;
  }
  if (judged.restored) {
    has_restored_ = true;
    of_.OnRestored(*of_.restoring_.choice);
  } else {
    ++of_.restoring_.attempt;
    of_.restoring_.choice.reset();
    if (!is_lead()) of_.restoring_.passed_over.clear();
  }
  of_.restoring_.failed = false;
  for (const auto& [slot, waiter] : voters) {
    of_.keeper_.Answer(slot, waiter.request, absl::OkStatus(),
                       PayloadWriter().Int(static_cast<uint8_t>(judged.restored)).bytes());
  }
}

// --- Restore, at the lead

void SaveService::Nodes::Take(const std::string& node, const RestoreAsked& asked) {
  if (!is_lead()) return;
  if (asked.at.round > at_.round) {
    at_ = {asked.at.round, 0};
    asked_.clear();
    votes_.clear();
    chosen_.reset();
    judged_.reset();
  }
  if (chosen_ && chosen_->at == asked.at) return council_->Tell(node, *chosen_);
  if (asked.at != at_) return;
  asked_[node] = asked.held;
  ChooseIfAllAsked();
}

void SaveService::Nodes::ChooseIfAllAsked() {
  if (asked_.size() < active_.size() || of_.restoring_.choosing) return;
  if (!has_claim_) {
    wants_choice_ = true;
    return;
  }
  const std::optional<SnapshotKey> common = NewestCommon(std::exchange(asked_, {}));
  if (common && !of_.restoring_.memory_is_bad) {
    return TellChoice(
        {.source = RestoreSource::kMemory, .step = common->step, .generation = common->generation});
  }
  of_.restoring_.choosing = true;
  of_.ChooseFromDisk();
}

void SaveService::Nodes::TellChoice(const RestoreChoice& choice) {
  RestoreChosen chosen{.at = at_, .refused = {}, .source = choice.source, .snapshot = {}};
  chosen.snapshot = {choice.generation, choice.step};
  if (choice.is_of_files()) chosen.checkpoint = choice.folder.substr(choice.folder.rfind('/') + 1);
  chosen_ = chosen;
  council_->TellAll(chosen);
}

void SaveService::Nodes::TellNoChoice(const absl::Status& status) {
  chosen_ = RestoreChosen{.at = at_, .refused = status, .source = {}, .snapshot = {}};
  council_->TellAll(*chosen_);
}

void SaveService::Nodes::Take(const std::string& node, const RestoreVoted& voted) {
  if (!is_lead()) return;
  if (judged_ && judged_->at == voted.at) return council_->Tell(node, *judged_);
  if (voted.at != at_ || !chosen_ || chosen_->at != at_) return;
  votes_[node] = voted;
  JudgeIfAllVoted();
}

// The same as one node does with its ranks' votes; of memory's copies in other nodes nothing is
// known yet.
void SaveService::Nodes::JudgeIfAllVoted() {
  if (votes_.size() < active_.size()) return;
  bool ok = true, mismatch = false;
  std::vector<std::string>& reasons = of_.restoring_.passed_over;
  for (const auto& [node, vote] : votes_) {
    ok = ok && vote.ok;
    mismatch = mismatch || vote.mismatch;
    if (node == council_->self()) continue;  // those are there already
    for (const std::string& reason : vote.reasons) reasons.push_back(reason);
  }
  votes_.clear();
  RestoreJudged judged{at_, ok, ""};
  const std::string reason = reasons.empty() ? "no reason given" : reasons.back();
  if (mismatch) {
    judged.restored = false;
    judged.mismatch = reason;
  } else if (!ok) {
    const bool is_memory = chosen_->source == RestoreSource::kMemory;
    of_.options_.observer.on_note(fmt::format("restore of step {} from {} failed: {}",
                                              chosen_->snapshot.step,
                                              is_memory ? "memory" : chosen_->checkpoint, reason));
    if (is_memory) {
      of_.restoring_.memory_is_bad = true;
    } else {
      of_.restoring_.bad_folders.insert(chosen_->checkpoint);
      of_.readers().Post([opened = of_.opened_, name = chosen_->checkpoint, reason] {
        opened->root->Quarantine(name, reason).IgnoreError();
      });
    }
    ++at_.attempt;
  }
  judged_ = judged;
  council_->TellAll(judged);
}

}  // namespace outlast
