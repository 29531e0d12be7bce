// One end of a SOCK_SEQPACKET pair: whole messages of up to kMaxMessageBytes, with descriptors
// beside them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/base/fd.h"

namespace outlast {

// Safe for one reader and several writers at once: each message is one system call.
class Channel {
 public:
  static constexpr size_t kMaxMessageBytes = 128 << 10;
  static constexpr size_t kMaxDescriptors = 16;

  struct Packet {
    std::string bytes;
    std::vector<UniqueFd> fds;
  };

  Channel() = default;
  explicit Channel(UniqueFd fd) : fd_(std::move(fd)) {}

  static absl::StatusOr<std::pair<Channel, Channel>> MakePair();

  int fd() const { return fd_.get(); }
  UniqueFd Release() { return std::move(fd_); }

  // Sends one message; the descriptors in `fds` are borrowed. Never raises SIGPIPE.
  // kUnavailable: the peer is gone, or its queue stayed full for 5 s (a stopped peer must not stop
  // us).
  absl::Status Send(std::string_view bytes, std::span<const int> fds = {}) const;
  // The same without waiting. kResourceExhausted: the peer's queue is full, and nothing was sent.
  absl::Status TrySend(std::string_view bytes, std::span<const int> fds = {}) const;
  // The next message; blocks. nullopt: the peer closed its end.
  // kInvalidArgument: a message over the limits.
  absl::StatusOr<std::optional<Packet>> Receive() const { return ReceiveWith(0); }
  // The same without waiting. kResourceExhausted: nothing is there.
  absl::StatusOr<std::optional<Packet>> TryReceive() const;

 private:
  absl::StatusOr<std::optional<Packet>> ReceiveWith(int flags) const;

  UniqueFd fd_;
};

// Fields of a message: integers little endian at their own size, texts as u32 length and bytes.
class PayloadWriter {
 public:
  template <typename Integer>
  PayloadWriter& Int(Integer value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  PayloadWriter& Text(std::string_view text) {
    Int(static_cast<uint32_t>(text.size()));
    bytes_.append(text);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Reads what PayloadWriter wrote; never past the end. After a read that did not fit, all reads give
// zero and ok() is false.
class PayloadReader {
 public:
  explicit PayloadReader(std::string_view bytes) : left_(bytes) {}

  template <typename Integer>
  Integer Int() {
    Integer value{};
    const std::string_view bytes = Take(sizeof value);
    if (ok_) __builtin_memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::string_view Text() { return Take(Int<uint32_t>()); }
  bool ok() const { return ok_; }
  std::string_view rest() const { return left_; }

 private:
  std::string_view Take(size_t count) {
    ok_ = ok_ && count <= left_.size();
    if (!ok_) return {};
    const std::string_view taken = left_.substr(0, count);
    left_.remove_prefix(count);
    return taken;
  }

  std::string_view left_;
  bool ok_ = true;
};

// A status as code and message. A code that is not known here is read as kUnknown.
void PutStatus(PayloadWriter& writer, const absl::Status& status);
absl::Status TakeStatus(PayloadReader& reader);

}  // namespace outlast
