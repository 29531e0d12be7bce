#include "base/machine_memory.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace outlast {
namespace {

std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

uint64_t MachineMemoryBytes() {
  struct sysinfo info {};
  uint64_t bytes = sysinfo(&info) == 0 ? static_cast<uint64_t>(info.totalram) * info.mem_unit : 0;
  std::istringstream groups(ReadText("/proc/self/cgroup"));
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) continue;
    std::string group = line == "0::/" ? "" : line.substr(3);
    while (true) {
      const std::string limit = ReadText("/sys/fs/cgroup" + group + "/memory.max");
      uint64_t value = 0;
      const auto [end, error] = std::from_chars(limit.data(), limit.data() + limit.size(), value);
      if (error == std::errc() && end != limit.data()) bytes = std::min(bytes, value);
      if (group.empty()) break;
      group.resize(group.find_last_of('/'));
    }
  }
  return bytes;
}

}  // namespace outlast
