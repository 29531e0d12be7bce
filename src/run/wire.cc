#include "run/wire.h"

#include <cstring>
#include <utility>

#include "base/error.h"

namespace outlast {
namespace {

constexpr uint32_t kMagic = 0x574c544f;  // "OTLW"
constexpr int kLastStatusCode = 16;      // kUnauthenticated

absl::StatusCode ToStatusCode(int32_t code) {
  if (code < 0 || code > kLastStatusCode) return absl::StatusCode::kUnknown;
  return static_cast<absl::StatusCode>(code);
}

}  // namespace

std::string Encode(const Message& message) {
  PayloadWriter header;
  header.Int(kMagic)
      .Int(kWireVersion)
      .Int(static_cast<uint16_t>(message.kind))
      .Int(message.generation);
  header.Int(message.request).Int(static_cast<int32_t>(message.status)).Text(message.payload);
  return header.bytes();
}

absl::StatusOr<Message> Decode(Channel::Packet packet) {
  PayloadReader reader(packet.bytes);
  const auto magic = reader.Int<uint32_t>();
  const auto version = reader.Int<uint16_t>();
  if (!reader.ok() || magic != kMagic) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "message of {} bytes: does not start with \"OTLW\"", packet.bytes.size());
  }
  if (version != kWireVersion) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "message of protocol version {}: version {} wanted", version, kWireVersion);
  }
  Message message;
  message.kind = static_cast<MessageKind>(reader.Int<uint16_t>());
  message.generation = reader.Int<uint64_t>();
  message.request = reader.Int<uint64_t>();
  message.status = ToStatusCode(reader.Int<int32_t>());
  message.payload = reader.Text();
  if (!reader.ok() || !reader.rest().empty()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "message of {} bytes: its header tells another length", packet.bytes.size());
  }
  message.fds = std::move(packet.fds);
  return message;
}

}  // namespace outlast
