// What the ranks of one generation leave for each other: small values by key, and shared memory by
// name.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/fd.h"

namespace outlast {

inline constexpr size_t kMaxKeyBytes = 256;
inline constexpr size_t kMaxValueBytes = 64 << 10;
inline constexpr size_t kCleanBytes = 4096;

// Not safe for concurrent use.
class GenerationStore {
 public:
  // kAlreadyExists: another value is there. kInvalidArgument: sizes. kResourceExhausted: 64 MiB are
  // in use.
  absl::Status Put(std::string_view key, std::string_view value);
  // Null when nobody has put it.
  const std::string* Find(std::string_view key) const;
  // Memory of a store that nobody uses any more may be given out again, dirty but for its first
  // kCleanBytes.
  void TakeOver(GenerationStore& old) { spares_ = std::move(old.memories_); }
  // A memfd, which the first call makes (kZeroOnTouch: whose pages come when they are touched).
  // kInvalidArgument: another size than it has. kResourceExhausted: more than the machine has
  // available.
  enum class Contents { kZero, kZeroOnTouch, kDirty };
  //   promised  bytes of what the machine has available that others were promised
  absl::StatusOr<int> SharedMemory(std::string_view name, uint64_t bytes, Contents contents,
                                   uint64_t promised = 0);
  bool Holds(std::string_view name) const { return memories_.contains(name); }
  // Memory that another process had made.
  void Insert(std::string_view name, uint64_t bytes, UniqueFd fd) {
    memories_.insert_or_assign(std::string(name), Memory{std::move(fd), bytes});
  }
  // Bytes that were given out and whose pages nobody has touched yet.
  uint64_t promised_bytes() const;

 private:
  struct Memory {
    UniqueFd fd;
    uint64_t bytes;
  };
  using Memories = std::map<std::string, Memory, std::less<>>;
  absl::StatusOr<UniqueFd> Allocate(std::string_view name, uint64_t bytes, Contents contents,
                                    uint64_t promised);

  std::map<std::string, std::string, std::less<>> values_;
  size_t value_bytes_ = 0;
  Memories memories_;
  Memories spares_;
};

}  // namespace outlast
