#include "base/listening.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "base/error.h"
#include "outlast/base/fd.h"

namespace outlast {
namespace {

constexpr uint32_t kListening = 1u << 10;  // TCP_LISTEN of the kernel's tcp_states.h

struct Request {
  nlmsghdr header;
  inet_diag_req_v2 what;
};

enum class Heard { kFound, kMore, kEnd, kRefused };

Heard Look(const char* bytes, size_t size, uint16_t port) {
  auto left = static_cast<uint32_t>(size);
  for (const auto* message = reinterpret_cast<const nlmsghdr*>(bytes); NLMSG_OK(message, left);
       message = NLMSG_NEXT(message, left)) {
    if (message->nlmsg_type == NLMSG_DONE) return Heard::kEnd;
    if (message->nlmsg_type == NLMSG_ERROR) return Heard::kRefused;
    const auto* found = static_cast<const inet_diag_msg*>(NLMSG_DATA(message));
    if (message->nlmsg_len >= NLMSG_LENGTH(sizeof *found) && found->id.idiag_sport == htons(port))
      return Heard::kFound;
  }
  return Heard::kMore;
}

absl::StatusOr<bool> IsListenedOn(int family, uint16_t port) {
  const UniqueFd kernel(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!kernel.is_open()) return ErrnoStatus(errno, "ask the kernel who listens");
  Request request{};
  request.header.nlmsg_len = sizeof request;
  request.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  request.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  request.what.sdiag_family = static_cast<uint8_t>(family);
  request.what.sdiag_protocol = IPPROTO_TCP;
  request.what.idiag_states = kListening;
  if (send(kernel.get(), &request, sizeof request, 0) < 0)
    return ErrnoStatus(errno, "ask the kernel who listens");
  alignas(nlmsghdr) std::array<char, 32 << 10> answer;
  while (true) {
    // A dump is answered from within the kernel: there is no peer to wait for.
    const ssize_t size = recv(kernel.get(), answer.data(), answer.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return ErrnoStatus(size < 0 ? errno : EIO, "hear from the kernel who listens");
    switch (Look(answer.data(), static_cast<size_t>(size), port)) {
      case Heard::kFound:
        return true;
      case Heard::kEnd:
        return false;
      case Heard::kRefused:
        return Error(absl::StatusCode::kUnavailable, "the kernel does not tell who listens");
      case Heard::kMore:
        break;
    }
  }
}

}  // namespace

absl::StatusOr<bool> IsListenedOn(uint16_t port) {
  for (const int family : {AF_INET6, AF_INET}) {
    auto found = IsListenedOn(family, port);
    if (!found.ok() || *found) return found;
  }
  return false;
}

}  // namespace outlast
