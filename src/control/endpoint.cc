#include "control/endpoint.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>

#include "base/error.h"
#include "outlast/base/fd.h"

namespace outlast {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

std::string ToNumber(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST];
  if (getnameinfo(address, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text;
}

// `flags` of getaddrinfo. `error`: its code.
AddressList LookUp(const std::string& host, int flags, int& error) {
  const addrinfo hints{.ai_flags = flags, .ai_socktype = SOCK_STREAM};
  addrinfo* list = nullptr;
  error = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  return {error == 0 ? list : nullptr, freeaddrinfo};
}

}  // namespace

absl::StatusOr<Endpoint> ParseEndpoint(std::string_view text) {
  const auto refuse = [&] {
    return Error(absl::StatusCode::kInvalidArgument,
                 "'{}' is no HOST:PORT, such as node7:29400 or [::1]:29400", text);
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return refuse();
  std::string_view host = text.substr(0, colon);
  const bool has_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (has_brackets) host = host.substr(1, host.size() - 2);
  if (host.empty() || (!has_brackets && host.find(':') != std::string_view::npos)) return refuse();
  Endpoint endpoint{.host = std::string(host)};
  const std::string_view port = text.substr(colon + 1);
  const auto [end, failed] = std::from_chars(port.data(), port.data() + port.size(), endpoint.port);
  if (failed != std::errc() || end != port.data() + port.size() || endpoint.port < 0 ||
      endpoint.port > 65535) {
    return refuse();
  }
  return endpoint;
}

std::string JoinHostPort(std::string_view host, int port) {
  return host.find(':') != std::string_view::npos ? fmt::format("[{}]:{}", host, port)
                                                  : fmt::format("{}:{}", host, port);
}

absl::StatusOr<std::vector<std::string>> ResolveHost(const std::string& host) {
  int error = 0;
  const AddressList list = LookUp(host, 0, error);
  if (list == nullptr) {
    return Error(absl::StatusCode::kUnavailable,
                 "host '{}' does not resolve: {} (asked: hosts file and name servers of this "
                 "machine, for IPv4 and IPv6)",
                 host, error == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(error));
  }
  std::vector<std::string> addresses;
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
    const std::string number = ToNumber(at->ai_addr, at->ai_addrlen);
    if (!number.empty() && std::find(addresses.begin(), addresses.end(), number) == addresses.end())
      addresses.push_back(number);
  }
  return addresses;
}

bool IsNumericAddress(const std::string& host) {
  int error = 0;
  return LookUp(host, AI_NUMERICHOST, error) != nullptr;
}

bool IsLoopback(const std::string& address) {
  in_addr v4{};
  if (inet_pton(AF_INET, address.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  return inet_pton(AF_INET6, address.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

std::vector<std::string> LocalAddresses() {
  std::vector<std::string> addresses;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return addresses;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(first, freeifaddrs);
  for (const ifaddrs* at = first; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || (at->ifa_flags & IFF_UP) == 0) continue;
    const int family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::string number = ToNumber(at->ifa_addr, size);
    if (!number.empty()) addresses.push_back(std::move(number));
  }
  return addresses;
}

bool IsMine(std::span<const std::string> addresses, std::span<const std::string> own) {
  return std::any_of(addresses.begin(), addresses.end(), [&](const std::string& address) {
    return std::find(own.begin(), own.end(), address) != own.end();
  });
}

std::string WhyNotBound(const std::string& address, int port) {
  int error = 0;
  const AddressList list = LookUp(address, AI_NUMERICHOST | AI_PASSIVE, error);
  if (list == nullptr) return gai_strerror(error);
  if (list->ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(list->ai_addr)->sin6_port = htons(static_cast<uint16_t>(port));
  } else {
    reinterpret_cast<sockaddr_in*>(list->ai_addr)->sin_port = htons(static_cast<uint16_t>(port));
  }
  const UniqueFd socket_fd(socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  setsockopt(socket_fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(socket_fd.get(), list->ai_addr, list->ai_addrlen) == 0 &&
      listen(socket_fd.get(), 1) == 0) {
    return "it was taken a moment ago";
  }
  return std::strerror(errno);
}

}  // namespace outlast
