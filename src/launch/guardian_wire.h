// What agent and guardian say to each other. They are one program, forked: no version; but an agent
// that adopts may be of another build, and is asked for kGuardianVersion and for the version that
// the workers speak (run/wire.h) first.
#pragma once

#include <cstdint>

namespace outlast {

// Raised too when what an agent keeps changes its form: memo, options, lines.
inline constexpr uint32_t kGuardianVersion = 2;

enum class GuardianOrder : uint8_t {
  // i32 slot, u64 incarnation, u8 may be forked from the template, u32 count and Text each of the
  // environment, u32 count and Text each of the descriptors' variables, u32 count and i32 each of
  // the CPUs, i32 NUMA node, u16 master's port, u8 it is the master; descriptors: standard input,
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
  // i32 0, u64 0, Text key, Text bytes; descriptors: any. For the next agent.
  kKeep = 7,
  // The first word of an agent that wants to adopt, over a connection of its own: i32 0, u64 0,
  // u32 kGuardianVersion, u32 kWireVersion, Text run id. Answered by kRefused, or by kKept of all
  // that was kept,
  // kAdopted, and then by what happened to the newest process of each slot, as if it did so now.
  kAdopt = 8,
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
  kKept = 7,     // error: the key; then Text bytes; descriptors as kept
  kAdopted = 8,  // error: u32 count, and of each slot i32 slot, u64 incarnation, i32 pid (0: not
                 // born yet) of the process that was ordered last
  kRefused = 9,  // error: why
};

}  // namespace outlast
