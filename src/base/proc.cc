#include "base/proc.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "outlast/base/fd.h"

namespace outlast {

std::string ReadProcFile(const std::string& path, size_t limit) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  if (!file.is_open()) return text;
  // Most are small, and memory that is fetched and given back each time costs more than they do.
  for (size_t chunk = 4 << 10; text.size() < limit; chunk = std::min<size_t>(2 * chunk, 64 << 10)) {
    const size_t before = text.size();
    const size_t wanted = std::min(limit - before, chunk);
    text.resize(before + wanted);
    const ssize_t count = read(file.get(), text.data() + before, wanted);
    text.resize(before + static_cast<size_t>(count > 0 ? count : 0));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
  }
  return text;
}

std::optional<ProcessInfo> ReadProcess(pid_t pid) {
  const std::string text = ReadProcFile(fmt::format("/proc/{}/stat", pid), 4096);
  const size_t name_end = text.rfind(')');  // the name may hold anything, brackets and spaces too
  if (name_end == std::string::npos) return std::nullopt;
  ProcessInfo info;
  info.pid = pid;
  unsigned long long start = 0, memory = 0;
  // Fields 3 to 6, then 22 and 23; proc(5).
  const int fields = std::sscanf(
      text.c_str() + name_end + 1,
      " %c %d %d %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu %llu",
      &info.state, &info.parent, &info.group, &info.session, &start, &memory);
  if (fields != 6) return std::nullopt;
  info.start_ticks = start;
  info.has_memory = memory != 0;
  return info;
}

}  // namespace outlast
