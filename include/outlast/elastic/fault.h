// What can go wrong with a worker, and what the job remembers of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace outlast {

enum class FaultClass : uint8_t {
  kPreempt,    // a person, a batch system or the platform asked: free
  kCrash,      // exit code other than 0, or a signal that we did not send
  kHang,       // a verdict of the watchdog
  kResource,   // out of memory, disk full, cgroup limit
  kEarlyExit,  // exit code 0 while others run past the grace
  kHardware,   // a card, a link, or a process that SIGKILL does not end: the node is excluded
  kNodeLost,   // its agent is silent, or came back without its workers
  kLinkCut,    // it and another node do not reach each other, though both reach the coordinator
};
std::string_view FaultClassName(FaultClass fault_class);

// How a process ended.
struct ProcessEnd {
  int code = 0;        // exit code; meaningful when signal is 0
  int signal = 0;      // the signal that ended it, or 0
  bool by_us = false;  // we had sent that signal, or killed its tree: an effect, never a cause
  bool out_of_memory = false;  // the kernel sent it, for want of memory
  bool clean() const { return code == 0 && signal == 0; }
};

// "killed by signal 9", "exit code 3".
std::string HowItEnded(const ProcessEnd& end);
// Of the end of a process that should have gone on, and that nobody here had asked for.
FaultClass ClassOf(const ProcessEnd& end);

// FaultRecord::found_by of a worker that did not come back for the next agent (Job::GoOn).
inline constexpr char kFoundByAdoption[] = "adoption";

struct FaultRecord {
  FaultClass fault_class = FaultClass::kCrash;
  int rank = -1;
  uint64_t generation = 0;
  int64_t step_reached = 0;    // the newest step that any rank had begun
  int64_t step_committed = 0;  // the newest step on disk, 0 when none
  ProcessEnd end;
  std::string found_by;  // "process exit", "watchdog: stopped", ...
  std::string detail;  // one line for people: "rank 2: killed by signal 9", the verdict's evidence
  // What makes two faults the same: digest of class, code or signal or verdict, and phase.
  uint64_t root = 0;
  // Failed after a peer in the same generation: recorded for people, never charged, never the
  // cause.
  bool victim = false;
  std::string node;       // of several; empty in a job of one node
  bool as_crash = false;  // charged like a crash although its class has a budget of its own
};

// FaultRecord::root. `what` is an exit code, 128 + signal, or the verdict's name; `phase` where the
// worker was.
uint64_t FaultRoot(FaultClass fault_class, std::string_view what, uint32_t phase);

}  // namespace outlast
