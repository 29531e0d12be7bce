// Where a run is told to begin: --restore-from.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/root.h"

namespace outlast {

// One of: the newest of the root's chain (neither field), a step of the root, or a folder elsewhere
// that is only read: a root, whose newest is meant, or one checkpoint in it.
struct StartPoint {
  std::optional<int64_t> step;
  std::string folder;  // absolute

  bool is_latest() const { return !step && folder.empty(); }
  std::string text() const;  // as --restore-from takes it
};

// "latest", a step's number, or a path (also file:///path). kInvalidArgument: none of these, or a
// path that does not exist; in one line that names the flag.
absl::StatusOr<StartPoint> ParseStartPoint(std::string_view text);

// The usable checkpoints of `step`, newest first: those on the chain before those off it. A run
// that goes on from one begins a new chain there; what is newer on the chain is told as skipped.
// kNotFound: there is none; which steps there are. kDataLoss: it is there and not usable, and why.
absl::StatusOr<StartDecision> DecideStartAt(const Listing& listing, int64_t step);

// The root that `folder` is, or is a checkpoint of.
std::string RootElsewhere(const std::string& folder);

// What `folder`, a root or a checkpoint of one, has to restore from.
struct StartElsewhere {
  std::string root;  // its path
  StartDecision decision;
};
// Reads alone. kNotFound: no root there, or nothing usable in it.
absl::StatusOr<StartElsewhere> FindElsewhere(const std::string& folder);

// The start that `point` names in `listing`, of the root at `path`, or elsewhere: `elsewhere` is
// filled in then. The path of another root that turns out to be this one means this one.
absl::StatusOr<StartDecision> DecideStartFrom(const StartPoint& point, const Listing& listing,
                                              const std::string& path, std::string* elsewhere);

}  // namespace outlast
