// A data-parallel job in simulated time: each step every rank works for itself (data, forward,
// backward), then all meet in one all-reduce. Faults hold a rank where it is. Looks at it are what
// the agent would read.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/watch/fake_ranks.h"
#include "watch/monitor_state.h"

namespace outlast {

class SimJob {
 public:
  // Something that a rank does before its part of a step, in a section.
  struct Extra {
    double seconds = 0;
    Phase phase = Phase::kUser;
    std::string name;
    std::optional<double> limit_seconds;
    bool makes_progress = false;  // ticks ten times a second
    bool in_section = true;
  };
  // The rank stays where it is from `at` on until `until`.
  struct Hold {
    int rank = 0;
    double at = 0;
    double until = std::numeric_limits<double>::infinity();
    bool is_stopped = false;  // by SIGSTOP; else it blocks
  };

  explicit SimJob(int world)
      : world_(world), work_(static_cast<size_t>(world)), extra_(static_cast<size_t>(world)) {}

  // Seconds of own work of a rank in a step.
  std::function<double(int rank, uint64_t step)> work = [](int, uint64_t) { return 0.2; };
  std::function<Extra(int rank, uint64_t step)> extra = [](int, uint64_t) { return Extra{}; };
  std::vector<Hold> holds;
  uint64_t generation = 1;
  uint32_t incarnation = 1;

  double now() const { return now_; }
  uint64_t step() const { return step_; }
  double step_end() const { return step_end_; }

  void AdvanceTo(double now) {
    now_ = now;
    if (step_ == 0) BeginStep(0);
    while (now_ >= step_end_) BeginStep(step_end_);
  }

  std::vector<RankLook> Looks() const {
    std::vector<RankLook> looks;
    for (int rank = 0; rank < world_; ++rank) looks.push_back(LookAt(rank));
    return looks;
  }

 private:
  double arrival(int rank) const {
    const auto at = static_cast<size_t>(rank);
    return step_start_ + extra_[at].seconds + work_[at];
  }

  void BeginStep(double start) {
    ++step_;
    step_start_ = start;
    step_end_ = start;
    for (int rank = 0; rank < world_; ++rank) {
      extra_[static_cast<size_t>(rank)] = extra(rank, step_);
      work_[static_cast<size_t>(rank)] = work(rank, step_);
      step_end_ = std::max(step_end_, HeldUntil(rank, arrival(rank)));
    }
    step_end_ += 0.001;
    // Who is held inside the all-reduce holds all.
    for (const Hold& hold : holds) {
      if (hold.at >= step_start_ && hold.at < step_end_)
        step_end_ = std::max(step_end_, hold.until);
    }
  }

  double HeldUntil(int rank, double arrival) const {
    for (const Hold& hold : holds) {
      if (hold.rank == rank && hold.at >= step_start_ && hold.at < arrival)
        arrival += hold.until - hold.at;
    }
    return arrival;
  }

  // The rank's own time: it stands still while held.
  double OwnTime(int rank, bool* is_stopped) const {
    double own = now_;
    for (const Hold& hold : holds) {
      if (hold.rank != rank || now_ < hold.at || hold.at < step_start_) continue;
      *is_stopped = *is_stopped || (hold.is_stopped && now_ < hold.until);
      own = now_ < hold.until ? hold.at : own - (hold.until - hold.at);
    }
    return own;
  }

  static uint64_t Nanos(double seconds) { return static_cast<uint64_t>(seconds * 1e9); }

  OpenSection Section(Phase phase, std::string_view name, double start, uint64_t number) const {
    OpenSection section;
    section.phase = phase;
    section.name = name.empty() ? PhaseName(phase) : name;
    section.id = SectionId(section.name);
    section.start_ns = Nanos(start);
    section.opened = step_ * 8 + number;
    return section;
  }

  RankLook LookAt(int rank) const {
    const Extra& more = extra_[static_cast<size_t>(rank)];
    const double own_work = work_[static_cast<size_t>(rank)];
    RankLook look;
    look.rank = look.slot = rank;
    look.has_data = true;
    bool is_stopped = false;
    const double own = OwnTime(rank, &is_stopped);
    look.process = is_stopped ? ProcessState::kStopped : ProcessState::kRunning;
    look.progress.generation = generation;
    look.progress.incarnation = incarnation;
    look.progress.pid = 1000 + rank;
    look.progress.rank = static_cast<uint32_t>(rank);
    look.progress.step = step_;
    CommLook comm;
    comm.row.id_hash = 77;
    comm.row.size = static_cast<uint32_t>(world_);
    comm.row.kind = CommKind::kWorld;
    comm.row.state = CommState::kReady;
    comm.row.name = "world";
    comm.row.api_seq = comm.row.done_seq = step_ - 1;
    comm.row.changed_ns = Nanos(step_start_);

    const double worked = own - step_start_ - more.seconds;
    std::optional<OpenSection> section;
    if (worked < 0) {
      if (more.in_section) section = Section(more.phase, more.name, step_start_, 0);
      if (section && more.limit_seconds) {
        section->limit_ns = Nanos(*more.limit_seconds);
        section->limit_is_declared = true;
      }
      if (section && more.makes_progress)
        section->progress = static_cast<uint64_t>((own - step_start_) * 10);
    } else if (worked < own_work) {
      const double begin = step_start_ + more.seconds;
      const double part = worked / own_work;
      section = part < 0.1   ? Section(Phase::kData, "", begin, 1)
                : part < 0.4 ? Section(Phase::kForward, "", begin + 0.1 * own_work, 2)
                             : Section(Phase::kBackward, "", begin + 0.4 * own_work, 3);
    } else {
      section = Section(Phase::kCommWait, "", step_start_ + more.seconds + own_work, 4);
      comm.row.api_seq = step_;
      comm.row.changed_ns = section->start_ns;
    }
    if (section) {
      look.progress.phase = section->phase;
      look.progress.depth = 1;
      look.progress.sections_opened = section->opened;
      look.progress.sections.push_back(std::move(*section));
    } else {
      look.progress.sections_opened = step_ * 8;
    }
    look.comms.push_back(std::move(comm));
    return look;
  }

  int world_;
  double now_ = 0;
  uint64_t step_ = 0;
  double step_start_ = 0;
  double step_end_ = 0;
  std::vector<double> work_;
  std::vector<Extra> extra_;
};

// A watch over a simulated job, with a log of what it found and when.
class SimWatch {
 public:
  struct Event {
    double at = 0;
    Verdict verdict;
  };

  SimWatch(SimJob& job, const WatchdogOptions& options, int world)
      : job_(job), poll_(absl::ToDoubleSeconds(options.poll)), state_(options, world) {
    state_.Arm(job.generation);
  }

  void RunUntil(double end) {
    while (now_ + poll_ <= end) Poll(poll_);
  }
  // One poll after `seconds`, of which the machine slept `asleep`.
  PollResult Poll(double seconds, double asleep = 0) {
    now_ += seconds;
    boottime_ += seconds + asleep;
    job_.AdvanceTo(now_);
    PollInput input;
    input.monotonic_ns = static_cast<int64_t>(now_ * 1e9);
    input.boottime_ns = static_cast<int64_t>(boottime_ * 1e9);
    input.looks = job_.Looks();
    if (adjust) adjust(&input);
    PollResult result = state_.Poll(std::move(input));
    if (result.finding) findings.push_back({now_, *result.finding});
    if (result.recovered) recoveries.push_back({now_, *result.recovered});
    if (result.frozen != FreezeReason::kNone) ++frozen_polls;
    return result;
  }

  std::function<void(PollInput*)> adjust;
  std::vector<Event> findings;
  std::vector<Event> recoveries;
  int frozen_polls = 0;
  MonitorState& state() { return state_; }
  double now() const { return now_; }

 private:
  SimJob& job_;
  double poll_;
  double now_ = 0;
  double boottime_ = 0;
  MonitorState state_;
};

}  // namespace outlast
