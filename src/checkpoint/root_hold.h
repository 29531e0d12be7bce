// A root in the hands of a tool: claimed, beating, and released at the end.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/root.h"
#include "outlast/base/mutex.h"

namespace outlast {

// Calls `beat` every kBeatInterval, on a thread of its own, from its making to its end.
class Beater {
 public:
  explicit Beater(std::function<void()> beat);
  ~Beater();
  Beater(const Beater&) = delete;
  Beater& operator=(const Beater&) = delete;

 private:
  void BeatUntilStopped();

  const std::function<void()> beat_;
  Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// While it lives, a run that starts on the root is refused, as beside any other owner. Owns one
// thread, which beats.
class RootHold {
 public:
  // Opens the root for writing, takes its next claim, and commits what a crash left with everything
  // but its manifest (later, under this newer claim, no run could). kFailedPrecondition: a run
  // holds the root and beats; or the root is another job's. Blocks up to kSilence to watch a beat.
  static absl::StatusOr<std::unique_ptr<RootHold>> Take(std::string_view uri, RootOptions options);
  ~RootHold();
  RootHold(const RootHold&) = delete;
  RootHold& operator=(const RootHold&) = delete;

  Root& root() const { return *root_; }
  // Checkpoints that Take committed.
  const std::vector<std::string>& rolled_forward() const { return rolled_forward_; }

 private:
  explicit RootHold(std::unique_ptr<Root> root);

  std::unique_ptr<Root> root_;
  std::vector<std::string> rolled_forward_;
  std::optional<Beater> beater_;
};

}  // namespace outlast
