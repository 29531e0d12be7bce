// Who hangs, where ranks of several nodes wait for each other: the lead's part, which gathers the
// looks of all nodes and judges them as if one agent saw all ranks. Pure: no clock, no network.
//
//   idle ── Begin ──> look 1 ── all told, or too late ──> pause ──> look 2 ── the same ──> judged
//
// Nobody is asked for look 2 before all looks 1 are there. So there is a moment, between the two,
// at which all that did not move between them held at once, whatever the network and the clocks do;
// and a rank that moved between its looks is slow, not hung, here as on one node. Of a node that
// does not tell both in time nothing is known: its ranks are elsewhere, as before, and who may wait
// for them is not blamed.
//
// The coordinator takes no part: it knows nothing of the watch, and what a verdict leads to (a
// fault of the node that holds the culprit) goes to it as ever. Agents have a connection of their
// own, which carries Put, Get and saves too.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "watch/look_wire.h"
#include "watch/verdict.h"

namespace outlast {

// Not safe for concurrent use.
class JointLook {
 public:
  // Of each look: what takes longer is left out.
  static constexpr absl::Duration kPatience = absl::Seconds(3);

  // A generation stands: node_of_rank names who holds each of its ranks. Whatever was under way is
  // dropped.
  void Arm(uint64_t generation, std::vector<std::string> node_of_rank);
  void Disarm();

  // A node's ranks are stalled. `apart`: what lies between the looks, at least; a judgement that
  // ended less than twice as long ago is not begun again yet.
  void Begin(absl::Duration now, absl::Duration apart);
  // What a node tells; of another judgement or look, or of ranks that it does not hold: nothing.
  void Take(const std::string& node, LooksTold told);

  struct Next {
    std::optional<LookAsked> ask;  // all nodes, this one too
    std::optional<Verdict> verdict;
    uint64_t number = 0;  // of the verdict
  };
  // What is to be done now. To be asked again at due(), and after Take.
  Next Step(absl::Duration now);
  // Infinite: nothing is under way.
  absl::Duration due() const { return due_; }

  const std::vector<std::string>& nodes() const { return nodes_; }
  // That hold culprits, or ranks that wait.
  std::vector<std::string> Concerned(const Verdict& verdict) const;

 private:
  enum class Stage : uint8_t { kIdle, kFirst, kPause, kSecond };

  bool HaveAllTold(int look) const;
  LookAsked Ask(absl::Duration now, Stage stage);
  Verdict Judge() const;

  uint64_t generation_ = 0;  // 0: not armed
  std::vector<std::string> node_of_rank_;
  std::vector<std::string> nodes_;  // in the order of ranks
  Stage stage_ = Stage::kIdle;
  bool is_wanted_ = false;
  uint64_t number_ = 0;
  absl::Duration apart_;
  absl::Duration due_ = absl::InfiniteDuration();
  absl::Duration not_before_ = -absl::InfiniteDuration();
  std::map<std::string, std::vector<RankLook>> told_[2];  // by look and node
};

}  // namespace outlast
