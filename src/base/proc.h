// Processes as the kernel tells of them in /proc.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace outlast {

struct ProcessInfo {
  pid_t pid = 0, parent = 0, group = 0, session = 0;
  char state = '?';          // R, S, D, T, Z ...
  uint64_t start_ticks = 0;  // since boot: tells two processes with one pid apart
  bool has_memory = true;    // false: it is ending, or has ended; its environment is gone
  bool is_zombie() const { return state == 'Z' || state == 'X'; }
};

// nullopt: no such process.
std::optional<ProcessInfo> ReadProcess(pid_t pid);

// Up to `limit` bytes of a file in /proc; empty when it cannot be read.
std::string ReadProcFile(const std::string& path, size_t limit);

}  // namespace outlast
