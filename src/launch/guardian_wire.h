// What agent and guardian say to each other. They are one program, forked: no version.
#pragma once

#include <cstdint>

namespace outlast {

enum class GuardianOrder : uint8_t {
  // i32 slot, u64 incarnation, u32 count and Text each of the environment, u32 count and Text each
  // of the descriptors'
  // variables, u32 count and i32 each of the CPUs, i32 NUMA node; descriptors: standard input,
  // output, error, then those.
  kSpawn = 1,
  // i32 slot, u64 incarnation, i32 signal
  kForward = 2,
  kTerminate = 3,
  kKill = 4,
  kFinish = 5,
};

// u8 kind, i32 slot, u64 incarnation, i32 pid or code, i32 signal, Text error
enum class GuardianReportKind : uint8_t { kStarted = 1, kExited = 2, kGone = 3, kStuck = 4 };

}  // namespace outlast
