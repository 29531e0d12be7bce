#include "control/token.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <span>

#include "base/channel.h"
#include "base/error.h"
#include "control/secret_file.h"
#include "outlast/base/digest.h"
#include "outlast/base/fd.h"
#include "outlast/base/id.h"

namespace outlast {
namespace {

constexpr size_t kTokenBytes = 32;
constexpr size_t kNonceBytes = 32;
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
  OUTLAST_ASSIGN_OR_RETURN(const std::string content, ReadSecretFile(path, "token file"));
  return Parse(content, fmt::format("token file {}", path));
}

absl::StatusOr<JobToken> JobToken::ReadFrom(int fd) {
  const std::string what = fmt::format("token descriptor {}", fd);
  OUTLAST_ASSIGN_OR_RETURN(const std::string content, ReadSecret(UniqueFd(fd), what));
  return Parse(content, what);
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
