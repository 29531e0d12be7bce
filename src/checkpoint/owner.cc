#include "checkpoint/owner.h"

#include <sys/stat.h>
#include <unistd.h>

#include <optional>

#include "base/proc.h"

namespace outlast {

OwnerIdentity OwnerIdentity::Self() {
  OwnerIdentity self;
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  self.host = host;
  self.boot_id = BootId();
  struct stat facts;
  if (stat("/proc/self/ns/pid", &facts) == 0) self.pid_namespace = facts.st_ino;
  self.pid = getpid();
  if (const auto found = ReadProcess(getpid()); found.has_value())
    self.pid_start = found->start_ticks;
  return self;
}

OwnerState StateOfOwner(const Claim& claim, const OwnerIdentity& self) {
  if (claim.boot_id.is_zero() || claim.boot_id != self.boot_id ||
      claim.pid_namespace != self.pid_namespace) {
    return OwnerState::kUnknown;
  }
  const std::optional<ProcessInfo> found = ReadProcess(static_cast<pid_t>(claim.pid));
  const bool lives =
      found.has_value() && !found->is_zombie() && found->start_ticks == claim.pid_start;
  return lives ? OwnerState::kAlive : OwnerState::kGone;
}

}  // namespace outlast
