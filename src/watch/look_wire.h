// What the agents of a job of several nodes tell each other of their ranks, over Peers, channel
// kPeerWatch. Fields by elastic/codec.h; the first byte is the version, 1, the second the message's
// kind, by its place in WatchMessage. Another version or kind is refused, and nothing comes of it.
//
//   follower -> lead   StallTold      its ranks wait, past their limits, for ranks of other nodes
//   lead -> follower   LookAsked      look at your ranks
//   follower -> lead   LooksTold      so they are
//   lead -> follower   VerdictFound   what all looks together say, if it concerns the node's ranks
//
// No time of a clock is among them: durations only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "watch/verdict.h"

namespace outlast {

inline constexpr uint8_t kWatchWireVersion = 1;

struct StallTold {
  uint64_t generation = 0;
};
// Each judgement has a number, and two looks: 1 and 2.
struct LookAsked {
  uint64_t generation = 0;
  uint64_t number = 0;
  uint8_t look = 0;
  bool operator==(const LookAsked&) const = default;
};
struct LooksTold {
  LookAsked asked;
  std::vector<RankLook> looks;
};
struct VerdictFound {
  uint64_t number = 0;
  absl::Duration took;  // to judge
  Verdict verdict;
};

using WatchMessage = std::variant<StallTold, LookAsked, LooksTold, VerdictFound>;

// What a verdict needs of each look; operations and member lists of communicators in which nothing
// is pending are left out, and of the process what is for its own agent alone.
std::string EncodeWatchMessage(const WatchMessage& message);
// kInvalidArgument: not such a message.
absl::StatusOr<WatchMessage> DecodeWatchMessage(std::string_view bytes);

}  // namespace outlast
