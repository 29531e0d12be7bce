// Makes the connections of a rank's lane (chain_plan.h): each rank that holds one listens on the
// address that it was told, leaves HOST:PORT in the generation's keys, and connects to the stage
// before its own. Both ends prove that they know the generation's ticket, 16 random bytes that rank
// 0 leaves there.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/run/generation.h"
#include "run/chain_plan.h"
#include "run/node_chain.h"

namespace outlast {

// What connecting a group may take, and a rank's share of it besides.
inline constexpr absl::Duration kConnect = absl::Seconds(40);
inline constexpr absl::Duration kConnectARank = absl::Milliseconds(10);

struct ChainConnectOptions {
  std::string group;    // its name
  std::string address;  // HOST to listen on and to be reached by
  size_t max_bytes = 0;
  absl::Duration timeout;
};

// kInvalidArgument: a neighbour gave another max_bytes, or the address is none of this machine.
// kDeadlineExceeded: somebody did not come, who is named. kAborted: the generation ended. Blocks.
absl::StatusOr<std::vector<ChainStage>> ConnectChain(Generation& generation, const ChainPlan& plan,
                                                     const ChainConnectOptions& options);

}  // namespace outlast
