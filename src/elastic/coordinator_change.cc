// A world that changes on request: first a save, then the next generation.
#include <fmt/format.h>

#include <algorithm>

#include "outlast/elastic/coordinator.h"

namespace outlast {

// The agents' saves are led by that of rank 0.
bool Coordinator::IsLead(const Agent& agent) const {
  const std::vector<RankRun>& runs = state_.commit.map.runs;
  return !runs.empty() && runs.front().node == agent.node &&
         runs.front().incarnation == agent.incarnation;
}

// --- A node leaves ---

void Coordinator::LookAtChanges() {
  const bool going_on = phase_ == CoordinatorPhase::kRunning ||
                        phase_ == CoordinatorPhase::kSuspect ||
                        phase_ == CoordinatorPhase::kReforming;
  if (now_ >= leave_due_) {
    leave_due_ = absl::InfiniteDuration();
    if (going_on && RestCanGoOn()) {
      LeaveWorld();
    } else if (going_on) {
      BeginStop(leave_signal_, "too few nodes stay");
    }
  }
  if (save_ && now_ >= save_->due) EndSave("the save did not end in time");
  if (now_ >= grow_due_ && phase_ == CoordinatorPhase::kRunning) {
    grow_due_ = absl::InfiniteDuration();
    if (save_) return MayGrow();
    const auto map = Assign(Request(), options_.membership);
    if (!map.ok() || map->world <= state_.commit.map.world) return;
    // Where nothing is saved, it grows when something is.
    AskForSave(
        fmt::format("the world grows from {} to {} ranks", state_.commit.map.world, map->world),
        /*forced=*/false, now_ + options_.grow_save);
  }
}

void Coordinator::LeaveWorld() {
  std::string who;
  absl::Duration due = absl::InfiniteDuration();
  for (const auto& [node, agent] : agents_) {
    if (!agent.leaving) continue;
    who += (who.empty() ? "" : ", ") + node;
    due = std::min(due, agent.save_due);
  }
  if (save_) {  // which does for both
    save_->due = std::min(save_->due, due);
    save_->forced = true;
    return;
  }
  AssignRequest request = Request();
  request.trusts_link = true;
  const auto map = Assign(request, options_.membership);
  // A spare that takes over has what other nodes hold of these ranks.
  const bool world_stays = map.ok() && map->world == state_.commit.map.world;
  if (world_stays || !AskForSave(fmt::format("node {} leaves", who), /*forced=*/true, due))
    LetThemGo();
}

void Coordinator::LetThemGo() {
  for (const auto& [node, agent] : agents_)
    end_plain_ = end_plain_ || (agent.leaving && HoldsPlain(node, agent.incarnation));
  Reform("a node leaves");
}

// --- Newcomers ---

// Those who come soon after each other make the world grow once.
void Coordinator::MayGrow() {
  if (!options_.may_grow || state_.generation() == 0) return;
  if (grow_due_ != absl::InfiniteDuration() && grow_due_ > now_) return;
  grow_due_ = std::max(now_ + options_.last_call, no_growth_before_);
}

// --- The save ---

// False: there is nothing to wait for.
bool Coordinator::AskForSave(const std::string& why, bool forced, absl::Duration due) {
  if (phase_ != CoordinatorPhase::kRunning && phase_ != CoordinatorPhase::kSuspect) return false;
  if (due <= now_) return false;
  bool any_trains = false;
  for (int rank = 0; rank < state_.commit.map.world; ++rank)
    any_trains = any_trains || (!plain_[static_cast<size_t>(rank)] && !state_.is_finished(rank));
  // Of who is not back yet, after a restart above all, nothing is known.
  for (const auto& [node, agent] : agents_)
    any_trains = any_trains || (agent.stream == 0 && HasWork(agent));
  const auto known = agents_.find(state_.commit.map.runs.front().node);
  if (!any_trains || known == agents_.end()) return false;
  const Agent& lead = known->second;
  if (!IsLead(lead) || lead.bye || (lead.stream != 0 && !lead.saves_on_request)) return false;
  save_ = AwaitedSave{.number = ++last_save_, .why = why, .forced = forced, .due = due};
  SendSave(lead);
  return true;
}

void Coordinator::SendSave(const Agent& agent) {
  if (agent.stream != 0 && !agent.saves_on_request)
    return EndSave(fmt::format("the agent of node {} makes no save on request", agent.node));
  Send(agent,
       control::Save{
           .number = save_->number, .generation = state_.generation(), .reason = save_->why});
}

void Coordinator::Hear(Agent& agent, const control::Saved& saved) {
  if (!save_ || saved.number != save_->number || !IsLead(agent)) {
    ++ignored_;
    return;
  }
  if (!saved.durable) return EndSave(saved.detail);
  if (saved.step > state_.step_committed) Refund(saved.step);
  Emit(Announce{fmt::format("{}: step {} is saved", save_->why, saved.step)});
  const bool forced = save_->forced;
  save_.reset();
  if (forced) return LetThemGo();
  TryGrow();
}

// Nothing was saved, for this reason; empty: the job saves nothing.
void Coordinator::EndSave(const std::string& detail) {
  const AwaitedSave ended = *std::exchange(save_, std::nullopt);
  const std::string newest = state_.step_committed == 0 ? "no step is saved"
                                                        : fmt::format("the newest saved step is {}",
                                                                      state_.step_committed);
  if (!detail.empty()) {
    Emit(Announce{ended.forced ? fmt::format("{} without a save: {}; {}", ended.why, detail, newest)
                               : fmt::format("{} later: {}", ended.why, detail)});
  }
  if (ended.forced) LetThemGo();
}

}  // namespace outlast
