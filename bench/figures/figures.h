// What `./dev bench` measures, and how a figure is written down.
#pragma once

#include <cstdio>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "figures/standstill.h"

namespace outlast::bench {

struct Reference {
  std::string name;
  double value = 0;  // in the figure's unit
};

enum class Goal : bool { kAtMost, kAtLeast };

// One measured figure; `value` is the median of `samples` unless it is given.
struct Figure {
  std::string name;  // area.figure
  std::string unit;
  std::vector<double> samples;
  double goal = 0;
  Goal sense = Goal::kAtMost;
  std::optional<Reference> limit, peer;
};

// Of a sorted or unsorted, non-empty sample. `share` 0.5: the median.
double Quantile(std::vector<double> samples, double share);

// Where the figures go: JSON lines for scripts, a readable line each for people (stderr). Each says
// how long the machine stood still at most since the figure before it.
class Report {
 public:
  // `only`: the figures whose names contain one of these; empty: all.
  explicit Report(std::FILE* json, std::vector<std::string> only = {})
      : json_(json), only_(std::move(only)) {}
  bool Wants(std::string_view name) const;
  // Calls `measure` if any of the figures that it adds is wanted; its error fails the first.
  void Measure(std::initializer_list<std::string_view> names,
               const std::function<absl::Status()>& measure);
  // Left out if it is not wanted.
  void Add(const Figure& figure);
  // A figure that could not be measured; the run ends with 1.
  void Fail(const std::string& name, const std::string& why);
  bool failed() const { return failed_; }

 private:
  std::FILE* json_;
  std::vector<std::string> only_;
  bool failed_ = false;
  Standstill standstill_;
};

struct Settings {
  std::string tool, trainer;               // paths of `outlast` and of the restart trainer
  std::string nodes_trainer;               // of the workers without a state
  std::string agent_streams;               // of the made-up agents; empty: built without gRPC
  std::string folder;                      // for files; the disk that is measured
  bool smoke = false;                      // tiny counts: whether it works, not how fast
  std::map<std::string, Reference> peers;  // what bench/peers measured, by its names

  std::optional<Reference> PeerOf(const std::string& name) const;
};

void MeasureRestart(const Settings& settings, Report& report);
void MeasureCheckpoint(const Settings& settings, Report& report);
void MeasureLargeState(const Settings& settings, Report& report);  // a part of it
void MeasureLaunch(const Settings& settings, Report& report);
void MeasureJoin(const Settings& settings, Report& report);    // a part of it
void MeasureOutage(const Settings& settings, Report& report);  // another one
void MeasureMeter(const Settings& settings, Report& report);
void MeasureCollectives(const Settings& settings, Report& report);
void MeasureBlackBox(const Settings& settings, Report& report);

// Seconds from the start of `command` (a program and its arguments, no shell) to its end; none when
// it failed. Its output goes to /dev/null, or to `output`.
std::optional<double> TimeCommand(const std::vector<std::string>& command,
                                  const std::string& output = "/dev/null");

}  // namespace outlast::bench
