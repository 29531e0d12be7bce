#include "base/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/error.h"

namespace outlast {
namespace {

constexpr int kFlags = SOCK_NONBLOCK | SOCK_CLOEXEC;

absl::StatusOr<std::vector<SocketAddress>> GetAddresses(const HostPort& at, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(at.host.c_str(), std::to_string(at.port).c_str(), &hints, &list);
  if (error != 0) {
    return Error((flags & AI_NUMERICHOST) != 0 ? absl::StatusCode::kInvalidArgument
                                               : absl::StatusCode::kUnavailable,
                 "address {}: {}", at.text(), gai_strerror(error));
  }
  std::vector<SocketAddress> addresses;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next)
    addresses.emplace_back(entry->ai_addr, entry->ai_addrlen);
  freeaddrinfo(list);
  return addresses;
}

absl::StatusOr<SocketAddress> Ask(int fd, int (*name)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (name(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    return ErrnoStatus(errno, "the address of a socket");
  return SocketAddress(reinterpret_cast<const sockaddr*>(&address), size);
}

void SendSmallOnesAtOnce(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

absl::StatusOr<HostPort> HostPort::Parse(std::string_view text) {
  HostPort parsed;
  const size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon == text.npos ? 0 : colon);
  const bool in_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (in_brackets) host = host.substr(1, host.size() - 2);
  const std::string_view port = text.substr(colon == text.npos ? text.size() : colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), parsed.port);
  if (host.empty() || error != std::errc() || end != port.data() + port.size() ||
      (!in_brackets && host.find_first_of(":[]") != host.npos)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "address '{}': HOST:PORT wanted, an IPv6 number in brackets", text.substr(0, 256));
  }
  parsed.host = host;
  return parsed;
}

std::string HostPort::text() const {
  return host.find(':') == host.npos ? fmt::format("{}:{}", host, port)
                                     : fmt::format("[{}]:{}", host, port);
}

SocketAddress::SocketAddress(const sockaddr* address, socklen_t size)
    : size_(std::min<socklen_t>(size, sizeof address_)) {
  std::memcpy(&address_, address, size_);
}

absl::StatusOr<SocketAddress> SocketAddress::Local(int fd) { return Ask(fd, &getsockname); }
absl::StatusOr<SocketAddress> SocketAddress::Remote(int fd) { return Ask(fd, &getpeername); }

HostPort SocketAddress::host_port() const {
  char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "0";
  getnameinfo(get(), size_, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  HostPort result{.host = host};
  std::from_chars(port, port + std::strlen(port), result.port);
  return result;
}

absl::StatusOr<SocketAddress> NumericAddress(const HostPort& at) {
  OUTLAST_ASSIGN_OR_RETURN(const auto addresses, GetAddresses(at, AI_NUMERICHOST));
  return addresses.front();
}

absl::StatusOr<std::vector<SocketAddress>> ResolveAddress(const HostPort& at) {
  return GetAddresses(at, 0);
}

absl::StatusOr<UniqueFd> ListenOn(const SocketAddress& at) {
  UniqueFd fd(socket(at.family(), SOCK_STREAM | kFlags, 0));
  const int on = 1;
  if (fd.is_open()) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!fd.is_open() || bind(fd.get(), at.get(), at.size()) != 0 ||
      listen(fd.get(), SOMAXCONN) != 0) {
    return ErrnoStatus(errno, fmt::format("listen on {}", at.host_port().text()));
  }
  return fd;
}

absl::StatusOr<UniqueFd> StartConnect(const SocketAddress& to, const SocketAddress* from) {
  UniqueFd fd(socket(to.family(), SOCK_STREAM | kFlags, 0));
  const bool is_bound = fd.is_open() && (from == nullptr || from->family() != to.family() ||
                                         bind(fd.get(), from->get(), from->size()) == 0);
  if (!is_bound ||
      (connect(fd.get(), to.get(), to.size()) != 0 && errno != EINPROGRESS && errno != EINTR)) {
    return ErrnoStatus(errno, fmt::format("connect to {}", to.host_port().text()));
  }
  SendSmallOnesAtOnce(fd.get());
  return fd;
}

absl::StatusOr<UniqueFd> AcceptOn(int listener) {
  while (true) {
    UniqueFd fd(accept4(listener, nullptr, nullptr, kFlags));
    if (fd.is_open()) {
      SendSmallOnesAtOnce(fd.get());
      return fd;
    }
    switch (errno) {
      case EMFILE:
      case ENFILE:
      case ENOBUFS:
      case ENOMEM:
        return Error(absl::StatusCode::kResourceExhausted, "accept: {}", std::strerror(errno));
      case EAGAIN:
        return absl::NotFoundError("accept: nobody is there");
      case EBADF:
      case EINVAL:
      case ENOTSOCK:
      case EOPNOTSUPP:
        return ErrnoStatus(errno, "accept");
      default:
        continue;  // that connection went before it was taken
    }
  }
}

absl::Status SocketError(int fd) {
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  return error == 0 ? absl::OkStatus() : ErrnoStatus(error, "connection");
}

void EndWhenUnheard(int fd, absl::Duration silence) {
  constexpr int kProbes = 4;
  const auto set = [fd](int level, int name, int value) {
    (void)setsockopt(fd, level, name, &value, sizeof value);
  };
  const auto between = static_cast<int>(absl::ToInt64Seconds(silence / kProbes));
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, between));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, between));
  set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(absl::ToInt64Milliseconds(silence)));
}

}  // namespace outlast
