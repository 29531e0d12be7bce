// The job's secret, and how both ends of a stream show that they know it.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace outlast {

// 256 bits that all agents of a job and its coordinator were given; never sent, printed or passed
// in arguments. Empty: there is none.
class JobToken {
 public:
  JobToken() = default;
  // 64 hex digits, or 32 bytes as they are; white space around the digits is ignored. Errors name
  // `what` it was read from, and never its content.
  static absl::StatusOr<JobToken> Parse(std::string_view content, std::string_view what);
  // Reads a file. Errors of the file system by code; kInvalidArgument: it holds no token;
  // kPermissionDenied: it is ours, and others may read or write it.
  static absl::StatusOr<JobToken> Read(const std::string& path);
  // Reads an inherited descriptor to its end, and closes it.
  static absl::StatusOr<JobToken> ReadFrom(int fd);

  bool empty() const { return bytes_.empty(); }

  // HMAC-SHA256 of what `role` ("agent" or "coordinator") says to prove itself: with both nonces,
  // so that no proof serves twice, and the role, so that none is good when sent back.
  std::string Prove(std::string_view role, std::string_view job, std::string_view their_nonce,
                    std::string_view own_nonce) const;
  // 32 bytes for `purpose`, which all who know the token agree on, and nobody else can tell.
  std::string SecretFor(std::string_view purpose, std::string_view job) const {
    return Prove(purpose, job, {}, {});
  }
  // Whether `proof` is what the other side, in its `role`, had to say. In constant time.
  bool Checks(std::string_view proof, std::string_view role, std::string_view job,
              std::string_view own_nonce, std::string_view their_nonce) const;

 private:
  std::string bytes_;
};

// 32 bytes from the kernel's random source.
std::string MakeNonce();

}  // namespace outlast
