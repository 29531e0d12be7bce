// File descriptors with an owner.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace outlast {

// Owns a descriptor and closes it. Move-only.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) Reset(other.Release());
    return *this;
  }
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }
  void Reset(int fd = -1);

 private:
  int fd_ = -1;
};

// A second descriptor for the same open file, close-on-exec.
absl::StatusOr<UniqueFd> Duplicate(int fd);

// Raises the soft limit of open descriptors to the hard one.
void RaiseDescriptorLimit();

// Writes all of `bytes`, over short writes and EINTR.
absl::Status WriteAll(int fd, std::span<const std::byte> bytes);

}  // namespace outlast
