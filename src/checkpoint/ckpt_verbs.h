// The commands of `outlast ckpt`, one function each; ckpt_tool.cc chooses.
#pragma once

#include <iosfwd>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/ckpt_command.h"
#include "checkpoint/root.h"

namespace outlast {

class Plugins;

inline constexpr int kCkptWhole = 0;
inline constexpr int kCkptDamaged = 1;
inline constexpr int kCkptRefused = 85;

// One call of the tool.
struct CkptCall {
  const CkptCommand& command;
  std::ostream& out;
  std::ostream& err;
  std::ostream* bar;       // null: no terminal
  const Plugins* plugins;  // of stores; null: folders alone

  // Says why on one line, and returns the exit code: `Refuse` always kCkptRefused, `Fail` by what
  // it is.
  int Refuse(const absl::Status& status) const;
  int Fail(const absl::Status& status) const;
  void Print(const nlohmann::ordered_json& document) const;
};

// A root that is looked at, and one checkpoint of it.
struct CkptPlace {
  std::unique_ptr<Root> root;
  Listing listing;
  std::string checkpoint;  // empty: the whole root was named
  std::string folder() const { return root->PathOf(checkpoint); }
};

// The newest usable checkpoint of a root; what was passed over is said on call.err. kDataLoss: it
// has none. kFailedPrecondition: see RefuseNewer.
absl::StatusOr<std::string> NewestUsable(const CkptCall& call, const Listing& listing,
                                         const std::string& root);

// `path` is a root or a checkpoint in one. kNotFound: neither. kInvalidArgument: in a store.
absl::StatusOr<CkptPlace> OpenPlace(const std::string& path);
// kFailedPrecondition: the root has a checkpoint of a newer program. Which is the newest of the
// chain, and what is off it, nobody can say who cannot read them all.
absl::Status RefuseNewer(const Listing& listing, const std::string& root);
// The same; of a root, its newest usable checkpoint is chosen, and what was passed over is said on
// call.err. kNotFound: it has none.
absl::StatusOr<CkptPlace> OpenCheckpointPlace(const CkptCall& call, const std::string& path);

// Where a checkpoint may be copied or imported to. A wrong place must not become a root: what holds
// other things is refused. nullopt: there is no root yet.
absl::StatusOr<std::optional<CkptPlace>> LookAtTarget(const std::string& path);

// ckpt_look.cc: change nothing (but for quarantine marks that a verification clears).
int RunLs(const CkptCall& call);
int RunShow(const CkptCall& call);
int RunVerify(const CkptCall& call);
int RunDiff(const CkptCall& call);
int RunExport(const CkptCall& call);
// ckpt_change.cc: write to a root.
int RunImport(const CkptCall& call);
int RunCopy(const CkptCall& call);
int RunGc(const CkptCall& call);
int RunPin(const CkptCall& call);
int RunUnpin(const CkptCall& call);

}  // namespace outlast
