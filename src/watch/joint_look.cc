#include "watch/joint_look.h"

#include <algorithm>
#include <utility>

namespace outlast {

void JointLook::Arm(uint64_t generation, std::vector<std::string> node_of_rank) {
  Disarm();
  generation_ = generation;
  node_of_rank_ = std::move(node_of_rank);
  for (const std::string& node : node_of_rank_) {
    if (std::find(nodes_.begin(), nodes_.end(), node) == nodes_.end()) nodes_.push_back(node);
  }
}

void JointLook::Disarm() {
  generation_ = 0;
  node_of_rank_.clear();
  nodes_.clear();
  stage_ = Stage::kIdle;
  is_wanted_ = false;
  due_ = absl::InfiniteDuration();
  not_before_ = -absl::InfiniteDuration();
  for (auto& told : told_) told.clear();
}

void JointLook::Begin(absl::Duration now, absl::Duration apart) {
  if (generation_ == 0 || stage_ != Stage::kIdle || now < not_before_) return;
  is_wanted_ = true;
  apart_ = apart;
  due_ = now;
}

void JointLook::Take(const std::string& node, LooksTold told) {
  const int look = stage_ == Stage::kFirst ? 1 : stage_ == Stage::kSecond ? 2 : 0;
  if (look == 0 || told.asked != LookAsked{generation_, number_, static_cast<uint8_t>(look)})
    return;
  const auto number =
      static_cast<int>(std::find(nodes_.begin(), nodes_.end(), node) - nodes_.begin());
  for (RankLook& one : told.looks) {
    const auto rank = static_cast<size_t>(one.rank);
    if (rank >= node_of_rank_.size() || node_of_rank_[rank] != node) return;
    one.node = number;
  }
  told_[look - 1].emplace(node, std::move(told.looks));
}

bool JointLook::HaveAllTold(int look) const { return told_[look - 1].size() == nodes_.size(); }

LookAsked JointLook::Ask(absl::Duration now, Stage stage) {
  stage_ = stage;
  due_ = now + kPatience;
  return {generation_, number_, static_cast<uint8_t>(stage == Stage::kFirst ? 1 : 2)};
}

JointLook::Next JointLook::Step(absl::Duration now) {
  Next next;
  switch (stage_) {
    case Stage::kIdle:
      if (!std::exchange(is_wanted_, false)) break;
      ++number_;
      for (auto& told : told_) told.clear();
      next.ask = Ask(now, Stage::kFirst);
      break;
    case Stage::kFirst:
      if (!HaveAllTold(1) && now < due_) break;
      stage_ = Stage::kPause;
      due_ = now + apart_;
      break;
    case Stage::kPause:
      if (now >= due_) next.ask = Ask(now, Stage::kSecond);
      break;
    case Stage::kSecond:
      if (!HaveAllTold(2) && now < due_) break;
      next.verdict = Judge();
      next.number = number_;
      stage_ = Stage::kIdle;
      due_ = absl::InfiniteDuration();
      not_before_ = now + 2 * apart_;
      break;
  }
  return next;
}

Verdict JointLook::Judge() const {
  std::vector<RankLooks> looks;
  VerdictOptions options{.world = static_cast<int>(node_of_rank_.size()),
                         .generation = generation_};
  for (const std::string& node : node_of_rank_)
    options.elsewhere.push_back(!told_[0].contains(node) || !told_[1].contains(node));
  for (const auto& [node, second] : told_[1]) {
    const auto first = told_[0].find(node);
    if (first == told_[0].end()) continue;
    for (const RankLook& look : second) {
      RankLooks pair{nullptr, &look};
      for (const RankLook& earlier : first->second) {
        if (earlier.rank == look.rank) pair.first = &earlier;
      }
      looks.push_back(pair);
    }
  }
  return JudgeRanks(looks, options);
}

std::vector<std::string> JointLook::Concerned(const Verdict& verdict) const {
  std::vector<std::string> concerned;
  const auto add = [&](int rank) {
    if (rank < 0 || static_cast<size_t>(rank) >= node_of_rank_.size()) return;
    const std::string& node = node_of_rank_[static_cast<size_t>(rank)];
    if (std::find(concerned.begin(), concerned.end(), node) == concerned.end())
      concerned.push_back(node);
  };
  for (const Culprit& culprit : verdict.culprits) add(culprit.rank);
  for (const int rank : verdict.waiting) add(rank);
  return concerned;
}

}  // namespace outlast
