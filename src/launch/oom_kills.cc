#include "launch/oom_kills.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>

namespace outlast {
namespace {

std::string CounterOfThisProcess() {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/GROUP", or "N:memory,...:/GROUP" of the first version.
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string group = line.substr(second + 1);
    std::istringstream controllers(line.substr(first + 1, second - first - 1));
    std::string path = "/sys/fs/cgroup" + group + "/memory.events";
    for (std::string one; std::getline(controllers, one, ',');) {
      if (one == "memory") path = "/sys/fs/cgroup/memory" + group + "/memory.oom_control";
    }
    if (access(path.c_str(), R_OK) == 0) return path;
  }
  return "/proc/vmstat";
}

}  // namespace

OomKills::OomKills() : OomKills(CounterOfThisProcess()) {}

OomKills::OomKills(std::string path) : path_(std::move(path)), used_(Count()), known_(used_) {}

uint64_t OomKills::Count() const {
  std::ifstream lines(path_);
  uint64_t count = 0;
  for (std::string name; lines >> name >> count;) {
    if (name == "oom_kill") return count;
  }
  return 0;
}

bool OomKills::Take() {
  if (Count() <= used_) return false;
  ++used_;
  return true;
}

void OomKills::ForgetOld() {
  used_ = std::max(used_, known_);
  known_ = Count();
}

}  // namespace outlast
