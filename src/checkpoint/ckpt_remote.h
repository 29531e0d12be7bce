// `outlast ckpt` on roots in a store: s3://bucket/prefix, and whatever else was registered.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/ckpt_verbs.h"
#include "checkpoint/remote_root.h"

namespace outlast {

// A URI of another scheme than file://.
bool IsInStore(const std::string& place);

// A root in a store, and one checkpoint of it.
struct RemotePlace {
  std::string uri;  // of the root
  std::unique_ptr<RemoteRoot> root;
  Listing listing;
  std::string checkpoint;  // empty: the whole root was named
};

// kNotFound: neither a root nor a checkpoint. kInvalidArgument: no such scheme. Else the store's.
absl::StatusOr<RemotePlace> OpenRemotePlace(const CkptCall& call, const std::string& place);
// The same; of a root, its newest usable checkpoint is chosen.
absl::StatusOr<RemotePlace> OpenRemoteCheckpoint(const CkptCall& call, const std::string& place);

int RunCopyWithStore(const CkptCall& call);

}  // namespace outlast
