// What the tier of peers may cost (save_service_copies.h).
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace outlast {

// Of several nodes: copies of snapshots on other nodes.
struct PeerTierOptions {
  uint64_t bytes_per_second = 0;  // that go out at most; 0: no copies are made
  absl::Duration every;           // between the beginnings of two rounds, at least
  // Of all copies here: own ranks', and another node's; 0: a quarter of this machine's memory, or
  // of what its control group allows.
  uint64_t most_bytes = 0;
  std::string domain;  // what fails together with this node; empty: nothing else
  std::string token;   // that agents prove to each other; empty: none
};

}  // namespace outlast
