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
  }
  return "unknown";
}

uint64_t FaultRoot(FaultClass fault_class, std::string_view what, uint32_t phase) {
  const Sha256Digest digest =
      Sha256(fmt::format("{}/{}/{}", FaultClassName(fault_class), what, phase));
  uint64_t root = 0;
  std::memcpy(&root, digest.data(), sizeof(root));
  return root;
}

}  // namespace outlast
