// Memory mappings with an owner.
#pragma once

#include <cstddef>
#include <span>

#include "absl/status/statusor.h"
#include "outlast/base/fd.h"

namespace outlast {

// Owns an mmap-ed range. Move-only.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  // Maps `bytes` of `fd` from its start, shared. Read-only maps fault on a write.
  static absl::StatusOr<Mapping> Shared(int fd, size_t bytes);
  static absl::StatusOr<Mapping> SharedReadOnly(int fd, size_t bytes);
  // The same, with every page in place when it returns, in huge ones where the kernel gives them to
  // shared memory. kResourceExhausted: no memory.
  static absl::StatusOr<Mapping> SharedTouched(int fd, size_t bytes);
  // Private zeroed memory; huge pages are asked for, and every page is touched now: the first copy
  // into it runs at full speed (fresh 4 KiB pages cost 9-13 times as much).
  static absl::StatusOr<Mapping> Anonymous(size_t bytes);

  std::span<std::byte> bytes() const { return {data_, size_}; }
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  Mapping(std::byte* data, size_t size) : data_(data), size_(size) {}
  static absl::StatusOr<Mapping> Map(int fd, size_t bytes, int protection, int flags);

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

enum class Allocation {
  kNow,     // a later touch cannot fail
  kOnTouch  // by whoever maps it: Mapping::SharedTouched
};
// A memfd of `bytes`, sealed against shrinking and growing. kResourceExhausted: no memory, with the
// size wanted.
absl::StatusOr<UniqueFd> MakeSealedMemory(const char* name, size_t bytes,
                                          Allocation allocation = Allocation::kNow);

}  // namespace outlast
