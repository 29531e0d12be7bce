#include "control/token.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <span>

#include "base/channel.h"
#include "base/error.h"
#include "outlast/base/digest.h"
#include "outlast/base/fd.h"
#include "outlast/base/id.h"

namespace outlast {
namespace {

constexpr size_t kTokenBytes = 32;
constexpr size_t kNonceBytes = 32;
constexpr size_t kMostFileBytes = 4096;
constexpr std::string_view kPurpose = "outlast.control.v1";

bool IsSpace(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

std::string_view Trim(std::string_view text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return text;
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

absl::StatusOr<JobToken> ReadOpen(const UniqueFd& fd, const std::string& what) {
  std::string content(kMostFileBytes, '\0');
  size_t used = 0;
  while (used < content.size()) {
    const ssize_t got = read(fd.get(), content.data() + used, content.size() - used);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, what);
    if (got == 0) break;
    used += static_cast<size_t>(got);
  }
  content.resize(used);
  return JobToken::Parse(content, what);
}

// As ssh holds its keys: a file of our own must not be open to others. One that somebody else owns,
// such as a cluster's, is that one's to guard.
absl::Status CheckOwnAlone(const UniqueFd& fd, const std::string& path) {
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return ErrnoStatus(errno, fmt::format("token file {}", path));
  constexpr mode_t kOthers = S_IRWXG | S_IRWXO;
  if (!S_ISREG(file.st_mode) || file.st_uid != geteuid() || (file.st_mode & kOthers) == 0)
    return absl::OkStatus();
  return Error(
      absl::StatusCode::kPermissionDenied,
      "token file {}: mode {:04o} lets others read or write it, 0600 wanted (chmod 600 {})", path,
      file.st_mode & 07777u, path);
}

}  // namespace

absl::StatusOr<JobToken> JobToken::Parse(std::string_view content, std::string_view what) {
  JobToken token;
  if (content.size() == kTokenBytes) {
    token.bytes_ = std::string(content);
    return token;
  }
  const std::string_view digits = Trim(content);
  const bool is_hex =
      digits.size() == 2 * kTokenBytes &&
      std::all_of(digits.begin(), digits.end(), [](char digit) { return HexDigit(digit) >= 0; });
  if (!is_hex) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{}: {} bytes, a token of 64 hex digits or of {} bytes is wanted", what,
                 content.size(), kTokenBytes);
  }
  for (size_t i = 0; i < digits.size(); i += 2)
    token.bytes_.push_back(static_cast<char>(HexDigit(digits[i]) * 16 + HexDigit(digits[i + 1])));
  return token;
}

absl::StatusOr<JobToken> JobToken::Read(const std::string& path) {
  const std::string what = fmt::format("token file {}", path);
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.is_open()) return ErrnoStatus(errno, what);
  OUTLAST_RETURN_IF_ERROR(CheckOwnAlone(fd, path));
  return ReadOpen(fd, what);
}

absl::StatusOr<JobToken> JobToken::ReadFrom(int fd) {
  return ReadOpen(UniqueFd(fd), fmt::format("token descriptor {}", fd));
}

std::string JobToken::Prove(std::string_view role, std::string_view job,
                            std::string_view their_nonce, std::string_view own_nonce) const {
  if (empty()) return {};
  PayloadWriter text;
  for (const std::string_view part : {kPurpose, role, job, their_nonce, own_nonce}) text.Text(part);
  const Sha256Digest proof = HmacSha256(bytes_, text.bytes());
  return std::string(reinterpret_cast<const char*>(proof.data()), proof.size());
}

bool JobToken::Checks(std::string_view proof, std::string_view role, std::string_view job,
                      std::string_view own_nonce, std::string_view their_nonce) const {
  const std::string wanted = Prove(role, job, own_nonce, their_nonce);
  return !wanted.empty() &&
         IsEqualSecret(std::as_bytes(std::span(proof)), std::as_bytes(std::span(wanted)));
}

std::string MakeNonce() {
  std::string nonce;
  while (nonce.size() < kNonceBytes) {
    const uint64_t bits = RandomU64();
    nonce.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
  }
  return nonce;
}

}  // namespace outlast
