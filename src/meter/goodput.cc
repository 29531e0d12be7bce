#include "outlast/meter/goodput.h"

#include <algorithm>
#include <compare>
#include <map>
#include <tuple>
#include <utility>

#include "meter/invocations.h"
#include "meter/painter.h"
#include "outlast/meter/histogram.h"

namespace outlast {
namespace {

// --- Steps ---

// A generation of an invocation: later ones may take back what earlier ones did.
struct GroupKey {
  size_t run = 0;
  uint64_t generation = 0;
  auto operator<=>(const GroupKey&) const = default;
};

struct Group {
  std::vector<size_t> steps;               // indices into the job's steps, by step
  std::optional<int64_t> first_begin;      // of any step
  std::optional<int64_t> first_whole;      // begin of the first finished step
  std::optional<int64_t> last_end;         // of the finished ones
  std::optional<int64_t> resume_step;      // where it went on, as far as records tell
  std::optional<int64_t> told_steps_lost;  // by the rollback record
  std::string source;
};

using Groups = std::map<GroupKey, Group>;

template <typename T>
void KeepMin(std::optional<T>& kept, T value) {
  kept = kept ? std::min(*kept, value) : value;
}
template <typename T>
void KeepMax(std::optional<T>& kept, T value) {
  kept = kept ? std::max(*kept, value) : value;
}

bool IsAborted(const JobStep& step) { return (step.flags & kStepAborted) != 0; }

// The parts of the lead rank's step; they sum to its length.
JobStep FromLead(size_t run, const StepEntry& entry) {
  JobStep step;
  step.run = run;
  step.generation = entry.generation;
  step.step = entry.step;
  step.start_ns = entry.start_ns;
  step.end_ns = std::max(entry.start_ns, entry.end_ns);
  step.flags = entry.flags;
  int64_t left = step.end_ns - step.start_ns;
  const auto take = [&left](int64_t wanted) {
    const int64_t taken = std::clamp<int64_t>(wanted, 0, left);
    left -= taken;
    return taken;
  };
  step.data_ns = take(entry.data_ns);
  step.work_ns = take(ClampRecorded(entry.forward_ns) + ClampRecorded(entry.backward_ns) +
                      ClampRecorded(entry.optimizer_ns));
  step.checkpoint_stall_ns = take(entry.checkpoint_stall_ns);
  const bool is_marked = step.data_ns + step.work_ns + step.checkpoint_stall_ns > 0;
  if (!is_marked && !(step.flags & kStepEval)) step.work_ns = take(left);
  step.other_ns = left;
  return step;
}

void AddRank(JobStep& step, const StepEntry& entry, double peak) {
  const bool is_first = step.ranks == 0;
  ++step.ranks;
  step.tokens_real += entry.tokens_real;
  step.tokens_padded += entry.tokens_padded;
  step.tokens_loss += entry.tokens_loss;
  step.samples += entry.samples;
  // A sum over ranks of which one is unknown is unknown.
  const auto add = [is_first](double& sum, double value) {
    sum = (is_first || sum > 0) && value > 0 ? sum + value : 0;
  };
  add(step.model_flops, entry.model_flops);
  add(step.peak_flops_per_second, peak);
}

std::map<int32_t, double> PeaksOf(const Invocation& run) {
  std::map<int32_t, double> peaks;
  for (const MeterEntry& entry : run.All<MeterEntry>())
    peaks[entry.slot] = entry.peak_flops_per_second;
  return peaks;
}

void CollectSteps(const std::vector<Invocation>& runs, std::vector<JobStep>& steps) {
  for (size_t run = 0; run < runs.size(); ++run) {
    std::vector<StepEntry> entries = runs[run].All<StepEntry>();
    // Finished before aborted, then the lowest slot: the first of a step leads, and a second of the
    // same slot is a repeat.
    const auto key = [](const StepEntry& e) {
      return std::tuple(e.generation, e.step, (e.flags & kStepAborted) != 0, e.slot, e.start_ns,
                        e.end_ns);
    };
    std::stable_sort(entries.begin(), entries.end(),
                     [&](const auto& a, const auto& b) { return key(a) < key(b); });
    const std::map<int32_t, double> peaks = PeaksOf(runs[run]);
    const StepEntry* last = nullptr;
    for (const StepEntry& entry : entries) {
      const bool same_step =
          last && last->generation == entry.generation && last->step == entry.step;
      if (!same_step) {
        steps.push_back(FromLead(run, entry));
      } else if (last->slot == entry.slot ||
                 (entry.flags & kStepAborted) != (steps.back().flags & kStepAborted)) {
        continue;
      }
      const auto peak = peaks.find(entry.slot);
      AddRank(steps.back(), entry, peak == peaks.end() ? 0 : peak->second);
      last = &entry;
    }
  }
}

Groups CollectGroups(const std::vector<Invocation>& runs, const std::vector<JobStep>& steps) {
  Groups groups;
  for (size_t i = 0; i < steps.size(); ++i) {
    const JobStep& step = steps[i];
    Group& group = groups[{step.run, step.generation}];
    group.steps.push_back(i);
    KeepMin(group.first_begin, step.start_ns);
    KeepMin(group.resume_step, step.step);
    if (IsAborted(step)) continue;
    KeepMin(group.first_whole, step.start_ns);
    KeepMax(group.last_end, step.end_ns);
  }
  for (size_t run = 0; run < runs.size(); ++run) {
    for (const CommitEntry& entry : runs[run].All<CommitEntry>())
      groups.try_emplace(GroupKey{run, entry.generation});
    std::map<uint64_t, std::array<bool, 6>> sources;
    for (const RestoreEntry& entry : runs[run].All<RestoreEntry>()) {
      KeepMin(groups[{run, entry.generation}].resume_step, entry.step);
      if (static_cast<size_t>(entry.source) < 6)
        sources[entry.generation][static_cast<size_t>(entry.source)] = true;
    }
    for (const auto& [generation, seen] : sources) {
      std::string& text = groups[{run, generation}].source;
      for (size_t i = 1; i < seen.size(); ++i) {
        if (seen[i])
          text += (text.empty() ? "" : "+") + std::string(ToString(static_cast<StateSource>(i)));
      }
    }
    for (const RollbackEntry& entry : runs[run].All<RollbackEntry>()) {
      Group& group = groups[{run, entry.generation}];
      KeepMin(group.resume_step, entry.resume_step);
      const int64_t reached = ClampRecorded(entry.reached_step);
      KeepMax(group.told_steps_lost,
              std::max<int64_t>(0, reached - ClampRecorded(entry.resume_step)));
      if (entry.source != StateSource::kUnknown) group.source = std::string(ToString(entry.source));
    }
  }
  return groups;
}

// --- Interruptions ---

using Faults = std::map<GroupKey, Interruption>;

void AddDetected(size_t run, const Invocation& invocation, Faults& faults) {
  std::vector<DetectedEntry> detected = invocation.All<DetectedEntry>();
  std::stable_sort(detected.begin(), detected.end(), [](const auto& a, const auto& b) {
    return std::tie(a.time_ns, a.slot) < std::tie(b.time_ns, b.slot);
  });
  for (const DetectedEntry& entry : detected) {
    const auto [fault, is_new] = faults.try_emplace(GroupKey{run, entry.generation});
    if (!is_new) continue;  // the first failure names the interruption
    Interruption& it = fault->second;
    it.slot = entry.slot;
    it.rank = entry.rank;
    it.step = entry.step;
    it.fault_class = entry.fault_class;
    it.found = entry.found;
    it.is_planned = entry.fault_class == "preempt";
    it.is_outage = entry.fault_class == kAgentLost;
    it.detected_ns = entry.time_ns;
    it.failed_ns =
        entry.last_progress_ns != 0 ? std::min(entry.last_progress_ns, entry.time_ns) : -1;
  }
}

void AddDowns(size_t run, const Invocation& invocation, Faults& faults) {
  std::vector<DownEntry> downs = invocation.All<DownEntry>();
  std::erase_if(downs, [](const DownEntry& entry) { return entry.cause != DownCause::kFault; });
  std::stable_sort(downs.begin(), downs.end(), [](const auto& a, const auto& b) {
    return std::tie(a.time_ns, a.slot) < std::tie(b.time_ns, b.slot);
  });
  for (const DownEntry& entry : downs) {
    const auto [fault, is_new] = faults.try_emplace(GroupKey{run, entry.generation});
    Interruption& it = fault->second;
    if (is_new) {
      it.slot = entry.slot;
      it.rank = entry.rank;
      it.fault_class = "crash";
      it.found = entry.how;
      it.failed_ns = it.detected_ns = entry.time_ns;
    } else if (it.failed_ns < 0 && entry.time_ns <= it.detected_ns) {
      it.failed_ns = entry.time_ns;
    }
  }
}

// An agent that died wrote nothing about it: its ledger has no end, and somebody started the job
// again.
void AddCutRun(size_t run, const std::vector<Invocation>& runs, const Groups& groups,
               Faults& faults) {
  if (runs[run].has_end || run + 1 == runs.size()) return;
  GroupKey last{run, 0};
  for (const auto& [key, group] : groups) {
    if (key.run == run) last = key;
  }
  const auto [fault, is_new] = faults.try_emplace(last);
  if (!is_new) return;
  fault->second.fault_class = "job killed";
  fault->second.found = "its ledger has no end record";
  fault->second.failed_ns = fault->second.detected_ns =
      std::min(runs[run].end, runs[run + 1].begin);
}

std::optional<int64_t> FirstUpOrCommit(const Invocation& run, int64_t from,
                                       uint64_t after_generation) {
  std::optional<int64_t> first;
  for (const UpEntry& up : run.All<UpEntry>()) {
    if (up.time_ns >= from) KeepMin(first, up.time_ns);
  }
  for (const CommitEntry& commit : run.All<CommitEntry>()) {
    if (commit.time_ns >= from && commit.generation > after_generation)
      KeepMin(first, commit.time_ns);
  }
  return first;
}

void FindWayBack(const GroupKey& key, const std::vector<Invocation>& runs, const Groups& groups,
                 Interruption& it) {
  it.run = key.run;
  it.generation = key.generation;
  if (it.failed_ns < 0) it.failed_ns = it.detected_ns;
  it.recovered_ns = FirstUpOrCommit(runs[key.run], it.detected_ns, key.generation);
  for (size_t run = key.run + 1; run < runs.size() && !it.recovered_ns; ++run) {
    it.recovered_ns = FirstUpOrCommit(runs[run], it.detected_ns, 0);
  }
  for (auto later = groups.upper_bound(key); later != groups.end(); ++later) {
    if (it.source.empty()) it.source = later->second.source;
    if (!later->second.first_whole) continue;
    it.first_step_ns = std::max(*later->second.first_whole, it.detected_ns);
    it.resumed_run = later->first.run;
    return;
  }
}

Faults CollectFaults(const std::vector<Invocation>& runs, const Groups& groups) {
  Faults faults;
  for (size_t run = 0; run < runs.size(); ++run) {
    AddDetected(run, runs[run], faults);
    AddDowns(run, runs[run], faults);
    AddCutRun(run, runs, groups, faults);
  }
  for (auto& [key, fault] : faults) FindWayBack(key, runs, groups, fault);
  return faults;
}

// --- Lost work ---

// Walks the generations in order and takes back what each of them does again.
void FindLostSteps(const Groups& groups, std::vector<JobStep>& steps, Faults& faults) {
  std::multimap<int64_t, size_t> alive;  // by step
  std::multimap<int64_t, size_t> left_early;
  for (const auto& [key, group] : groups) {
    auto fault = faults.lower_bound(key);
    Interruption* cause = fault == faults.begin() ? nullptr : &std::prev(fault)->second;
    if (group.resume_step) {
      // Training went on behind a step that a rank left early: it had been finished after all.
      const auto behind = left_early.lower_bound(*group.resume_step);
      for (auto it = left_early.begin(); it != behind; ++it) {
        steps[it->second].flags &= static_cast<uint16_t>(~kStepAborted);
      }
      left_early.erase(left_early.begin(), behind);
      left_early.clear();  // what is left of them is run again, and lost below
      for (auto it = alive.lower_bound(*group.resume_step); it != alive.end();
           it = alive.erase(it)) {
        steps[it->second].is_lost = true;
        if (cause && !IsAborted(steps[it->second])) ++cause->steps_lost;
      }
    }
    if (cause && cause->steps_lost == 0 && group.told_steps_lost) {
      // Without step records of that generation the rollback record is all there is.
      const auto before = groups.find({cause->run, cause->generation});
      if (before == groups.end() || before->second.steps.empty())
        cause->steps_lost = *group.told_steps_lost;
    }
    for (const size_t index : group.steps) {
      alive.emplace(steps[index].step, index);
      if (IsAborted(steps[index])) left_early.emplace(steps[index].step, index);
    }
  }
  for (const auto& [step, index] : left_early) steps[index].is_lost = true;
}

// --- Painting ---

int64_t EndOfQueue(const Invocation& run, std::optional<int64_t> first_step) {
  std::vector<UpEntry> ups = run.All<UpEntry>();
  std::stable_sort(ups.begin(), ups.end(),
                   [](const auto& a, const auto& b) { return a.time_ns < b.time_ns; });
  std::map<int32_t, int64_t> first_up;
  for (const UpEntry& up : ups) {
    if (up.generation == ups.front().generation && (!first_step || up.time_ns <= *first_step)) {
      first_up.try_emplace(up.slot, up.time_ns);
    }
  }
  std::optional<int64_t> all_up;
  for (const auto& [slot, time] : first_up) KeepMax(all_up, time);
  if (all_up) return *all_up;
  std::optional<int64_t> commit;
  for (const CommitEntry& entry : run.All<CommitEntry>()) KeepMin(commit, entry.time_ns);
  if (commit) return std::min(*commit, first_step.value_or(*commit));
  return first_step.value_or(run.end);
}

std::optional<int64_t> FirstBeginOf(size_t run, const Groups& groups) {
  std::optional<int64_t> first;
  for (auto it = groups.lower_bound({run, 0}); it != groups.end() && it->first.run == run; ++it) {
    if (it->second.first_begin) KeepMin(first, *it->second.first_begin);
  }
  return first;
}

void PaintRun(const Invocation& run, std::optional<int64_t> first_step, Painter& painter) {
  const int64_t queue_end = EndOfQueue(run, first_step);
  const int64_t init_end = std::max(queue_end, first_step.value_or(run.end));
  painter.Paint(run.begin, queue_end, JobState::kQueue);
  painter.Paint(queue_end, init_end, JobState::kInit);
  painter.Paint(init_end, run.end, JobState::kIdleHeld);
}

void PaintGap(const TimeLine& line, size_t run, Painter& painter) {
  const Invocation& before = line.runs[run - 1];
  JobState state = before.has_end ? JobState::kQueue : JobState::kRecovery;
  if (line.gap_is_estimated[run]) state = JobState::kUnknown;
  painter.Paint(before.end, line.runs[run].begin, state);
}

// What a step did besides its parts.
JobState StateOfRest(const JobStep& step) {
  if (step.flags & kStepEval) return JobState::kEval;
  return step.flags & kStepWarmUp ? JobState::kWarmUp : JobState::kIdleHeld;
}

void PaintSteps(const std::vector<JobStep>& steps, Painter& painter) {
  std::vector<const JobStep*> by_time;
  by_time.reserve(steps.size());
  for (const JobStep& step : steps) by_time.push_back(&step);
  std::stable_sort(by_time.begin(), by_time.end(), [](const auto* a, const auto* b) {
    return std::tie(a->start_ns, a->end_ns) < std::tie(b->start_ns, b->end_ns);
  });
  int64_t painted = 0;  // leads of neighbouring steps may be two ranks, whose steps overlap
  for (const JobStep* step : by_time) {
    int64_t at = step->start_ns;
    const auto paint = [&](int64_t length, JobState state) {
      painter.Paint(std::max(at, painted), at + length, state);
      at += length;
    };
    if (IsAborted(*step)) {
      paint(step->end_ns - step->start_ns, JobState::kLostWork);
    } else {
      paint(step->data_ns, JobState::kDataWait);
      paint(step->work_ns, step->is_lost ? JobState::kLostWork : JobState::kProductive);
      paint(step->checkpoint_stall_ns, JobState::kCheckpointStall);
      paint(step->other_ns, StateOfRest(*step));
    }
    painted = std::max(painted, step->end_ns);
  }
}

// The excess over the median of the next steps.
void PaintWarmUp(const Group& group, const std::vector<JobStep>& steps, Painter& painter) {
  constexpr size_t kFirst = 3, kNext = 20, kFewest = 5;
  std::vector<const JobStep*> whole;
  for (const size_t index : group.steps) {
    if (!IsAborted(steps[index])) whole.push_back(&steps[index]);
    if (whole.size() == kFirst + kNext) break;
  }
  if (whole.size() < kFirst + kFewest) return;
  std::vector<int64_t> next;
  for (size_t i = kFirst; i < whole.size(); ++i) next.push_back(whole[i]->work_ns);
  const int64_t median = ExactPercentile(next, 0.5).value_or(0);
  for (size_t i = 0; i < kFirst; ++i) {
    const int64_t excess = whole[i]->work_ns - median;
    if (excess <= median / 10) continue;
    const int64_t from = whole[i]->start_ns + whole[i]->data_ns;
    painter.Paint(from, from + excess, JobState::kWarmUp, Bit(JobState::kProductive));
  }
}

void PaintFault(const GroupKey& key, const Interruption& fault, const std::vector<Invocation>& runs,
                const Groups& groups, Painter& painter) {
  const int64_t detected = fault.detected_ns;
  const int64_t run_end = runs[key.run].end;
  int64_t failed = fault.failed_ns;
  if (fault.is_outage) {
    // Nobody died in a step: ranks tell themselves what of theirs was cut, and a program without
    // steps went on with whatever it did.
    painter.Paint(failed, fault.recovered_ns.value_or(run_end), JobState::kRecovery,
                  Bit(JobState::kIdleHeld));
    failed = detected;
  } else if (const auto it = groups.find(key); it != groups.end() && it->second.first_begin) {
    const int64_t last_whole =
        std::min(it->second.last_end.value_or(*it->second.first_begin), detected);
    failed = std::max(failed, last_whole);
    painter.Paint(last_whole, failed, JobState::kLostWork,
                  Bit(JobState::kIdleHeld) | Bit(JobState::kInit) | Bit(JobState::kDataWait));
  }
  painter.Paint(failed, detected, JobState::kHangWait);

  std::optional<int64_t> next_step;
  for (auto it = groups.upper_bound(key); it != groups.end() && it->first.run == key.run; ++it) {
    if (it->second.first_begin && *it->second.first_begin >= detected)
      KeepMin(next_step, *it->second.first_begin);
  }
  const int64_t init_end = next_step.value_or(run_end);
  const int64_t recovered =
      std::clamp(fault.recovered_ns.value_or(init_end), detected, std::max(detected, init_end));
  if (!fault.is_outage) painter.Paint(detected, recovered, JobState::kRecovery);
  // A survivor may leave its unfinished step only now: that is no work either.
  painter.Paint(recovered, init_end, JobState::kInit,
                Bit(JobState::kIdleHeld) | Bit(JobState::kUnknown) | Bit(JobState::kLostWork));
}

std::optional<JobState> StateOf(Phase phase) {
  switch (phase) {
    case Phase::kData:
      return JobState::kDataWait;
    case Phase::kCheckpointSnapshot:
    case Phase::kCheckpointWrite:
      return JobState::kCheckpointStall;
    case Phase::kRestore:
      return JobState::kRestore;
    case Phase::kEval:
      return JobState::kEval;
    case Phase::kInit:
    case Phase::kCompile:
    case Phase::kRebuild:
      return JobState::kInit;
    default:
      return std::nullopt;
  }
}

// What is known of the time between steps.
void PaintSections(const Invocation& run, Painter& painter) {
  constexpr StateMask kOpen = Bit(JobState::kIdleHeld) | Bit(JobState::kInit);
  for (const SectionEntry& entry : run.All<SectionEntry>()) {
    if (const auto state = StateOf(entry.phase))
      painter.Paint(entry.start_ns, entry.end_ns, *state, kOpen);
  }
  for (const RestoreEntry& entry : run.All<RestoreEntry>()) {
    painter.Paint(entry.start_ns, entry.end_ns, JobState::kRestore, kOpen);
  }
}

}  // namespace

std::string_view StateName(JobState state) {
  constexpr std::string_view kNames[kJobStates] = {
      "queue",     "init",      "warm_up",  "productive", "data_wait", "ckpt_stall", "restore",
      "lost_work", "hang_wait", "recovery", "eval",       "idle_held", "unknown"};
  return static_cast<size_t>(state) < kJobStates ? kNames[static_cast<size_t>(state)] : "unknown";
}

Timeline BuildTimeline(std::span<const RunEntries> runs) {
  const TimeLine line = PutOnOneClock(runs);
  Timeline timeline;
  timeline.runs = line.runs.size();
  for (const Invocation& run : line.runs) timeline.wall_ns = std::max(timeline.wall_ns, run.end);
  timeline.is_estimated =
      std::count(line.gap_is_estimated.begin(), line.gap_is_estimated.end(), true) > 0;

  CollectSteps(line.runs, timeline.steps);
  const Groups groups = CollectGroups(line.runs, timeline.steps);
  Faults faults = CollectFaults(line.runs, groups);
  FindLostSteps(groups, timeline.steps, faults);

  Painter painter(timeline.wall_ns);
  for (size_t run = 0; run < line.runs.size(); ++run) {
    PaintRun(line.runs[run], FirstBeginOf(run, groups), painter);
    if (run > 0) PaintGap(line, run, painter);
  }
  PaintSteps(timeline.steps, painter);
  for (const auto& [key, group] : groups) PaintWarmUp(group, timeline.steps, painter);
  for (const auto& [key, fault] : faults) PaintFault(key, fault, line.runs, groups, painter);
  for (const Invocation& run : line.runs) PaintSections(run, painter);
  timeline.state_ns = painter.Sums();
  // Nothing at all was recorded: no time, and no state either.
  if (timeline.wall_ns == 0) timeline.state_ns = {};

  for (auto& [key, fault] : faults) timeline.interruptions.push_back(std::move(fault));
  std::stable_sort(timeline.interruptions.begin(), timeline.interruptions.end(),
                   [](const auto& a, const auto& b) { return a.detected_ns < b.detected_ns; });
  return timeline;
}

GoodputRatios RatiosOf(const Timeline& timeline, std::optional<double> mfu) {
  GoodputRatios ratios;
  const auto productive = static_cast<double>(timeline.in(JobState::kProductive));
  const int64_t run_time = timeline.wall_ns - timeline.in(JobState::kQueue);
  if (run_time > 0) ratios.goodput = productive / static_cast<double>(run_time);
  if (timeline.wall_ns > 0)
    ratios.occupancy_goodput = productive / static_cast<double>(timeline.wall_ns);
  if (ratios.goodput && mfu) ratios.effective_flops_ratio = *ratios.goodput * *mfu;

  int64_t unplanned = 0, unattended = 0, recovered = 0;
  double restore_ns = 0;
  for (const Interruption& each : timeline.interruptions) {
    if (each.first_step_ns) {
      ++recovered;
      restore_ns += static_cast<double>(*each.first_step_ns - each.detected_ns);
    }
    if (each.is_planned) continue;
    ++unplanned;
    if (each.is_unattended()) ++unattended;
  }
  if (recovered > 0)
    ratios.restore_time_ns = static_cast<int64_t>(restore_ns / static_cast<double>(recovered));
  if (unplanned > 0) {
    ratios.mtbi_ns = run_time / unplanned;
    ratios.unattended_recovery_rate =
        static_cast<double>(unattended) / static_cast<double>(unplanned);
  }
  return ratios;
}

}  // namespace outlast
