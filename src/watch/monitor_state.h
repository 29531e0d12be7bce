// When to judge, and what to do about it: the watch's decisions, without clocks, processes or
// files.
//
// One poll is one round of looks at all ranks. A rank whose deadline has passed starts a judgement
// over two looks: this one, and one that is at least `looks_apart` older (a stopped process needs
// only the poll before). A finding is reported once; when its culprits move again, that is reported
// too, and every rule is armed again.
//
// Deadlines start again, and nothing is judged, when time itself was odd: all ranks of a job
// of one node stopped, a debugger attached, the machine suspended (BOOTTIME ran ahead of
// MONOTONIC), or this loop late by three polls.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "outlast/blackbox/step_log.h"
#include "outlast/watch/watchdog.h"
#include "watch/deadline.h"
#include "watch/verdict.h"

namespace outlast {

struct PollInput {
  int64_t monotonic_ns = 0;
  int64_t boottime_ns = 0;
  std::vector<RankLook> looks;  // pace is filled in here
  // Steps that ended since the last poll, each with the rank that made it.
  struct EndedStep {
    int rank = 0;
    StepRecord record{};
  };
  std::vector<EndedStep> steps;
};

enum class FreezeReason : uint8_t { kNone, kAllStopped, kDebugger, kSuspended, kLateLoop };
std::string_view FreezeReasonName(FreezeReason reason);

struct PollResult {
  std::optional<Verdict> finding;    // new: write it down, then act
  std::optional<Verdict> recovered;  // a reported finding whose culprits move again
  FreezeReason frozen = FreezeReason::kNone;
  Verdict judged;  // of this poll; class none with a reason when there was nothing
};

// Not safe for concurrent use.
class MonitorState {
 public:
  MonitorState(const WatchdogOptions& options, int world)
      : options_(options), world_(world), book_(options, world) {}

  // A generation begins: everything is learned anew (world, batch and speed may differ) and every
  // rule is armed.
  void Arm(uint64_t generation) { Arm(generation, world_, {}); }
  // The same, of another world than before. `elsewhere`: by rank, those on other nodes, of which
  // there are no looks; empty: none.
  void Arm(uint64_t generation, int world, std::vector<bool> elsewhere);
  // A generation ends, or nobody is to be judged for now.
  void Disarm() { armed_ = false; }
  // After a pause of the polls: ages start again, what was learned and reported stays.
  void Resume() { has_polled_ = false; }
  // The pace of a rank as of a look between two polls, which changes nothing.
  Pace Peek(const RankLook& look, int64_t now_ns) const;
  bool is_armed() const { return armed_; }
  uint64_t generation() const { return generation_; }

  PollResult Poll(PollInput input);
  // A finding over the ranks of all nodes, of this generation, is as one of Poll's from now on;
  // `looks`: the ranks here as it was judged. False: it was reported already.
  bool Adopt(const Verdict& verdict, std::vector<RankLook> looks);

  // Looks of old incarnations and generations that were not listened to.
  int64_t ignored_looks() const { return ignored_looks_; }
  // What was learned so far, for people.
  const DeadlineBook& book() const { return book_; }

 private:
  struct Track {
    bool is_known = false;
    uint64_t first_step = 0;
    // Since when the rank is outside any section, as far as seen.
    int64_t outside_since_ns = 0;
    // The last tick seen in each open section, by depth.
    struct Tick {
      uint64_t opened = 0, progress = 0;
      int64_t at_ns = 0;
    };
    std::vector<Tick> ticks;
    // The open section at the last poll, for samples by polls; opened = 0: none.
    WorkKey working;
    uint64_t working_opened = 0;
    int64_t working_since_ns = 0;
    bool was_in_step = false;
    uint64_t step = 0;
    int64_t step_changed_ns = 0;
    bool has_step_log = false;
  };

  struct Round {
    int64_t at_ns = 0;
    std::vector<RankLook> looks;
  };

  FreezeReason Frozen(const PollInput& input) const;
  void StartAgain(int64_t now_ns);
  void Learn(const PollInput& input);
  void LearnSteps(const PollInput& input);
  void LearnByPolls(const RankLook& look, Track& track, int64_t now_ns);
  static void Follow(const RankLook& look, Track& track, int64_t now_ns);
  Pace PaceOf(const RankLook& look, const Track& track, int64_t now_ns) const;
  Verdict JudgeNow();
  const Round* FirstRound(const Round& last) const;
  bool IsReported(const Verdict& verdict) const;
  void Report(Verdict verdict, PollResult* result);
  bool HasRecovered(const Round& round) const;
  Track& TrackOf(int rank);

  WatchdogOptions options_;
  int world_;
  std::vector<bool> elsewhere_;  // by rank
  DeadlineBook book_;
  bool armed_ = false;
  uint64_t generation_ = 0;
  std::vector<Track> tracks_;  // by rank
  std::deque<Round>
      rounds_;  // the newest last; the oldest is at least looks_apart old, where there is one
  int64_t last_poll_ns_ = 0;
  int64_t last_boottime_ns_ = 0;
  bool has_polled_ = false;
  int64_t started_again_ns_ = 0;  // no age reaches back beyond this
  // The last poll at which the job was frozen or a rank was reported as stopped: how long the work
  // took that had begun by then says nothing of the work.
  int64_t disturbed_until_ns_ = 0;
  std::optional<Verdict> reported_;
  std::vector<RankLook> reported_looks_;
  int64_t ignored_looks_ = 0;
};

}  // namespace outlast
