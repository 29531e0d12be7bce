// Who listens on this machine.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace outlast {

// Whether some process of this network namespace listens on the TCP port, at whatever address. The
// kernel is asked (sock_diag(7)): nobody is connected to. kUnavailable: it does not tell.
absl::StatusOr<bool> IsListenedOn(uint16_t port);

}  // namespace outlast
