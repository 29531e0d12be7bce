// The log that outlast_node_trainer writes: a line a rank and round.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace outlast::testing {

struct Round {
  uint64_t generation = 0;
  int64_t round = 0;
  int rank = 0, world = 0;
  pid_t pid = 0;
};

// As far as it is written; nothing where there is none yet.
inline std::vector<Round> ReadRounds(const std::string& path) {
  std::ifstream lines(path);
  std::vector<Round> rounds;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    Round one;
    if (words >> one.generation >> one.round >> one.rank >> one.world >> one.pid)
      rounds.push_back(one);
  }
  return rounds;
}

}  // namespace outlast::testing
