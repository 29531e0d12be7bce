// What agent and guardian say to each other. They are one program, forked: no version.
#pragma once

#include <cstdint>

namespace outlast {

enum class GuardianOrder : uint8_t {
  // i32 slot, u64 incarnation, u8 may be forked from the template, u32 count and Text each of the
  // environment, u32 count and Text each
  // of the descriptors'
  // variables, u32 count and i32 each of the CPUs, i32 NUMA node; descriptors: standard input,
  // output, error, then those.
  kSpawn = 1,
  // i32 slot, u64 incarnation, i32 signal
  kForward = 2,
  kTerminate = 3,
  kKill = 4,
  kFinish = 5,
  // i32 0, u64 0, Text program, u32 count and Text each of the arguments, the same of the
  // environment; descriptors: standard input, output, error
  kTemplate = 6,
};

// u8 kind, i32 slot, u64 incarnation, i32 pid or code, i32 signal (kStarted: 1 when it was forked
// from the template), Text error or note
enum class GuardianReportKind : uint8_t {
  kStarted = 1,
  kExited = 2,
  kGone = 3,
  kStuck = 4,
  kTemplateNote = 5,
  kTemplateReady = 6,
};

}  // namespace outlast
