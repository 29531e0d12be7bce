// The command line of `outlast ckpt`.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace outlast {

struct CkptCommand {
  std::string verb;
  std::vector<std::string> places;            // roots, checkpoints, folders
  std::map<std::string, std::string> values;  // "--step" -> "100"; a flag without a value: ""
  std::string help;                           // what --help prints; else empty

  bool has(std::string_view flag) const { return values.contains(std::string(flag)); }
  bool json() const { return has("--json"); }
  std::string value(std::string_view flag) const;  // empty: not given
};

// `args` begin after `ckpt`. kInvalidArgument, with the right form: an unknown verb or flag, a
// missing value, too few or too many places.
absl::StatusOr<CkptCommand> ParseCkptCommand(std::span<const std::string> args);

// A decimal number of at least `least` that a flag has. kInvalidArgument, naming the flag.
absl::StatusOr<int64_t> NumberOf(const CkptCommand& command, std::string_view flag, int64_t least);

}  // namespace outlast
