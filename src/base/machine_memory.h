#pragma once

#include <cstdint>

namespace outlast {

// Bytes that this process' machine has, or that the tightest of its control groups (v2) allows. 0:
// not known.
uint64_t MachineMemoryBytes();

}  // namespace outlast
