// What the kill shim and the test that started the job share: one mapped page.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace outlast::testing {

// The shim's environment. OUTLAST_SHIM_PAGE and OUTLAST_SHIM_ROOT switch it on.
inline constexpr char kShimPage[] = "OUTLAST_SHIM_PAGE";  // file that holds the KillPage
inline constexpr char kShimRoot[] = "OUTLAST_SHIM_ROOT";  // absolute; calls elsewhere never count
// Counting begins with the creation of the n-th checkpoint folder; 0: at once.
inline constexpr char kShimFromSave[] = "OUTLAST_SHIM_FROM_SAVE";
// It ends before the creation of that one; 0 and unset: never.
inline constexpr char kShimToSave[] = "OUTLAST_SHIM_TO_SAVE";
// The job is killed after the k-th counted call was made; 0 and unset: never.
inline constexpr char kShimKillAt[] = "OUTLAST_SHIM_KILL_AT";
// Who is killed then: "self", the process that made the call, or the one with that $RANK; unset:
// the whole job.
inline constexpr char kShimVictim[] = "OUTLAST_SHIM_VICTIM";
// "0": of this process only the saves that it begins are counted, where several share a page.
inline constexpr char kShimCounts[] = "OUTLAST_SHIM_COUNTS";
// "CALL:ERROR:FIRST", "CALL:ERROR:FIRST-LAST" or "CALL:ERROR:FIRST+": the counted calls of that
// name with these numbers (from 1) fail with ERROR (a name such as EIO) instead of being made;
// ERROR `short` halves what write and pwrite are given, `delayN` only holds the call up for 0 to N
// ms, `sleepN` for N ms. CALL `any` means all. CALL `open_to_read`, `opendir`, `read` and `pread`
// take an error name alone; they are numbered from the start, from_save or not, and are no counted
// calls.
inline constexpr char kShimFault[] = "OUTLAST_SHIM_FAULT";
// The fault is of the process with that $RANK alone; unset: of all.
inline constexpr char kShimFaultRank[] = "OUTLAST_SHIM_FAULT_RANK";
// Each reading of the wall clock is off by up to so many seconds, either way.
inline constexpr char kShimClockJumps[] = "OUTLAST_SHIM_CLOCK_JUMPS";
inline constexpr char kShimSeed[] = "OUTLAST_SHIM_SEED";  // of the delays, by the call's number

struct KillPage {
  std::atomic<uint32_t> saves;           // checkpoint folders that were created
  std::atomic<uint32_t> calls;           // counted
  std::atomic<uint32_t> named;           // counted calls of the fault's name
  std::atomic<uint32_t> faults;          // made to fail, or cut short
  std::atomic<uint32_t> killed;          // 1: the k-th call was reached
  std::atomic<uint32_t> clock_readings;  // of a clock that jumps
  std::atomic<uint32_t> commits;         // manifests that were linked
  std::atomic<pid_t> committer;          // the process that linked the first
  std::atomic<uint32_t> strangers;       // manifests that another process linked
  std::atomic<uint32_t> pid_count;       // processes of the job: each adds itself when it starts
  std::array<std::atomic<pid_t>, 256> pids;
  std::array<std::atomic<pid_t>, 8> ranks;  // the latest process of each $RANK; 0: none
  // The counted calls by number - 1, for people: "fdatasync".
  std::array<std::array<char, 24>, 256> names;
};

}  // namespace outlast::testing
