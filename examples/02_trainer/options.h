// The example's command line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

struct TrainerOptions {
  std::string checkpoints;  // the root, a folder
  std::string remote;       // a second root, file:///... or s3://...; empty: none
  std::string log;          // folder for losses.tsv, consumption.log, result.txt; empty: none
  std::string texts = "/usr/share/common-licenses";  // what it trains on
  int64_t steps = 300;
  int64_t checkpoint_every = 25;  // steps
  int64_t batch = 64;             // samples a step over all ranks
  uint64_t seed = 1;
  // Of the watchdog, seconds: how long a rank may stand still before it is judged, and how often
  // the agent looks.
  double watch_floor = 10;
  double watch_poll = 1;
};

// nullopt: what is wrong was printed, with the usage.
std::optional<TrainerOptions> ParseOptions(int argc, char** argv);
