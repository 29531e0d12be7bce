#include "base/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr absl::Duration kFullQueue = absl::Seconds(5);
constexpr int kFullQueueStepMillis = 20;

void TakeDescriptors(msghdr& header, std::vector<UniqueFd>& fds) {
  for (cmsghdr* control = CMSG_FIRSTHDR(&header); control != nullptr;
       control = CMSG_NXTHDR(&header, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof fd, sizeof fd);
      fds.emplace_back(fd);
    }
  }
}

}  // namespace

absl::StatusOr<std::pair<Channel, Channel>> Channel::MakePair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    return ErrnoStatus(errno, "make a socket pair");
  std::pair<Channel, Channel> channels{Channel(UniqueFd(ends[0])), Channel(UniqueFd(ends[1]))};
  for (const int end : ends) {
    const int bytes = 4 * static_cast<int>(kMaxMessageBytes);
    setsockopt(end, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  }
  return channels;
}

absl::Status Channel::Send(std::string_view bytes, std::span<const int> fds) const {
  absl::Status sent = TrySend(bytes, fds);
  if (sent.code() != absl::StatusCode::kResourceExhausted) return sent;
  const absl::Duration deadline = Clock::Real().Uptime() + kFullQueue;
  while (true) {
    // A queue counts as writable only when it is three quarters empty, so a slow reader may let
    // several waits pass.
    pollfd writable{fd_.get(), POLLOUT, 0};
    poll(&writable, 1, kFullQueueStepMillis);
    absl::Status again = TrySend(bytes, fds);
    if (again.code() != absl::StatusCode::kResourceExhausted) return again;
    if (Clock::Real().Uptime() >= deadline) {
      return Error(absl::StatusCode::kUnavailable,
                   "send a message: the peer's queue was full for {} s",
                   absl::ToInt64Seconds(kFullQueue));
    }
  }
}

absl::Status Channel::TrySend(std::string_view bytes, std::span<const int> fds) const {
  if (bytes.size() > kMaxMessageBytes || fds.size() > kMaxDescriptors) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "message of {} bytes and {} descriptors: at most {} and {} wanted", bytes.size(),
                 fds.size(), kMaxMessageBytes, kMaxDescriptors);
  }
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* first = CMSG_FIRSTHDR(&header);
    first->cmsg_level = SOL_SOCKET;
    first->cmsg_type = SCM_RIGHTS;
    first->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(first), fds.data(), fds.size_bytes());
  }
  while (sendmsg(fd_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN)
      return Error(absl::StatusCode::kResourceExhausted,
                   "send a message: the peer's queue is full");
    return ErrnoStatus(errno, "send a message");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Channel::Packet>> Channel::TryReceive() const {
  return ReceiveWith(MSG_DONTWAIT);
}

absl::StatusOr<std::optional<Channel::Packet>> Channel::ReceiveWith(int flags) const {
  Packet packet;
  char buffer[kMaxMessageBytes];  // not zeroed, and only the pages that a message fills are touched
  iovec part{buffer, sizeof buffer};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t received;
  bool was_reset = false;
  // The kernel says once that the peer has closed its end and left something unread, before it
  // gives what the peer had said.
  do {
    received = recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC | flags);
  } while (received < 0 &&
           (errno == EINTR || (errno == ECONNRESET && !std::exchange(was_reset, true))));
  if (received < 0 && errno == EAGAIN)
    return Error(absl::StatusCode::kResourceExhausted, "receive a message: none is there");
  if (received < 0 && errno != ECONNRESET) return ErrnoStatus(errno, "receive a message");
  if (received <= 0) return std::optional<Packet>();
  TakeDescriptors(header, packet.fds);
  if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return Error(absl::StatusCode::kInvalidArgument, "message over {} bytes or {} descriptors",
                 kMaxMessageBytes, kMaxDescriptors);
  }
  packet.bytes.assign(buffer, static_cast<size_t>(received));
  return std::optional<Packet>(std::move(packet));
}

void PutStatus(PayloadWriter& writer, const absl::Status& status) {
  writer.Int(static_cast<int32_t>(status.code())).Text(MessageOf(status));
}

absl::Status TakeStatus(PayloadReader& reader) {
  const auto code = reader.Int<int32_t>();
  const std::string_view text = reader.Text();
  if (code == 0) return absl::OkStatus();
  const bool is_known =
      code > 0 && code <= static_cast<int32_t>(absl::StatusCode::kUnauthenticated);
  return MakeStatus(is_known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                    text);
}

}  // namespace outlast
