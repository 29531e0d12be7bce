// How a state and a checkpoint are matched, and what did not match.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace outlast {

enum class Strictness : uint8_t {
  kStrict,    // every name on both sides, with its dtype and shape, or nothing is changed
  kMatching,  // what matches is read, the rest of the state stays as it is
};

// May a region have a wider dtype than the saved tensor, which then is converted without loss: F16,
// BF16 and F8 to F32 or F64, F32 to F64, integers to longer ones that hold all their values.
// Narrowing is never done.
enum class Widening : uint8_t { kRefuse, kAllow };

struct RestoreOptions {
  Strictness strictness = Strictness::kStrict;
  Widening widening = Widening::kRefuse;
};

// How a state and a checkpoint differ. Names by order.
struct MatchReport {
  std::vector<std::string> missing;     // in the state, not in the checkpoint
  std::vector<std::string> unexpected;  // in the checkpoint, not in the state
  std::vector<std::string> mismatched;  // "name: BF16 [2, 3], saved F32 [2, 3]"
  bool is_clean() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
  // OK if clean, else kInvalidArgument with the three lists, at most 20 names each.
  absl::Status ToStatus(std::string_view checkpoint) const;
};

}  // namespace outlast
