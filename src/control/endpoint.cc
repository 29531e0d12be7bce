#include "control/endpoint.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/error.h"
#include "outlast/base/status.h"

namespace outlast {

absl::StatusOr<std::vector<std::string>> ResolveHost(const std::string& host) {
  const auto resolved = ResolveAddress({.host = host});
  if (!resolved.ok()) {
    return Error(absl::StatusCode::kUnavailable,
                 "host '{}' does not resolve: {} (asked: hosts file and name servers of this "
                 "machine, for IPv4 and IPv6)",
                 host, MessageOf(resolved.status()));
  }
  std::vector<std::string> numbers;
  for (const SocketAddress& address : *resolved) {
    std::string number = address.host_port().host;
    if (std::find(numbers.begin(), numbers.end(), number) == numbers.end())
      numbers.push_back(std::move(number));
  }
  return numbers;
}

bool IsLoopback(const std::string& address) {
  in_addr v4{};
  if (inet_pton(AF_INET, address.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  return inet_pton(AF_INET6, address.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

bool IsAnyAddress(const std::string& address) {
  in_addr v4{};
  if (inet_pton(AF_INET, address.c_str(), &v4) == 1) return v4.s_addr == INADDR_ANY;
  in6_addr v6{};
  return inet_pton(AF_INET6, address.c_str(), &v6) == 1 && IN6_IS_ADDR_UNSPECIFIED(&v6);
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
    addresses.push_back(SocketAddress(at->ifa_addr, size).host_port().host);
  }
  return addresses;
}

absl::StatusOr<std::string> AddressTowards(const HostPort& to) {
  const auto addresses = ResolveAddress(to);
  if (!addresses.ok()) return Annotate(addresses.status(), to.host);
  absl::Status why;
  for (const SocketAddress& address : *addresses) {
    // Connecting a datagram socket only looks up the route.
    const UniqueFd fd(socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (fd.is_open() && connect(fd.get(), address.get(), address.size()) == 0) {
      OUTLAST_ASSIGN_OR_RETURN(const SocketAddress own, SocketAddress::Local(fd.get()));
      return own.host_port().host;
    }
    why = ErrnoStatus(errno, fmt::format("the way to {}", address.host_port().text()));
  }
  return MakeStatus(absl::StatusCode::kUnavailable, std::string(MessageOf(why)));
}

bool IsMine(std::span<const std::string> addresses, std::span<const std::string> own) {
  return std::any_of(addresses.begin(), addresses.end(), [&](const std::string& address) {
    return std::find(own.begin(), own.end(), address) != own.end();
  });
}

std::string WhyNotBound(const HostPort& address) {
  const auto number = NumericAddress(address);
  if (!number.ok()) return std::string(MessageOf(number.status()));
  const auto bound = ListenOn(*number);
  return bound.ok() ? "it was taken a moment ago" : std::string(MessageOf(bound.status()));
}

}  // namespace outlast
