// TCP endpoints: HOST:PORT as text and as the kernel's addresses, IPv4 and IPv6.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/base/fd.h"

namespace outlast {

// "127.0.0.1:80", "[::1]:80", "node7:80".
struct HostPort {
  std::string host;  // a name or a number, without brackets
  uint16_t port = 0;

  // kInvalidArgument: anything else than HOST:PORT; an IPv6 number wants brackets.
  static absl::StatusOr<HostPort> Parse(std::string_view text);
  std::string text() const;
  bool operator==(const HostPort&) const = default;
};

class SocketAddress {
 public:
  SocketAddress() = default;
  SocketAddress(const sockaddr* address, socklen_t size);
  // Of a socket: its own end, and the other one. kUnavailable: not connected.
  static absl::StatusOr<SocketAddress> Local(int fd);
  static absl::StatusOr<SocketAddress> Remote(int fd);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address_); }
  socklen_t size() const { return size_; }
  int family() const { return address_.ss_family; }
  HostPort host_port() const;

 private:
  sockaddr_storage address_{};
  socklen_t size_ = 0;
};

// The address of a number such as "127.0.0.1"; never waits. kInvalidArgument: the host is a name.
absl::StatusOr<SocketAddress> NumericAddress(const HostPort& at);
// All addresses of a name or a number, best first. Waits for the machine's name service.
// kUnavailable: it does not know the name, now.
absl::StatusOr<std::vector<SocketAddress>> ResolveAddress(const HostPort& at);

// A non-blocking listener with the longest backlog; port 0: any free one. kUnavailable: the port is
// taken, or the address is none of this machine.
absl::StatusOr<UniqueFd> ListenOn(const SocketAddress& at);
// A non-blocking socket whose connect has begun: decided once it is writable (SocketError). Small
// messages leave at once. `from`: the address of this end, with port 0; null: the kernel chooses.
absl::StatusOr<UniqueFd> StartConnect(const SocketAddress& to, const SocketAddress* from = nullptr);
// The next connection of a listener, non-blocking. kNotFound: none is there.
// kResourceExhausted: the process or the machine has no descriptor left.
absl::StatusOr<UniqueFd> AcceptOn(int listener);
// The pending error of a socket, as `connect` would give it.
absl::Status SocketError(int fd);
// From now on the connection ends (ETIMEDOUT) when nothing of the other machine was heard for
// `silence`, whether bytes wait to be taken there or not. Without it the kernel waits for 15
// minutes, or for ever where nothing is to be sent. A stopped process is no silence: its machine
// answers.
void EndWhenUnheard(int fd, absl::Duration silence);

}  // namespace outlast
