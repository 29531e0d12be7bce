// Where a rank is: its step, its open sections, and what the agent asks of it.
//
// One thread of the worker, the trainer's, opens and closes sections, sets the step and ticks; beats come from threads of
// their own. A write costs a few stores: no lock, no allocation, no clock.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "outlast/blackbox/segment.h"

namespace outlast {

// What a section is about: one list for watch and meter. The numbers are part of the ABI.
enum class Phase : uint8_t {
  kNone = 0,
  kInit = 1,
  kCompile = 2,
  kData = 3,
  kForward = 4,
  kBackward = 5,
  kCommWait = 6,
  kOptimizer = 7,
  kCheckpointSnapshot = 8,
  kCheckpointWrite = 9,
  kRestore = 10,
  kEval = 11,
  kRebuild = 12,
  kTeardown = 13,
  kIdle = 14,
  kUser = 15,
};
inline constexpr size_t kPhaseCount = 16;

// "checkpoint_snapshot" and so on; "none" for kNone, "unknown" for a number that is no phase.
std::string_view PhaseName(Phase phase);

// The number of an open section: its depth, from 0.
using SectionDepth = uint32_t;

// The trainer thread's writer. Borrows the segment. Not safe for concurrent use, except the Beat functions.
class ProgressWriter {
 public:
  explicit ProgressWriter(Segment& segment);

  // Text that sections are named by; before the steps, since it walks the area. 0 when that is full.
  uint16_t Intern(std::string_view text) { return segment_->Intern(text); }

  void SetStep(uint64_t step);

  // Opens a section inside those that are open. name: from Intern. limit_ns: 0 = learned. Sections deeper than 16 are
  // counted in the depth and have no row.
  SectionDepth OpenSection(uint16_t name, Phase phase, uint64_t limit_ns, uint64_t now_ns);
  // Closes a section and whatever was left open inside it. Closing one that is not open does nothing.
  void CloseSection(SectionDepth depth);
  // Closes the innermost one.
  void CloseSection();
  // Progress of the innermost section, or of one further out: any growing count.
  void Tick(uint64_t count);
  void Tick(SectionDepth depth, uint64_t count);
  uint32_t open_sections() const { return depth_; }

  void SetUnwinding(uint64_t unwinding);
  void SetError(int64_t error);

  // Signs of life; each has one thread that calls it.
  void BeatNative();
  void BeatGil();
  void BeatMain();

 private:
  void PublishInnermost();

  Segment* segment_;
  SegmentHeader* header_;
  std::span<SectionRow> rows_;
  uint32_t depth_ = 0;
};

// What the agent asks of the worker; the worker reads it. Borrows the segment.
class AgentWords {
 public:
  explicit AgentWords(Segment& segment) : header_(&segment.header()) {}

  // This and older generations unwind. Never goes back.
  void SetAbortGeneration(uint64_t generation);
  uint64_t abort_generation() const { return LoadWord(header_->abort_generation); }
  // The step after which all ranks save and stop; 0: none.
  void SetStopStep(uint64_t step) { StoreWord(header_->stop_step, step); }
  uint64_t stop_step() const { return LoadWord(header_->stop_step); }
  void SetTraceMask(uint64_t mask) { StoreWord(header_->trace_mask, mask); }
  uint64_t trace_mask() const { return LoadWord(header_->trace_mask); }

 private:
  SegmentHeader* header_;
};

// An open section as a reader sees it.
struct OpenSection {
  uint32_t id = 0;
  Phase phase = Phase::kNone;
  std::string name;
  uint64_t start_ns = 0;  // the writer's CLOCK_MONOTONIC
  uint64_t age_ns = 0;    // at the time of the look; 0 when it began after it
  uint64_t limit_ns = 0;  // 0: learned
  bool limit_is_declared = false;
  uint64_t progress = 0;
  uint64_t opened = 0;  // with id: this opening and no other
};

// One look at a rank.
struct ProgressSnapshot {
  Id128 job_id, boot_id;
  uint64_t generation = 0;
  uint32_t slot = 0, rank = 0, world = 0, local_rank = 0, incarnation = 0;
  int32_t pid = 0;
  uint64_t pid_start_time = 0;
  uint64_t beat_native = 0, beat_gil = 0, beat_main = 0;
  uint64_t step = 0, sections_opened = 0, unwinding = 0;
  int64_t last_error = 0;
  uint64_t flight_overflow = 0;
  uint64_t abort_generation = 0, stop_step = 0, trace_mask = 0;
  uint32_t depth = 0;                 // may be more than there are rows
  Phase phase = Phase::kNone;         // of the innermost section
  std::vector<OpenSection> sections;  // outermost first; at most 16

  // Sections that opened or closed, the step, progress: all that a hung rank leaves as it is. Beats are left out.
  bool MovedSince(const ProgressSnapshot& earlier) const;
};

// Takes a look; `now_ns` is the reader's CLOCK_MONOTONIC, of the same boot. Needs nothing from the writer.
ProgressSnapshot ReadProgress(const SegmentView& view, uint64_t now_ns);

}  // namespace outlast
