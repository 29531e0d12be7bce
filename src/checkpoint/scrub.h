// Reads committed checkpoints again while nothing is being saved, so that bytes which a disk lost
// are found before they are needed.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "checkpoint/root.h"
#include "outlast/base/mutex.h"
#include "store/rate_limit.h"

namespace outlast {

// What to read next, and why; an empty name: nothing for now.
struct ScrubChoice {
  std::string checkpoint;
  std::string reason;
};
// When each checkpoint was last found whole, on any clock.
using Scrubbed = std::map<std::string, absl::Duration, std::less<>>;
// Of the usable checkpoints on the chain, and pinned ones off it: the newest that was never read;
// else the one that was read longest ago, if that was `period` ago or more. What a restore would
// take first is looked at first.
ScrubChoice ChooseScrub(std::span<const CheckpointInfo> checkpoints, const Scrubbed& scrubbed,
                        absl::Duration now, absl::Duration period);

struct ScrubOptions {
  uint64_t bytes_per_second = 0;  // at least 1
  absl::Duration period = absl::Hours(24);
  // On the scrubber's thread: the bytes are damaged, and were so when they were read again.
  std::function<void(const std::string& checkpoint, const std::string& reason)> on_damaged;
};

// Owns one thread, in the batch class and of the lowest best-effort I/O priority. Safe for
// concurrent use.
class Scrubber {
 public:
  Scrubber(const Root& root, ScrubOptions options);  // `root` outlives it
  ~Scrubber();                                       // breaks the reading off
  Scrubber(const Scrubber&) = delete;
  Scrubber& operator=(const Scrubber&) = delete;

  // A save is being written: nothing is read until it has ended. Starts out paused.
  void Pause();
  // And looks for what there is to read, now.
  void Resume();

  // Checkpoints that were read and found whole.
  std::vector<std::string> Verified() const;

 private:
  void Run();
  bool AwaitTurn();
  ScrubChoice Choose();
  absl::Status Check(const std::string& folder);
  void Look(const std::string& checkpoint);
  bool is_stopping() const;

  const Root& root_;
  const ScrubOptions options_;
  RateLimiter limiter_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool paused_ ABSL_GUARDED_BY(mutex_) = true;
  bool asked_ ABSL_GUARDED_BY(mutex_) = false;  // to look, since the latest look began
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Scrubbed scrubbed_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> damaged_;  // the thread's: told already
  std::thread thread_;
};

}  // namespace outlast
