#include "checkpoint/save_service_nodes.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "checkpoint/save_service_copies.h"
#include "outlast/base/clock.h"
#include "outlast/base/digest.h"
#include "outlast/base/memory.h"
#include "outlast/elastic/messages.h"

namespace outlast {
namespace {

constexpr size_t kTablesPartBytes = 1 << 20;
constexpr absl::Duration kRetry = absl::Milliseconds(100);

std::string DigestOf(std::string_view bytes) {
  std::string hex;
  for (const std::byte byte : Sha256(bytes)) hex += fmt::format("{:02x}", byte);
  return hex;
}

// What this run has committed in a root, by folder.
using Heads = std::vector<std::pair<std::string, Manifest>>;
Heads HeadsOf(const Root& root) {
  Heads heads;
  const auto listing = root.List(Root::Look::kManifests);
  if (!listing.ok()) return heads;
  std::set<uint64_t> own;
  for (const ClaimFile& claim : listing->claims) {
    if (claim.claim && claim.claim->run == root.run()) own.insert(claim.number);
  }
  for (const CheckpointInfo& info : listing->checkpoints) {
    if (info.state == CheckpointState::kCommitted && info.manifest &&
        own.contains(info.manifest->claim))
      heads.emplace_back(info.name, *info.manifest);
  }
  return heads;
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
                if (!is_lead() || !lead_) return;
                council_->Tell(node, claimed_);
                if (common_told_) council_->Tell(node, *common_told_);
                if (copies_) copies_->OnUp(node);
                lead_->OnUp(node);
              },
          .on_lost =
              [this](const std::string& node, const std::string& why) {
                if (is_lead() && lead_) lead_->OnLost(node, why);
              },
      });
  copies_ = Copies::Start(*this);
}

SaveService::Nodes::~Nodes() {
  *alive_ = false;
  council_->Leave();
  copies_.reset();
  lead_.reset();
  member_.reset();
  disk_.reset();
}

void SaveService::Nodes::Hear(const std::string& node, const CouncilMessage& message) {
  std::visit([&](const auto& one) { Take(node, one); }, message);
}

// --- Generations

void SaveService::Nodes::OnCommit(const CommitGeneration& commit) {
  if (copies_) copies_->OnAbort();  // it reads the buffers
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
  told_ = {};
  ++look_;
  sees_root_ = asks_restore_ = false;
  round_ = 0;
  common_ = passed_ = kNoStep;
  void_.clear();
  of_.skipped_.clear();
  parts_.clear();
  tables_.clear();
  known_by_.clear();
  tally_ = SealTally(nodes);
  held_told_.reset();
  common_told_.reset();
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
  base_ = {};
  plan_.reset();
  wanted_step_ = kNoStep;
  notice_ = kFirstNotice;

  LeaveOldBuffers();
  CleanUp();
  // A spare is told of no group.
  if (!nodes.contains(of_.keeper_.node())) return council_->Leave();
  council_->Enter(of_.keeper_.node(), job->map.runs.front().node, nodes);
  if (copies_) {
    copies_->OnCommit(std::move(nodes));
  } else {
    council_->TellLead("", DoorTold{{of_.keeper_.node(), "", ""}});
  }
  if (!is_lead()) GiveUpLead();
  if (has_claim_) council_->TellAll(claimed_);
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
  if (copies_) copies_->OnAbort();
  const std::string reason = "the generation ended";
  EndAwaitedSave(0, absl::UnavailableError(reason));
  aborted_ = std::max(aborted_, generation);
  // Before the save that is under way ends: none may follow it, for nobody would hear of that one.
  of_.finishers_.clear();  // their requests were answered by the abort
  finish_asked_.clear();
  if (const auto queued = std::exchange(of_.queued_, std::nullopt); queued && queued->last)
    of_.keeper_.Dispatch(StopPersisted{queued->step, false});
  if (lead_) lead_->OnAbort(generation, reason);
  if (member_) member_->OnAbort(generation, reason);
  council_->Leave();
  has_restored_ = false;
  ++look_;
  for (const auto& [step, save] : std::exchange(of_.collecting_, {})) Unpin(save);
  for (const auto& [step, save] : std::exchange(awaiting_, {})) Unpin(save);
}

// --- Copies on other nodes

void SaveService::Nodes::Take(const std::string& node, const DoorTold& told) {
  if (copies_ && is_lead()) copies_->Take(node, told);
}

void SaveService::Nodes::Take(const std::string&, const DoorsTold& told) {
  if (copies_) copies_->Take(told);
}

void SaveService::Nodes::Take(const std::string&, const CopyWanted& wanted) {
  if (copies_ && has_restored_) return copies_->Take(wanted);
  council_->TellLead(
      "copy", CopyTold{wanted.snapshot, 0, absl::UnavailableError("it makes no copies now")});
}

void SaveService::Nodes::Take(const std::string& node, const CopyTold& told) {
  if (copies_ && is_lead()) copies_->Take(node, told);
}

void SaveService::Nodes::Take(const std::string&, const FetchWanted& wanted) {
  if (copies_) return copies_->Take(wanted);
  council_->TellLead("fetch", FetchTold{wanted.number, std::nullopt,
                                        absl::UnavailableError("it fetches no copies")});
}

void SaveService::Nodes::Take(const std::string& node, const FetchTold& told) {
  if (copies_ && is_lead()) copies_->Take(node, told);
}

// --- The root

void SaveService::Nodes::OnOpened() {
  MakeMember();
  if (told_.number != 0 && !sees_root_)
    LookForClaim(++look_, Clock::Real().Uptime() + of_.options_.claim_patience);
  TakeLead();
}

void SaveService::Nodes::TakeLead() {
  if (!is_lead() || has_claim_ || is_taking_ || !of_.opened_) return;
  is_taking_ = true;
  of_.io_->Post([this, alive = alive_, &loop = of_.keeper_.loop(), uri = of_.checkpointer_.uri,
                 options = of_.TierOptions(), mode = of_.WantedStart(),
                 need = of_.NeedOf(of_.WantedStart()), committer = of_.options_.committer,
                 start = of_.options_.start] {
    auto opened = OpenToWrite(uri, options, mode, need, committer, start);
    Heads heads;
    RootClaimed claimed;
    if (opened.ok()) {
      const Root& root = *(*opened)->root;
      heads = HeadsOf(root);
      claimed.number = root.claim();
      auto text = root.ClaimText(claimed.number);
      if (text.ok()) {
        claimed.text = *std::move(text);
      } else {
        opened = std::move(text).status();
      }
    }
    loop.Post([this, alive, opened = std::move(opened), heads = std::move(heads),
               claimed = std::move(claimed)] {
      if (*alive) OnLeadOpened(opened, heads, claimed);
    });
  });
}

void SaveService::Nodes::OnLeadOpened(absl::StatusOr<std::shared_ptr<Opened>> opened,
                                      const Heads& heads, RootClaimed claimed) {
  is_taking_ = false;
  if (!opened.ok()) {
    const absl::Status why =
        Annotate(opened.status(), fmt::format("checkpoint root '{}'", of_.checkpointer_.uri));
    of_.keeper_.Dispatch(RootRefused{std::string(MessageOf(why))});
    if (wants_choice_) TellNoChoice(why);
    return;
  }
  has_claim_ = true;
  claimed_ = std::move(claimed);
  of_.opened_ = *std::move(opened);
  of_.committed_here_ = of_.committed_here_ || !heads.empty();
  // What a former lead of this run committed last, and could not tell any more.
  bool is_newer = true;
  while (is_newer && of_.parent_) {
    is_newer = false;
    for (const auto& [name, manifest] : heads) {
      if (manifest.parent != of_.parent_) continue;
      of_.parent_ = name;
      of_.durable_step_ = manifest.step;
      is_newer = true;
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
  council_->TellAll(claimed_);
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

void SaveService::Nodes::Take(const std::string&, const RootClaimed& claimed) {
  if (is_lead() || sees_root_ || claimed == told_) return;
  told_ = claimed;
  LookForClaim(++look_, Clock::Real().Uptime() + of_.options_.claim_patience);
}

void SaveService::Nodes::LookForClaim(uint64_t look, absl::Duration until) {
  if (told_ == seen_) return OnClaimLookedFor(look, until, true);
  if (!of_.opened_) return;  // OnOpened asks anew
  of_.io_->Post([this, alive = alive_, &loop = of_.keeper_.loop(), opened = of_.opened_, look,
                 until, told = told_] {
    const auto text = opened->root->ClaimText(told.number);
    loop.Post([this, alive, look, until, is_seen = text.ok() && *text == told.text] {
      if (*alive) OnClaimLookedFor(look, until, is_seen);
    });
  });
}

void SaveService::Nodes::OnClaimLookedFor(uint64_t look, absl::Duration until, bool is_seen) {
  if (look != look_) return;
  if (is_seen) {
    seen_ = told_;
    sees_root_ = true;
    if (std::exchange(asks_restore_, false)) OnAllChoose();
    return;
  }
  if (Clock::Real().Uptime() >= until) return RefuseRoot();
  of_.keeper_.loop().RunAfter(kRetry, [this, alive = alive_, look, until] {
    if (*alive && look == look_) LookForClaim(look, until);
  });
}

// A lead with another root would let all start anew there, or none of them save.
void SaveService::Nodes::RefuseRoot() {
  of_.keeper_.Dispatch(
      RootRefused{fmt::format("checkpoint root '{}' on node '{}' is not the folder that node '{}' "
                              "(the lead) has; a folder that all nodes see wanted",
                              of_.checkpointer_.uri, council_->self(), council_->lead())});
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

}  // namespace outlast
