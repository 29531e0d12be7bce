// Who holds the claim on a root, and whether that process lives.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/manifest.h"
#include "outlast/base/id.h"

namespace outlast {

// Who holds a claim: enough to see from the same host whether it is gone.
struct OwnerIdentity {
  std::string host;
  Id128 boot_id;
  uint64_t pid_namespace = 0;  // inode of /proc/self/ns/pid
  int64_t pid = 0;
  uint64_t pid_start = 0;  // start time in clock ticks, field 22 of /proc/<pid>/stat

  static OwnerIdentity Self();
};

enum class OwnerState : uint8_t { kUnknown, kAlive, kGone };
// Whether the claim's owner lives, as far as this process can see: kUnknown under another boot id
// or pid namespace.
OwnerState StateOfOwner(const Claim& claim, const OwnerIdentity& self);

}  // namespace outlast
