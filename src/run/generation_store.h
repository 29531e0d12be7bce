// What the ranks of one generation leave for each other: small values by key, and shared memory by name.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/fd.h"

namespace outlast {

inline constexpr size_t kMaxKeyBytes = 256;
inline constexpr size_t kMaxValueBytes = 64 << 10;

// Not safe for concurrent use.
class GenerationStore {
 public:
  // kAlreadyExists: another value is there. kInvalidArgument: sizes. kResourceExhausted: 64 MiB are in use.
  absl::Status Put(std::string_view key, std::string_view value);
  // Null when nobody has put it.
  const std::string* Find(std::string_view key) const;
  // A memfd, which the first call makes. kInvalidArgument: another size than it has. kResourceExhausted: more than the
  // machine has available.
  absl::StatusOr<int> SharedMemory(std::string_view name, uint64_t bytes);

 private:
  struct Memory {
    UniqueFd fd;
    uint64_t bytes;
  };
  std::map<std::string, std::string, std::less<>> values_;
  size_t value_bytes_ = 0;
  std::map<std::string, Memory, std::less<>> memories_;
};

}  // namespace outlast
