// The decisions of root.h: pure, without a clock or a disk.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "checkpoint/root.h"

namespace outlast {
namespace {

std::string OwnerText(const ClaimView& view) {
  return fmt::format("claim {} of run {} on host '{}' (pid {})", view.number,
                     view.claim.run.hex().substr(0, 8), view.claim.host, view.claim.pid);
}

bool IsHistory(const CheckpointInfo& info) {
  const bool own =
      info.state == CheckpointState::kCommitted || info.state == CheckpointState::kDamaged;
  return own && info.manifest.has_value();
}

bool IsUsable(const CheckpointInfo& info) {
  return info.state == CheckpointState::kCommitted && info.quarantined.empty();
}

}  // namespace

ClaimDecision JudgeClaim(const ClaimView& newest, const Id128& run, TakeOver take_over) {
  if (newest.number == 0) return {ClaimVerdict::kTake, "nobody holds the root"};
  const std::string owner = OwnerText(newest);
  if (newest.claim.run == run) return {ClaimVerdict::kTake, owner + " is this run's own"};
  if (newest.released) return {ClaimVerdict::kTake, owner + " was released"};
  if (newest.owner == OwnerState::kGone)
    return {ClaimVerdict::kTake, owner + ": its process is gone"};
  if (take_over == TakeOver::kYes)
    return {ClaimVerdict::kTake, owner + " is taken over, as was asked"};
  if (newest.beat != newest.first_beat) {
    return {ClaimVerdict::kRefuse, owner + " still beats"};
  }
  if (newest.watched >= kSilence) {
    return {ClaimVerdict::kTake,
            fmt::format("{} gave no beat for {} s", owner, absl::ToInt64Seconds(newest.watched))};
  }
  return {ClaimVerdict::kWatch, owner + ": its beat is watched"};
}

std::string_view NameOf(CheckpointState state) {
  constexpr std::string_view kNames[] = {"committed", "incomplete", "deleted",
                                         "damaged",   "foreign",    "newer"};
  return kNames[static_cast<size_t>(state)];
}

Chain ResolveChain(std::span<const CheckpointInfo> checkpoints) {
  std::map<std::string_view, size_t> index;
  std::optional<size_t> head;
  const auto rank_of = [&](size_t i) {
    const Manifest& manifest = *checkpoints[i].manifest;
    return std::tuple(manifest.claim, manifest.generation, manifest.step,
                      std::string_view(manifest.checkpoint));
  };
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    if (!IsHistory(checkpoints[i])) continue;
    index.emplace(checkpoints[i].name, i);
    if (!head.has_value() || rank_of(i) > rank_of(*head)) head = i;
  }
  Chain chain;
  std::set<size_t> on_chain;
  while (head.has_value() && on_chain.insert(*head).second) {
    chain.members.push_back(*head);
    const Manifest& manifest = *checkpoints[*head].manifest;
    head.reset();
    std::vector<std::string> candidates = manifest.ancestors;
    if (manifest.parent.has_value()) candidates.insert(candidates.begin(), *manifest.parent);
    for (const std::string& name : candidates) {
      const auto found = index.find(name);
      if (found == index.end()) continue;
      head = found->second;
      break;
    }
  }
  for (const auto& [name, i] : index) {
    if (!on_chain.contains(i)) chain.abandoned.push_back(i);
  }
  std::ranges::sort(chain.abandoned, [&](size_t a, size_t b) { return rank_of(a) > rank_of(b); });
  return chain;
}

std::vector<std::string> ChooseDeletions(std::span<const CheckpointInfo> checkpoints,
                                         const RetentionOptions& options,
                                         std::span<const std::string> in_progress) {
  std::vector<std::string> names;
  int kept = 0;
  bool has_verified = false;
  for (const size_t i : ResolveChain(checkpoints).members) {
    const CheckpointInfo& info = checkpoints[i];
    const bool is_older = kept >= std::max(1, options.keep_last);
    kept += IsUsable(info) ? 1 : 0;
    const bool by_step = options.keep_every > 0 && info.step % options.keep_every == 0;
    const bool is_in_use = std::ranges::find(in_progress, info.name) != in_progress.end();
    const bool is_verified =
        IsUsable(info) && std::ranges::find(options.verified, info.name) != options.verified.end();
    const bool is_newest_verified = is_verified && !std::exchange(has_verified, true);
    if (is_older && IsUsable(info) && !info.pinned && !by_step && !is_in_use && !is_newest_verified)
      names.push_back(info.name);
  }
  for (const CheckpointInfo& info : checkpoints) {
    const bool left_over =
        info.state == CheckpointState::kIncomplete || info.state == CheckpointState::kDeleted;
    if (left_over && !info.pinned &&
        std::ranges::find(in_progress, info.name) == in_progress.end()) {
      names.push_back(info.name);
    }
  }
  return names;
}

std::vector<Garbage> ChooseGarbage(std::span<const CheckpointInfo> checkpoints, RootOwner owner) {
  std::vector<Garbage> garbage;
  const Chain chain = ResolveChain(checkpoints);
  const auto newest =
      std::ranges::find_if(chain.members, [&](size_t i) { return IsUsable(checkpoints[i]); });
  for (const size_t i : chain.abandoned) {
    const bool spared = checkpoints[i].pinned || newest == chain.members.end();
    if (spared) continue;
    garbage.push_back(
        {checkpoints[i].name, fmt::format("abandoned: not on the chain that ends in {}",
                                          checkpoints[chain.members.front()].name)});
  }
  for (const CheckpointInfo& info : checkpoints) {
    const bool half = info.state == CheckpointState::kDeleted;
    if (info.pinned || owner == RootOwner::kLiving) continue;
    if (half || info.state == CheckpointState::kIncomplete)
      garbage.push_back({info.name, half ? "half deleted" : "unfinished: no MANIFEST.json"});
  }
  return garbage;
}

absl::StatusOr<StartDecision> DecideStart(const Listing& listing, StartMode mode) {
  StartDecision decision;
  if (mode == StartMode::kFresh) return decision;
  for (const CheckpointInfo& info : listing.checkpoints) {
    if (info.state == CheckpointState::kNewer)
      return Error(absl::StatusCode::kUnimplemented, "{}: {}", info.name, info.reason);
  }
  const Chain chain = ResolveChain(listing.checkpoints);
  for (const size_t i : chain.members) {
    const CheckpointInfo& info = listing.checkpoints[i];
    if (IsUsable(info))
      decision.candidates.push_back(info.name);
    else
      decision.skipped.push_back(fmt::format(
          "{}: {}", info.name, info.quarantined.empty() ? info.reason : info.quarantined));
  }
  for (const size_t i : chain.abandoned) {
    decision.skipped.push_back(listing.checkpoints[i].name +
                               ": abandoned, not on the chain of the newest claim");
  }
  bool some_exist = !decision.skipped.empty();
  for (const CheckpointInfo& info : listing.checkpoints) {
    if (IsHistory(info)) continue;
    some_exist |=
        info.state == CheckpointState::kDamaged || info.state == CheckpointState::kForeign;
    decision.skipped.push_back(fmt::format("{}: {}", info.name, info.reason));
  }
  if (decision.candidates.empty() && some_exist) {
    return Error(
        absl::StatusCode::kFailedPrecondition,
        "checkpoints exist and none is usable (say --fresh to begin at step 0 all the same): {}",
        fmt::join(decision.skipped, "; "));
  }
  return decision;
}

namespace {

// What all receipts of one save share.
auto SaveOf(const Receipt& receipt) {
  return std::tie(receipt.job, receipt.run, receipt.claim, receipt.checkpoint, receipt.parent,
                  receipt.step, receipt.generation, receipt.world, receipt.plan, receipt.mesh,
                  receipt.hooks);
}

std::string WhyReceiptsDoNot(const RollForwardView& view) {
  if (view.receipts.empty()) return "no receipts";
  for (const auto& receipt : view.receipts) {
    if (!receipt.ok()) return std::string(MessageOf(receipt.status()));
  }
  const Receipt& first = *view.receipts.front();
  if (first.checkpoint != view.name) return fmt::format("the receipts are of {}", first.checkpoint);
  std::set<uint32_t> ranks;
  for (const auto& receipt : view.receipts) {
    if (SaveOf(*receipt) != SaveOf(first)) {
      return fmt::format("the receipts of ranks {} and {} are of two saves", first.rank,
                         receipt->rank);
    }
    ranks.insert(receipt->rank);
  }
  for (uint32_t rank = 0; rank < first.world; ++rank) {
    if (!ranks.contains(rank)) return fmt::format("no receipt of rank {} of {}", rank, first.world);
  }
  return "";
}

std::string WhyHooksDoNot(const RollForwardView& view, const Receipt& receipt) {
  for (const std::string& name : receipt.hooks) {
    if (!view.hooks.has_value() || view.hooks->checkpoint != view.name)
      return "no hooks.json for its hooks";
    const auto found = std::ranges::find(view.hooks->hooks, name, &HookResult::name);
    if (found == view.hooks->hooks.end()) return fmt::format("hook '{}' left no result", name);
    if (found->result != "ok") return fmt::format("hook '{}' said {}", name, found->result);
  }
  return "";
}

}  // namespace

RollForwardDecision JudgeRollForward(const RollForwardView& view, const Id128& roller) {
  if (view.deleted) return {false, "DELETED lies there"};
  if (std::string why = WhyReceiptsDoNot(view); !why.empty()) return {false, std::move(why)};
  const Receipt& receipt = *view.receipts.front();
  if (std::string why = WhyHooksDoNot(view, receipt); !why.empty()) return {false, std::move(why)};
  for (const ClaimFile& file : view.claims) {
    if (file.number <= receipt.claim) continue;
    if (!file.claim.has_value())
      return {false, fmt::format("claim {} cannot be read", file.number)};
    if (file.claim->run != roller) {
      return {false,
              fmt::format("claim {} of another run, on host '{}', is newer than its claim {}",
                          file.number, file.claim->host, receipt.claim)};
    }
  }
  return {true, "all receipts check"};
}

}  // namespace outlast
