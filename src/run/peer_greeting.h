// How two agents of one job find out that they are that: pure, one object a side.
//
//   follower                                        lead
//   HELLO      nonce, job, run, generation,  ---->  the same job and run? am I who is meant?
//              own node, the lead's node
//              the same token?               <----  CHALLENGE  nonce, own node, proof
//   PROOF      proof                         ---->  the same token?
//
// A proof is HMAC-SHA256 over its side's name and all that was said, both nonces in it, with the
// job's token as the key: the token itself is never sent, and no proof serves the other side or
// another connection. Without a token the key is empty, and the proof proves nothing but that the
// other side has none either.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/id.h"

namespace outlast {

inline constexpr size_t kMaxGreetingBytes = 4096;

// What a follower says of itself.
struct PeerIdentity {
  std::string job;
  Id128 run_id;
  uint64_t generation = 0;
  std::string node;
  std::string lead;  // whom it means to reach
};

// Payloads are without their first byte, the PeerWord.
class FollowerGreeting {
 public:
  FollowerGreeting(const PeerIdentity& self, std::string token, const Id128& nonce);
  const std::string& hello() const { return hello_; }
  // The proof that answers `challenge`. kInvalidArgument: it is none. kFailedPrecondition: it comes
  // from another node. kPermissionDenied: the tokens differ.
  absl::StatusOr<std::string> Answer(std::string_view challenge) const;

 private:
  const PeerIdentity self_;
  const std::string token_;
  const std::string hello_;
};

class LeadGreeting {
 public:
  LeadGreeting(std::string job, std::string node, std::string token, const Id128& nonce);
  // The challenge that answers `hello`. kInvalidArgument: it is none. kFailedPrecondition: it is of
  // another job, or means another node; the message names both.
  absl::StatusOr<std::string> Challenge(std::string_view hello);
  // kPermissionDenied: the tokens differ.
  absl::Status CheckProof(std::string_view proof) const;
  // After Challenge: unproven until CheckProof.
  const PeerIdentity& follower() const { return follower_; }

 private:
  const std::string job_;
  const std::string node_;
  const std::string token_;
  const Id128 nonce_;
  PeerIdentity follower_;
  std::string wanted_proof_;
};

}  // namespace outlast
