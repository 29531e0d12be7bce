#include "run/peer_frames.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "outlast/base/crc32c.h"

namespace outlast {
namespace {

constexpr std::string_view kMagic = "OTLP";
constexpr size_t kMaxReasonBytes = 1024;
constexpr size_t kChannelAt = 6, kLengthAt = 8, kChecksumAt = 12;

template <typename Integer>
Integer ReadAt(std::string_view header, size_t at) {
  Integer value;
  std::memcpy(&value, header.data() + at, sizeof value);
  return value;
}

uint32_t Checksum(std::string_view header, std::string_view payload) {
  Crc32cStream stream;
  stream.Update(std::as_bytes(std::span(header.substr(0, kChecksumAt))));
  stream.Update(std::as_bytes(std::span(payload)));
  return stream.value();
}

// Bytes of a stranger, readable in one line.
std::string Printable(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes.substr(0, kFrameHeaderBytes))
    text += byte >= ' ' && byte <= '~' ? byte : '.';
  return text;
}

}  // namespace

uint16_t Frame::channel() const { return ReadAt<uint16_t>(header, kChannelAt); }

Frame MakeFrame(uint16_t channel, std::string payload) {
  PayloadWriter header;
  for (const char byte : kMagic) header.Int(byte);
  header.Int(kPeerVersion).Int(channel).Int(static_cast<uint32_t>(payload.size()));
  header.Int(Checksum(header.bytes(), payload));
  return {header.bytes(), std::move(payload)};
}

RefusedWord ReadRefused(std::string_view rest) {
  RefusedWord word;
  if (rest.empty()) return word;
  if (rest[0] == static_cast<char>(PeerRefusal::kGenerationIsOver))
    word.kind = PeerRefusal::kGenerationIsOver;
  for (const char byte : rest.substr(1, kMaxReasonBytes))
    word.why += static_cast<unsigned char>(byte) < ' ' || byte == 127 ? ' ' : byte;
  return word;
}

std::string WriteRefused(PeerRefusal kind, std::string_view why) {
  std::string rest(1, static_cast<char>(kind));
  return rest.append(why.substr(0, kMaxReasonBytes));
}

absl::Status FrameParser::Take(std::string_view* bytes, Parsed* frame) {
  is_whole_ = false;
  if (header_.size() < kFrameHeaderBytes) OUTLAST_RETURN_IF_ERROR(TakeHeader(bytes));
  if (header_.size() < kFrameHeaderBytes) return absl::OkStatus();
  const size_t count = std::min(bytes->size(), payload_bytes_ - payload_.size());
  payload_.append(bytes->substr(0, count));
  bytes->remove_prefix(count);
  if (payload_.size() < payload_bytes_) return absl::OkStatus();
  OUTLAST_RETURN_IF_ERROR(CheckChecksum());
  frame->channel = ReadAt<uint16_t>(header_, kChannelAt);
  frame->payload = std::exchange(payload_, {});
  header_.clear();
  is_whole_ = true;
  return absl::OkStatus();
}

absl::Status FrameParser::TakeHeader(std::string_view* bytes) {
  const size_t count = std::min(bytes->size(), kFrameHeaderBytes - header_.size());
  header_.append(bytes->substr(0, count));
  bytes->remove_prefix(count);
  const size_t known = std::min(header_.size(), kMagic.size());
  if (header_.compare(0, known, kMagic, 0, known) != 0) {
    return Error(absl::StatusCode::kInvalidArgument, "a stranger's bytes, '{}'",
                 Printable(header_));
  }
  if (header_.size() >= kChannelAt) {
    if (const auto version = ReadAt<uint16_t>(header_, kMagic.size()); version != kPeerVersion) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "it speaks version {} of the protocol between agents, this side version {}",
                   version, kPeerVersion);
    }
  }
  if (header_.size() < kFrameHeaderBytes) return absl::OkStatus();
  payload_bytes_ = ReadAt<uint32_t>(header_, kLengthAt);
  if (payload_bytes_ > max_payload_) {
    return Error(absl::StatusCode::kInvalidArgument, "a message of {} bytes, at most {} wanted",
                 payload_bytes_, max_payload_);
  }
  return absl::OkStatus();
}

absl::Status FrameParser::CheckChecksum() const {
  const uint32_t found = Checksum(header_, payload_);
  const auto wanted = ReadAt<uint32_t>(header_, kChecksumAt);
  if (found == wanted) return absl::OkStatus();
  return Error(absl::StatusCode::kDataLoss,
               "a message of {} bytes: crc {:#x}, its header says {:#x}", payload_bytes_, found,
               wanted);
}

}  // namespace outlast
