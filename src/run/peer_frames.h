// How bytes between agents become messages. Version 1, little endian:
//
//   0 u32 magic "OTLP"  4 u16 version 1  6 u16 channel  8 u32 payload bytes
//   12 u32 CRC32C of bytes 0..11 and the payload  16 payload
//
// Magic and version keep their place in every later version, so that each side can name the
// other's.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace outlast {

inline constexpr uint16_t kPeerVersion = 1;
inline constexpr size_t kFrameHeaderBytes = 16;
inline constexpr uint16_t kLinkChannel = 0;  // the connection's own words (PeerWord)

// What the two ends of a connection say to each other beneath all users: the first byte of a
// payload of kLinkChannel.
enum class PeerWord : uint8_t {
  // The greeting, in this order (peer_greeting.h).
  kHello = 1,      // follower
  kChallenge = 2,  // lead
  kProof = 3,      // follower
  kWelcome = 4,    // lead, once it is in the follower's generation: the connection stands
  // Any time.
  kBeat = 5,
  kRefused = 6,  // u8 Refusal, rest: why, for people; nothing follows
};
// kRetry: a later attempt may find it otherwise. kGenerationIsOver: none of this generation can.
enum class PeerRefusal : uint8_t { kRetry = 0, kGenerationIsOver = 1 };
// What a REFUSED says: text of limited length, fit for a line.
struct RefusedWord {
  PeerRefusal kind = PeerRefusal::kRetry;
  std::string why;
};
RefusedWord ReadRefused(std::string_view rest);
std::string WriteRefused(PeerRefusal kind, std::string_view why);

struct Frame {
  std::string header;
  std::string payload;
  size_t size() const { return header.size() + payload.size(); }
  uint16_t channel() const;
};
Frame MakeFrame(uint16_t channel, std::string payload);

// Cuts a stream into frames. Holds no more of a payload than came.
class FrameParser {
 public:
  explicit FrameParser(size_t max_payload) : max_payload_(max_payload) {}
  void set_max_payload(size_t bytes) { max_payload_ = bytes; }

  // Takes a piece of the stream, and moves `*bytes` past what it took: it stops after a frame that
  // is whole, which `*frame` is then, and is_whole() says so.
  // kInvalidArgument: a stranger's bytes, as soon as they can be told, or a payload over the limit.
  // kFailedPrecondition: another version, naming both. kDataLoss: the checksum does not match.
  struct Parsed {
    uint16_t channel = 0;
    std::string payload;
  };
  absl::Status Take(std::string_view* bytes, Parsed* frame);
  bool is_whole() const { return is_whole_; }
  // Nothing of an unfinished frame is held.
  bool is_between_frames() const { return header_.empty(); }

 private:
  absl::Status TakeHeader(std::string_view* bytes);
  absl::Status CheckChecksum() const;

  size_t max_payload_;
  std::string header_;
  std::string payload_;
  uint32_t payload_bytes_ = 0;
  bool is_whole_ = false;
};

}  // namespace outlast
