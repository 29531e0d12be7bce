// What a keeper leaves for the next one of the same workers, should its process be killed
// (outlast run --on-agent-death adopt): bytes and descriptors by key. Each key's owner is the part
// that keeps it, and that takes it out again.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "outlast/base/fd.h"

namespace outlast {

struct KeptItem {
  std::string bytes;
  std::vector<UniqueFd> fds;
};
using Kept = std::map<std::string, KeptItem>;

class Vault {
 public:
  virtual ~Vault() = default;
  // Takes the place of what was kept under `key`. It is safe there before anything that the caller
  // sends later, to whomever. The descriptors are borrowed for the call. At most
  // Channel::kMaxDescriptors, and a message of bytes.
  virtual void Keep(const std::string& key, std::string_view bytes, std::span<const int> fds) = 0;
};

}  // namespace outlast
