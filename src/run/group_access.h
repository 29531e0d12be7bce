// A group of ranks whose place is given, instead of asked for: for tests and measurements.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/run/collectives.h"

namespace outlast {

struct GroupPlace {
  std::vector<int> node_of;  // by rank; empty: all on one node
  std::string address;       // Group::Make's is WorkerEnvironment::address
};

class GroupAccess {
 public:
  static absl::StatusOr<Group> Make(Generation& generation, Run& run, std::string_view name,
                                    size_t max_bytes, const GroupPlace& place);
};

}  // namespace outlast
