// Where all ranks restore from: the service proposes, every rank tries and votes.
#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "checkpoint/save_service_nodes.h"

namespace outlast {
namespace {

constexpr size_t kMaxShares = 250;  // a message carries 253 descriptors (SCM_MAX_FD)

absl::Status Aborted(uint64_t generation) {
  return Error(absl::StatusCode::kAborted, "generation {} ended", generation);
}

// Whether a rank's tensors lie, box for box, in another's buffers too.
bool HoldsAllOf(const RankTable& wanted, const RankTable& other) {
  return std::ranges::all_of(wanted.rows, [&](const TensorRow& row) {
    return std::ranges::any_of(other.rows, [&](const TensorRow& held) {
      return held.name == row.name && held.boxes.front().box == row.boxes.front().box;
    });
  });
}

}  // namespace

void SaveService::OnChoose(int slot, const Message& message) {
  PayloadReader reader(message.payload);
  const auto attempt = reader.Int<uint32_t>();
  if (message.generation < generation_)
    return keeper_.Answer(slot, message.request, Aborted(message.generation));
  if (restoring_.done) {
    EndRestoring();
    restoring_.again = !nodes_;
    if (nodes_) nodes_->NextRound();
  }
  if (attempt != restoring_.attempt) {
    return keeper_.Answer(
        slot, message.request,
        Error(absl::StatusCode::kInternal, "restore attempt {} of slot {}: attempt {} is under way",
              attempt, slot, restoring_.attempt));
  }
  restoring_.choosers.push_back({slot, message.request});
  if (restoring_.choice) return AnswerChoosers();
  if (nodes_) {
    if (static_cast<int>(restoring_.choosers.size()) == members()) nodes_->OnAllChoose();
    return;
  }
  if (std::exchange(restoring_.again, false)) {
    // Memory has changed since the generation began; it may be put in order once nobody trains.
    restoring_.again = static_cast<int>(restoring_.choosers.size()) < members();
    if (restoring_.again) return;
    KeepTheCommonOnly();
  }
  if (!restoring_.choosing) Choose();
}

// Survivors that allow it bring their state back while the lost ranks' new processes start.
void SaveService::OnQuiet() {
  if (buffers_.empty() || nodes_) return;
  const std::optional<Common> common = FindCommon();
  if (!common) return;
  RestoreChoice choice{
      .source = RestoreSource::kMemory, .step = common->step, .generation = common->generation};
  for (int slot = 0; slot < slots_; ++slot) {
    if (!keeper_.is_joined(slot) || keeper_.is_finished(slot)) continue;
    const Held& held = common->held[static_cast<size_t>(slot)];
    choice.buffer = static_cast<uint32_t>(held.buffer);
    choice.turn = held.turn;
    keeper_.Send(slot, {.kind = MessageKind::kAhead, .payload = choice.Encode()});
  }
}

void SaveService::Choose() {
  restoring_.choosing = true;
  if (base_ && !restoring_.memory_is_bad) {
    return Decide(
        {.source = RestoreSource::kMemory, .step = base_->step, .generation = base_->generation});
  }
  ChooseFromDisk();
}

void SaveService::ChooseFromDisk() {
  // A fresh start restores nothing of what was there before, but does restore what it committed
  // itself.
  const StartMode mode =
      opened_->resume || committed_here_ ? StartMode::kResume : StartMode::kFresh;
  const StartPoint start = committed_here_ ? StartPoint{} : options_.start;
  readers().Post([this, alive = alive_, &loop = keeper_.loop(), opened = opened_, mode, start,
                  tier = tier_.get(), generation = generation_, attempt = restoring_.attempt] {
    const auto decide = [&]() -> absl::StatusOr<Candidates> {
      Candidates found;
      found.mode = mode;
      const auto of = [&](const Listing& listing) {
        return mode == StartMode::kFresh
                   ? DecideStart(listing, mode)
                   : DecideStartFrom(start, listing, opened->root->path(), &found.elsewhere);
      };
      if (tier == nullptr || !start.folder.empty()) {
        OUTLAST_ASSIGN_OR_RETURN(const Listing listing, opened->root->List());
        OUTLAST_ASSIGN_OR_RETURN(found.decision, of(listing));
        found.local = found.decision.candidates;
        return found;
      }
      OUTLAST_ASSIGN_OR_RETURN(TierView view, tier->View(&found.note));
      OUTLAST_ASSIGN_OR_RETURN(found.decision, of(view.listing));
      found.local = std::move(view.local);
      found.remote = std::move(view.remote);
      return found;
    };
    loop.Post([this, alive, generation, attempt, candidates = decide()] {
      if (*alive) OnCandidates(generation, attempt, candidates);
    });
  });
}

// The newest one that was not tried in vain; empty: none.
std::string SaveService::NewestUsable(const Candidates& candidates, const Restoring& restoring) {
  const auto holds = [](const std::vector<std::string>& names, const std::string& name) {
    return std::ranges::find(names, name) != names.end();
  };
  for (const std::string& name : candidates.decision.candidates) {
    if ((holds(candidates.local, name) && !restoring.bad_folders.contains(name)) ||
        (holds(candidates.remote, name) && !restoring.bad_remote.contains(name)))
      return name;
  }
  return "";
}

void SaveService::OnCandidates(uint64_t generation, uint32_t attempt,
                               const absl::StatusOr<Candidates>& candidates) {
  if (generation != generation_ || attempt != restoring_.attempt || !restoring_.choosing) return;
  if (nodes_) {
    // What memory goes on from lies in this root.
    const bool is_here = candidates.ok() && candidates->elsewhere.empty();
    const std::string newest = is_here ? NewestUsable(*candidates, restoring_) : std::string();
    if (nodes_->FetchesInstead(newest)) return;
  }
  std::string error;
  if (!candidates.ok()) {
    error = std::string(MessageOf(candidates.status()));
  } else {
    if (!candidates->note.empty()) options_.observer.on_note(candidates->note);
    if (attempt == 0 && restoring_.bad_remote.empty()) {
      for (const std::string& skipped : candidates->decision.skipped)
        options_.observer.on_note("checkpoint passed over: " + skipped);
    }
    const auto holds = [](const std::vector<std::string>& names, const std::string& name) {
      return std::ranges::find(names, name) != names.end();
    };
    for (const std::string& name : candidates->decision.candidates) {
      if (holds(candidates->local, name) && !restoring_.bad_folders.contains(name)) {
        const auto parts = ParseCheckpointName(name);
        const std::string& elsewhere = candidates->elsewhere;
        return Decide({.source = RestoreSource::kDisk,
                       .step = parts ? parts->step : 0,
                       .folder = elsewhere.empty() ? opened_->root->PathOf(name)
                                                   : fmt::format("{}/{}", elsewhere, name)});
      }
      // The same step from another source before an older one.
      if (holds(candidates->remote, name) && !restoring_.bad_remote.contains(name)) {
        options_.observer.on_note("restoring from the remote root: " + name);
        const auto parts = ParseCheckpointName(name);
        return Decide({.source = RestoreSource::kRemote,
                       .step = parts ? parts->step : 0,
                       .folder = checkpointer_.remote.uri + "/" + name});
      }
    }
    // Nothing was ever saved, or a fresh start was asked for: step 0. But never because all that
    // there was failed, or because the remote root could not be looked at.
    const bool all_was_seen = candidates->note.empty() || candidates->mode == StartMode::kFresh;
    began_at_zero_ = began_at_zero_ || (restoring_.passed_over.empty() && all_was_seen);
    if (restoring_.passed_over.empty() && began_at_zero_ && (all_was_seen || !committed_here_))
      return Decide({});
    error = candidates->note;
  }
  for (const std::string& one : restoring_.passed_over) error += (error.empty() ? "" : "; ") + one;
  const absl::Status status = Error(absl::StatusCode::kDataLoss,
                                    "no checkpoint in {} restores: {} (start over with --fresh)",
                                    opened_->root->path(), error);
  if (nodes_) {
    nodes_->TellNoChoice(status);
  } else {
    for (const Waiter& waiter : std::exchange(restoring_.choosers, {}))
      keeper_.Answer(waiter.slot, waiter.request, status);
  }
  restoring_.choosing = false;
  keeper_.Dispatch(RestoreFailed{std::string(MessageOf(status))});
}

// Every node's agent opens what was chosen for its own ranks. One that cannot says so in its ranks'
// place: they vote.
void SaveService::OpenReads() {
  if (std::exchange(restoring_.opening_reads, true)) return;
  MakeFetchThread();
  const std::string& folder = restoring_.choice->folder;
  fetch_->Post([this, alive = alive_, &loop = keeper_.loop(), tier = tier_.get(),
                options = TierOptions(), name = folder.substr(folder.rfind('/') + 1),
                slots = slots_, generation = generation_, attempt = restoring_.attempt] {
    const auto open = [&]() -> absl::StatusOr<std::shared_ptr<RemoteReads>> {
      std::shared_ptr<RemoteRoot> root;
      if (tier != nullptr) {
        OUTLAST_ASSIGN_OR_RETURN(root, tier->Remote());
      } else {
        OUTLAST_ASSIGN_OR_RETURN(root, OpenRemote(options));
      }
      return RemoteReads::Open(std::move(root), name, slots);
    };
    loop.Post([this, alive, generation, attempt, opened = open()] {
      if (!*alive || generation != generation_ || attempt != restoring_.attempt ||
          !restoring_.opening_reads || !restoring_.choice)
        return;
      if (opened.ok()) {
        restoring_.reads = *opened;
      } else {
        restoring_.choice->error = MessageOf(opened.status());
      }
      AnswerChoosers();
    });
  });
}

// Its end may wait for a store that hangs.
void SaveService::ForgetReads() {
  restoring_.opening_reads = false;
  if (!restoring_.reads) return;
  restoring_.reads->Cancel();
  MakeFetchThread();
  fetch_->Post([reads = std::exchange(restoring_.reads, nullptr)]() mutable { reads.reset(); });
}

void SaveService::EndRestoring() {
  ForgetReads();
  restoring_ = {};
}

void SaveService::OnReadRange(int slot, const Message& message) {
  const auto wanted = RangeWanted::Decode(message.payload);
  if (!wanted.ok()) return keeper_.Answer(slot, message.request, wanted.status());
  if (message.generation < generation_ || wanted->attempt != restoring_.attempt ||
      !restoring_.reads)
    return keeper_.Answer(slot, message.request, Aborted(message.generation));
  restoring_.reads->Read(slot, *wanted,
                         [this, alive = alive_, &loop = keeper_.loop(), slot,
                          request = message.request](absl::Status status) {
                           loop.Post([this, alive, slot, request, status = std::move(status)] {
                             if (*alive) keeper_.Answer(slot, request, status);
                           });
                         });
}

void SaveService::Decide(RestoreChoice choice) {
  restoring_.choosing = false;
  if (nodes_) return nodes_->TellChoice(choice);
  restoring_.choice = std::move(choice);
  AnswerChoosers();
}

void SaveService::AnswerChoosers() {
  const bool is_remote = restoring_.choice->source == RestoreSource::kRemote;
  if (is_remote && !restoring_.reads && restoring_.choice->error.empty()) return OpenReads();
  for (const Waiter& waiter : std::exchange(restoring_.choosers, {})) {
    RestoreChoice choice = *restoring_.choice;
    std::vector<int> fds;
    if (is_remote && restoring_.reads)
      fds = {restoring_.reads->head_fd(), restoring_.reads->window_fd(waiter.slot)};
    if (choice.is_of_files()) choice.mates = Mates();
    if (choice.source == RestoreSource::kMemory) {
      const Held& held = base_->held[static_cast<size_t>(waiter.slot)];
      choice.buffer = static_cast<uint32_t>(held.buffer);
      choice.turn = held.turn;
      if (nodes_ && nodes_->is_from_peer(static_cast<size_t>(waiter.slot)))
        choice.source = RestoreSource::kPeer;
      if (const auto server = restoring_.server.find(waiter.slot);
          server != restoring_.server.end()) {
        const auto of = static_cast<size_t>(server->second);
        choice.served_by = static_cast<uint32_t>(of);
        choice.served_turn = base_->held[of].turn;
        fds.push_back(buffers_[of][static_cast<size_t>(base_->held[of].buffer)].fd());
      }
    }
    keeper_.Answer(waiter.slot, waiter.request, absl::OkStatus(), choice.Encode(), fds);
  }
}

// A barrier: no rank looks into another's buffer before that has its share.
void SaveService::OnGather(int slot, const Message& message) {
  PayloadReader reader(message.payload);
  const auto attempt = reader.Int<uint32_t>();
  const auto share = reader.Int<Share>();
  const auto buffer = reader.Int<uint32_t>();
  if (!reader.ok() || share > Share::kFailed || message.generation < generation_ ||
      attempt != restoring_.attempt || !restoring_.choice ||
      (share == Share::kReady && buffer >= buffers_[static_cast<size_t>(slot)].size())) {
    return keeper_.Answer(slot, message.request, Aborted(message.generation));
  }
  restoring_.gatherers[slot] = {{slot, message.request}, share, buffer};
  if (restoring_.failed) return EndGathering(Share::kFailed);
  if (static_cast<int>(restoring_.gatherers.size()) < members()) return;
  EndGathering(Share::kReady);
}

// `all` is the least bad that the answer may be.
void SaveService::EndGathering(Share all) {
  std::map<int, int> fds_by_rank;
  for (const auto& [member, gatherer] : restoring_.gatherers) {
    all = std::max(all, gatherer.share);
    if (gatherer.share == Share::kReady) {
      fds_by_rank[keeper_.rank(member)] =
          buffers_[static_cast<size_t>(member)][gatherer.buffer].fd();
    }
  }
  std::vector<int> fds;
  if (all == Share::kReady) {
    for (const auto& [rank, fd] : fds_by_rank) fds.push_back(fd);
  }
  const std::string answer = PayloadWriter().Int(all).bytes();
  for (const auto& [member, gatherer] : std::exchange(restoring_.gatherers, {}))
    keeper_.Answer(member, gatherer.waiter.request, absl::OkStatus(), answer, fds);
}

// A rank whose work is done reads no share.
std::vector<uint32_t> SaveService::Mates() const {
  std::vector<uint32_t> ranks;
  for (int slot = 0; slot < slots_; ++slot) {
    const bool is_member =
        generation_members_.empty() ||
        std::ranges::find(generation_members_, slot) != generation_members_.end();
    if (is_member && !keeper_.is_finished(slot) && keeper_.rank(slot) >= 0)
      ranks.push_back(static_cast<uint32_t>(keeper_.rank(slot)));
  }
  std::ranges::sort(ranks);
  if (ranks.size() > kMaxShares) ranks.clear();
  return ranks;
}

void SaveService::OnVote(int slot, const Message& message) {
  PayloadReader reader(message.payload);
  const auto attempt = reader.Int<uint32_t>();
  const bool ok = reader.Int<uint8_t>() != 0;
  const bool mismatch = reader.Int<uint8_t>() != 0;
  const std::string_view detail = reader.Text();
  if (!reader.ok() || message.generation < generation_ || attempt != restoring_.attempt ||
      !restoring_.choice) {
    return keeper_.Answer(slot, message.request, Aborted(message.generation));
  }
  restoring_.voters[slot] = {slot, message.request};
  restoring_.failed = restoring_.failed || !ok;
  restoring_.mismatch = restoring_.mismatch || mismatch;
  if (!ok) {
    if (!detail.empty())  // else another rank's failure was its
      restoring_.passed_over.push_back(fmt::format("rank {}: {}", keeper_.rank(slot), detail));
    GiveUpShares();
    restoring_.tried[slot].insert(slot);
    if (const auto server = restoring_.server.find(slot); server != restoring_.server.end())
      restoring_.tried[slot].insert(server->second);
  }
  CountVotes();
}

// No rank has this checkpoint any more: those that wait for the failed one's share, and those that
// still read from afar, hear of it at once.
void SaveService::GiveUpShares() {
  if (!restoring_.gatherers.empty()) EndGathering(Share::kFailed);
  if (restoring_.reads) restoring_.reads->Cancel();
}

void SaveService::CountVotes() {
  if (static_cast<int>(restoring_.voters.size()) < members()) return;
  if (nodes_) return nodes_->OnAllVoted();
  const auto voters = std::exchange(restoring_.voters, {});
  const RestoreChoice choice = *restoring_.choice;
  if (restoring_.mismatch) {  // the program's own error: no other source would fit better
    const absl::Status status =
        Error(absl::StatusCode::kInvalidArgument, "{}", restoring_.passed_over.front());
    ForgetReads();
    restoring_.done = true;
    for (const auto& [slot, waiter] : voters) keeper_.Answer(slot, waiter.request, status);
    return;
  }
  if (!restoring_.failed) {
    OnRestored(choice);
  } else {
    const std::string reason = restoring_.passed_over.back();
    options_.observer.on_note(
        fmt::format("restore of step {} from {} failed: {}", choice.step,
                    choice.source == RestoreSource::kMemory ? "memory" : choice.folder, reason));
    if (choice.source == RestoreSource::kMemory) {
      if (!ServeFromReplicas()) {
        restoring_.memory_is_bad = true;
        ForgetMemory();
      }
    } else {
      PassOver(choice.source, choice.folder, reason);
    }
    ForgetReads();
    ++restoring_.attempt;
    restoring_.choice.reset();
  }
  const auto restored = static_cast<uint8_t>(!restoring_.failed);
  restoring_.failed = false;
  for (const auto& [slot, waiter] : voters) {
    keeper_.Answer(slot, waiter.request, absl::OkStatus(), PayloadWriter().Int(restored).bytes());
  }
}

// A remote copy is only not tried again: a store that could not be read may be whole.
void SaveService::PassOver(RestoreSource source, const std::string& place,
                           const std::string& reason) {
  const bool is_elsewhere = place.starts_with(kElsewhere);
  const std::string name =
      is_elsewhere ? place.substr(kElsewhere.size()) : place.substr(place.rfind('/') + 1);
  if (source == RestoreSource::kRemote) {
    restoring_.bad_remote.insert(name);
    return;
  }
  restoring_.bad_folders.insert(name);
  // Another root is only read.
  if (is_elsewhere || (place != name && place != opened_->root->PathOf(name))) return;
  readers().Post(
      [opened = opened_, name, reason] { opened->root->Quarantine(name, reason).IgnoreError(); });
}

bool SaveService::is_elsewhere(const RestoreChoice& choice) const {
  if (choice.source != RestoreSource::kDisk) return false;
  const std::string name = choice.folder.substr(choice.folder.rfind('/') + 1);
  return choice.folder != opened_->root->PathOf(name);
}

void SaveService::OnRestored(const RestoreChoice& choice) {
  ForgetReads();
  restoring_.done = true;
  const bool is_in_root = choice.is_of_files() && !is_elsewhere(choice);
  durable_step_ = is_in_root             ? choice.step
                  : choice.is_of_files() ? 0
                                         : std::min(durable_step_, choice.step);
  if (is_in_root) {
    parent_ = choice.folder.substr(choice.folder.rfind('/') + 1);
    if (tier_) tier_->OnRestored(choice.step, *parent_);
  } else if (choice.source == RestoreSource::kNone || choice.is_of_files()) {
    parent_.reset();
  }
  if (tier_ && !is_in_root) tier_->OnRestored(choice.step, "");
  KeepLast();
  const bool is_from_peer =
      choice.source == RestoreSource::kMemory && nodes_ && nodes_->is_any_from_peer();
  options_.observer.on_restored(generation_, is_from_peer ? RestoreSource::kPeer : choice.source,
                                choice.step);
}

// The same step from another source before an older one: each damaged snapshot's rank is served by
// another rank's buffer that holds what it needs. False: some rank has no replica left.
bool SaveService::ServeFromReplicas() {
  restoring_.server.clear();
  for (const auto& [slot, tried] : restoring_.tried) {
    const std::optional<int> replica = ReplicaOf(slot);
    if (!replica) return false;
    restoring_.server[slot] = *replica;
    options_.observer.on_note(
        fmt::format("rank {}'s snapshot of step {} is damaged: rank {}'s serves it", slot,
                    base_->step, *replica));
  }
  return true;
}

std::optional<int> SaveService::ReplicaOf(int slot) const {
  const auto own = static_cast<size_t>(slot);
  for (int other = 0; other < slots_; ++other) {
    const bool is_damaged = restoring_.tried.contains(other);
    if (is_damaged || restoring_.tried.at(slot).contains(other)) continue;
    if (HoldsAllOf(rank_tables_[own], rank_tables_[static_cast<size_t>(other)])) return other;
  }
  return std::nullopt;
}

}  // namespace outlast
