// Where all ranks of a job of several nodes restore from: every node's part, and the lead's.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "checkpoint/save_service_copies.h"
#include "checkpoint/save_service_nodes.h"

namespace outlast {

// --- Restore, on every node

void SaveService::Nodes::NextRound() {
  ++round_;
  has_restored_ = false;
  held_told_.reset();
}

void SaveService::Nodes::OnAllChoose() {
  if (!is_lead() && !sees_root_) {
    asks_restore_ = true;
    return;
  }
  RestoreAsked asked{{round_, of_.restoring_.attempt}, HeldHere(), {}};
  if (copies_) asked.copies = copies_->Names();
  council_->TellLead("restore", asked);
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
  if (kept && !chosen.checkpoint.empty() && !of_.parent_) {
    // This agent is new: what the others' memory goes on from.
    of_.parent_ = chosen.checkpoint;
    const auto parts = ParseCheckpointName(chosen.checkpoint);
    if (parts) of_.durable_step_ = parts->step;
  } else if (chosen.source == RestoreSource::kRemote) {
    choice.folder = of_.checkpointer_.remote.uri + "/" + chosen.checkpoint;
  } else if (!kept && chosen.checkpoint.starts_with(kElsewhere)) {
    choice.folder = RootElsewhere(of_.options_.start.folder) + "/" +
                    chosen.checkpoint.substr(kElsewhere.size());
  } else if (!kept && !chosen.checkpoint.empty()) {
    choice.folder = of_.opened_->root->PathOf(chosen.checkpoint);
  }
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
  of_.ForgetReads();
  if (!judged.mismatch.empty()) {
    of_.restoring_.done = true;
    const absl::Status status = Error(absl::StatusCode::kInvalidArgument, "{}", judged.mismatch);
    for (const auto& [slot, waiter] : voters) of_.keeper_.Answer(slot, waiter.request, status);
    return;
  }
  if (judged.restored) {
    has_restored_ = true;
    if (copies_) copies_->OnRestored(of_.restoring_.choice->step);
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
    common_told_.reset();
  }
  if (chosen_ && chosen_->at == asked.at) return council_->Tell(node, *chosen_);
  if (asked.at != at_) return;
  asked_[node] = asked.held;
  if (copies_) copies_->SetNames(node, asked.copies);
  ChooseIfAllAsked();
}

void SaveService::Nodes::ChooseIfAllAsked() {
  if (asked_.size() < active_.size() || of_.restoring_.choosing) return;
  if (!has_claim_) {
    wants_choice_ = true;
    return;
  }
  if (copies_) {
    copies_->Look(std::exchange(asked_, {}));
    return ChooseFromMemory();
  }
  const std::optional<SnapshotKey> common = NewestCommon(std::exchange(asked_, {}));
  if (common && !of_.restoring_.memory_is_bad) {
    return TellChoice(
        {.source = RestoreSource::kMemory, .step = common->step, .generation = common->generation});
  }
  of_.restoring_.choosing = true;
  of_.ChooseFromDisk();
}

// With what other nodes' agents have. A step that has to be brought from there may be older than
// the newest checkpoint, so that is looked for first.
void SaveService::Nodes::ChooseFromMemory() {
  plan_.reset();
  if (!of_.restoring_.memory_is_bad) plan_ = copies_->Plan();
  if (plan_ && plan_->fetches.empty()) {
    const SnapshotKey key = std::exchange(plan_, std::nullopt)->snapshot;
    return TellChoice(
        {.source = RestoreSource::kMemory, .step = key.step, .generation = key.generation});
  }
  of_.restoring_.choosing = true;
  of_.ChooseFromDisk();
}

bool SaveService::Nodes::FetchesInstead(const std::string& newest) {
  if (!plan_) return false;
  const MemoryPlan plan = *std::exchange(plan_, std::nullopt);
  const auto parts = ParseCheckpointName(newest);
  if (parts && parts->step > plan.snapshot.step) return false;
  copies_->Fetch(plan, [this, plan, newest, attempt = of_.restoring_.attempt](bool all_hold_it) {
    if (!of_.restoring_.choosing || attempt != of_.restoring_.attempt) return;
    of_.restoring_.choosing = false;
    if (!all_hold_it) return ChooseFromMemory();
    // The name tells nodes that are new what the others' memory goes on from.
    TellChoice({.source = RestoreSource::kMemory,
                .step = plan.snapshot.step,
                .generation = plan.snapshot.generation,
                .folder = newest});
  });
  return true;
}

bool SaveService::Nodes::is_from_peer(size_t slot) const {
  return copies_ && copies_->is_from_peer(slot);
}

bool SaveService::Nodes::is_any_from_peer() const {
  for (size_t slot = 0; slot < ranks_.size(); ++slot) {
    if (is_from_peer(slot)) return true;
  }
  return false;
}

int64_t SaveService::Nodes::copied_step() const {
  return copies_ && copies_->whole() ? copies_->whole()->step : kNoStep;
}

ReplicaStore* SaveService::Nodes::copies() { return copies_ ? &copies_->store() : nullptr; }

// A step that all hold is in their buffers until all know of a later one: so the word of it and the
// wish to copy it go out together.
void SaveService::Nodes::CopyCommon(int64_t step) {
  if (!copies_ || !judged_ || !judged_->restored || step <= 0) return;
  if (step == base_.step && base_.generation != 0) return copies_->OnCommon(base_);
  if (step > base_.step) copies_->OnCommon({of_.generation_, step});
}

void SaveService::Nodes::TellChoice(const RestoreChoice& choice) {
  RestoreChosen chosen{.at = at_, .refused = {}, .source = choice.source, .snapshot = {}};
  chosen.snapshot = {choice.generation, choice.step};
  if (!choice.folder.empty()) {
    chosen.checkpoint = choice.folder.substr(choice.folder.rfind('/') + 1);
    if (of_.is_elsewhere(choice)) chosen.checkpoint.insert(0, kElsewhere);
  }
  chosen_ = chosen;
  council_->TellAll(chosen);
}

void SaveService::Nodes::TellNoChoice(const absl::Status& status) {
  chosen_ = RestoreChosen{.at = at_, .refused = status, .source = {}, .snapshot = {}};
  council_->TellAll(*chosen_);
}

void SaveService::Nodes::Take(const std::string& node, const RestoreVoted& voted) {
  if (!is_lead()) return;
  if (judged_ && judged_->at == voted.at) {
    council_->Tell(node, *judged_);
    if (common_told_) council_->Tell(node, *common_told_);
    return;
  }
  if (voted.at != at_ || !chosen_ || chosen_->at != at_) return;
  votes_[node] = voted;
  JudgeIfAllVoted();
}

// The same as one node does with its ranks' votes; of memory's copies in other nodes nothing is
// known yet.
void SaveService::Nodes::JudgeIfAllVoted() {
  if (votes_.size() < active_.size()) return;
  bool ok = true, mismatch = false;
  std::set<std::string> failed;
  std::vector<std::string>& reasons = of_.restoring_.passed_over;
  for (const auto& [node, vote] : votes_) {
    ok = ok && vote.ok;
    mismatch = mismatch || vote.mismatch;
    if (!vote.ok) failed.insert(node);
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
      // The same step from copies first, once.
      of_.restoring_.memory_is_bad = !copies_ || !copies_->Distrust(failed, chosen_->snapshot);
    } else {
      of_.PassOver(chosen_->source, chosen_->checkpoint, reason);
    }
    ++at_.attempt;
  }
  if (judged.restored) {
    const bool is_memory = chosen_->source == RestoreSource::kMemory;
    held_tally_ = HeldTally(council_->nodes(), is_memory ? chosen_->snapshot.step : kNoStep);
    base_ = chosen_->snapshot;
    if (!is_memory) base_.generation = 0;
  }
  judged_ = judged;
  council_->TellAll(judged);
}

}  // namespace outlast
