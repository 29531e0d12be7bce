#include "run/peer_greeting.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "outlast/base/digest.h"

namespace outlast {
namespace {

constexpr size_t kMaxNameBytes = 1024;

std::string HelloWords(const PeerIdentity& self, const Id128& nonce) {
  return PayloadWriter()
      .Int(nonce.bytes)
      .Text(self.job)
      .Int(self.run_id.bytes)
      .Int(self.generation)
      .Text(self.node)
      .Text(self.lead)
      .bytes();
}

// A side's name begins what it proves, so one side's proof is never the other's.
std::string Proof(std::string_view token, std::string_view side, std::string_view hello,
                  std::string_view challenge) {
  const std::string said =
      PayloadWriter().Text("outlast peers 1").Text(side).Text(hello).Text(challenge).bytes();
  const Sha256Digest digest = HmacSha256(token, said);
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

bool IsSame(std::string_view proof, std::string_view wanted) {
  return IsEqualSecret(std::as_bytes(std::span(proof)), std::as_bytes(std::span(wanted)));
}

std::string ChallengeWords(const Id128& nonce, std::string_view node) {
  return PayloadWriter().Int(nonce.bytes).Text(node).bytes();
}

}  // namespace

FollowerGreeting::FollowerGreeting(const PeerIdentity& self, std::string token, const Id128& nonce)
    : self_(self), token_(std::move(token)), hello_(HelloWords(self, nonce)) {}

absl::StatusOr<std::string> FollowerGreeting::Answer(std::string_view challenge) const {
  PayloadReader reader(challenge);
  const Id128 nonce{reader.Int<decltype(Id128::bytes)>()};
  const std::string_view node = reader.Text();
  const std::string_view proof = reader.Text();
  if (!reader.ok() || !reader.rest().empty() || node.size() > kMaxNameBytes) {
    return Error(absl::StatusCode::kInvalidArgument, "a challenge of {} bytes that do not fit",
                 challenge.size());
  }
  if (node != self_.lead) {
    return Error(absl::StatusCode::kFailedPrecondition, "it is node '{}', node '{}' is wanted",
                 node, self_.lead);
  }
  const std::string asked = ChallengeWords(nonce, node);
  if (!IsSame(proof, Proof(token_, "lead", hello_, asked))) {
    return Error(absl::StatusCode::kPermissionDenied,
                 "its job token is not the one of this node '{}'", self_.node);
  }
  return PayloadWriter().Text(Proof(token_, "follower", hello_, asked)).bytes();
}

LeadGreeting::LeadGreeting(std::string job, std::string node, std::string token, const Id128& nonce)
    : job_(std::move(job)), node_(std::move(node)), token_(std::move(token)), nonce_(nonce) {}

absl::StatusOr<std::string> LeadGreeting::Challenge(std::string_view hello) {
  PayloadReader reader(hello);
  reader.Int<decltype(Id128::bytes)>();  // its nonce; what is proven is the hello as a whole
  follower_.job = reader.Text();
  follower_.run_id.bytes = reader.Int<decltype(Id128::bytes)>();
  follower_.generation = reader.Int<uint64_t>();
  follower_.node = reader.Text();
  follower_.lead = reader.Text();
  const size_t longest =
      std::max({follower_.job.size(), follower_.node.size(), follower_.lead.size()});
  if (!reader.ok() || !reader.rest().empty() || longest > kMaxNameBytes || follower_.node.empty()) {
    return Error(absl::StatusCode::kInvalidArgument, "a hello of {} bytes that do not fit",
                 hello.size());
  }
  if (follower_.job != job_) {
    return Error(absl::StatusCode::kFailedPrecondition, "it is of job '{}', this node of job '{}'",
                 follower_.job, job_);
  }
  if (follower_.lead != node_) {
    return Error(absl::StatusCode::kFailedPrecondition, "it looks for node '{}', this is node '{}'",
                 follower_.lead, node_);
  }
  const std::string asked = ChallengeWords(nonce_, node_);
  wanted_proof_ = Proof(token_, "follower", hello, asked);
  return asked + PayloadWriter().Text(Proof(token_, "lead", hello, asked)).bytes();
}

absl::Status LeadGreeting::CheckProof(std::string_view proof) const {
  PayloadReader reader(proof);
  const std::string_view found = reader.Text();
  if (reader.ok() && reader.rest().empty() && !wanted_proof_.empty() &&
      IsSame(found, wanted_proof_))
    return absl::OkStatus();
  return Error(absl::StatusCode::kPermissionDenied,
               "its job token is not the one of this node '{}'", node_);
}

}  // namespace outlast
