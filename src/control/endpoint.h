// Addresses of a host as numbers, and whose they are.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/socket.h"

namespace outlast {

// The addresses of `host` as numbers, in the order in which to try them, none twice. A number is
// its own address; a name may block for seconds on a name server. kUnavailable: it does not
// resolve.
absl::StatusOr<std::vector<std::string>> ResolveHost(const std::string& host);
// Of 127.0.0.0/8 or ::1.
bool IsLoopback(const std::string& address);
// 0.0.0.0, or :: however it is written: where all of a machine is listened at, and nobody is.
bool IsAnyAddress(const std::string& address);

// Addresses of this machine's interfaces that are up, as numbers.
std::vector<std::string> LocalAddresses();
// The own address, a number, from which this machine's packets reach `to`. kUnavailable: `to` does
// not resolve, or there is no way to it. Sends nothing.
absl::StatusOr<std::string> AddressTowards(const HostPort& to);
// Whether one of `addresses` is one of `own`: the addresses that an agent was given, or
// LocalAddresses(). Names are never compared, so an alias or another interface of a machine is
// recognised; 127.0.0.2 is not 127.0.0.1, so that agents of one machine can have addresses of their
// own.
bool IsMine(std::span<const std::string> addresses, std::span<const std::string> own);

// Why nothing can listen at `address`: the system's words.
std::string WhyNotBound(const HostPort& address);

}  // namespace outlast
