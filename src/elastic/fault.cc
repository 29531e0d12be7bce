#include "outlast/elastic/fault.h"

#include <fmt/format.h>

#include <cstring>

#include "outlast/base/digest.h"

namespace outlast {

std::string_view FaultClassName(FaultClass fault_class) {
  switch (fault_class) {
    case FaultClass::kPreempt:
      return "preempt";
    case FaultClass::kCrash:
      return "crash";
    case FaultClass::kHang:
      return "hang";
    case FaultClass::kResource:
      return "resource";
    case FaultClass::kEarlyExit:
      return "early exit";
    case FaultClass::kHardware:
      return "hardware";
    case FaultClass::kNodeLost:
      return "node lost";
    case FaultClass::kLinkCut:
      return "link cut";
  }
  return "unknown";
}

std::string HowItEnded(const ProcessEnd& end) {
  if (end.signal == 0) return fmt::format("exit code {}", end.code);
  return fmt::format("killed by signal {}{}", end.signal,
                     end.out_of_memory ? ", out of memory" : "");
}

FaultClass ClassOf(const ProcessEnd& end) {
  if (end.clean()) return FaultClass::kEarlyExit;
  return end.out_of_memory ? FaultClass::kResource : FaultClass::kCrash;
}

uint64_t FaultRoot(FaultClass fault_class, std::string_view what, uint32_t phase) {
  const Sha256Digest digest =
      Sha256(fmt::format("{}/{}/{}", FaultClassName(fault_class), what, phase));
  uint64_t root = 0;
  std::memcpy(&root, digest.data(), sizeof(root));
  return root;
}

}  // namespace outlast
