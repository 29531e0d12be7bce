// The template protocol, version 2: what `outlast run --template CMD` and CMD say to each other.
//
// A template is a process that has done a trainer's slow start once (imports, tables), and from
// then on forks ranks that begin where it stands. It finds a SOCK_SEQPACKET descriptor's number in
// OUTLAST_TEMPLATE_FD. Each message is one packet of at most 128 KiB with at most 16 descriptors;
// integers are little endian, a Text is u32 length and bytes, a List is u32 count and its items.
//
//   guardian -> template
//     1 kStart   u32 1, Text program, List of Text arguments (argument 0 too), u32 newest version
//                that the guardian speaks (absent: 1): the job's command, what forked ranks are to
//                run. The first message.
//     2 kFork    u64 request, i32 pid of the guardian. Descriptor: the gate, of SOCK_SEQPACKET.
//   template -> guardian
//     1 kReady   u32 version, which both speak from here on. Slow work is done; the template has
//     one
//                thread and no CUDA.
//     2 kForked  u64 request, i32 pid: a child of the guardian by now (the template forks twice and
//                reaps the process between, or uses CLONE_PARENT), waiting at its gate.
//     3 kRefused u64 request, Text why, for people (at most 300 bytes are read).
//
// A forked child reads one packet from its gate, which may come at once or after weeks: forks are
// asked for ahead. At the end of file it exits without a word: it was given up. The packet makes it
// a rank:
//     List of Text NAME=value, List of Text names, i32 NUMA node to take memory from first, or -1.
//     Descriptors: standard input, output and error; then one for each name: that variable is to
//     hold its number.
// It sets PR_SET_PDEATHSIG to SIGKILL, exits unless its parent is the guardian, takes its
// descriptors and variables, closes the gate and the protocol's socket, and goes on. It puts
// OUTLAST_SLOT_TAG's value, zeros behind it, in the place of the template's own in the memory that
// /proc/self/environ shows: helpers are found by it. CPUs and process group are set by the
// guardian.
//
// In version 1 what the gate's packet holds stood in kFork, behind the pid, its descriptors behind
// the gate; through the gate came one byte.
//
// An answer must come within kTemplateDeadline; else, or when the template ends, refuses or says
// anything else, the rank gets a fresh process. At the end of file the template exits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outlast {

inline constexpr uint32_t kTemplateVersion = 2, kOldestTemplateVersion = 1;
inline constexpr char kTemplateVariable[] = "OUTLAST_TEMPLATE_FD";
inline constexpr char kSlotTagVariable[] = "OUTLAST_SLOT_TAG";
inline constexpr int64_t kTemplateDeadlineNanos = 2'000'000'000;
inline constexpr size_t kTemplateTextBytes = 300;
inline constexpr size_t kStandardFiles = 3;

enum class TemplateOrder : uint8_t { kStart = 1, kFork = 2 };
enum class TemplateAnswer : uint8_t { kReady = 1, kForked = 2, kRefused = 3 };

}  // namespace outlast
