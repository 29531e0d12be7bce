#include "outlast/blackbox/progress.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "blackbox/words.h"

namespace outlast {
namespace {

constexpr uint8_t kLimitIsDeclared = 1;

constexpr std::string_view kPhaseNames[kPhaseCount] = {
    "none",      "init",                "compile",          "data",    "forward", "backward", "comm_wait", "optimizer",
    "checkpoint_snapshot", "checkpoint_write", "restore", "eval",    "rebuild", "teardown", "idle",      "user"};

// The first word of a section's row.
struct RowHead {
  uint32_t id;
  uint8_t phase, flags;
  uint16_t name;
};
static_assert(sizeof(RowHead) == 8);

uint32_t SectionId(const Segment& segment, uint16_t name) {
  const std::span<std::byte> strings = segment.area(AreaKind::kStrings);
  if (name == 0 || name % 8 != 0 || name + sizeof(StringEntry) > strings.size()) return 1;
  return std::max(blackbox::LoadRecord<StringEntry>(strings.data() + name).id, 1u);
}

void Increment(uint64_t& word) { StoreWord(word, LoadWord(word) + 1); }

}  // namespace

std::string_view PhaseName(Phase phase) {
  const auto number = static_cast<size_t>(phase);
  return number < kPhaseCount ? kPhaseNames[number] : "unknown";
}

ProgressWriter::ProgressWriter(Segment& segment)
    : segment_(&segment), header_(&segment.header()), rows_(segment.sections()) {}

void ProgressWriter::SetStep(uint64_t step) { StoreWord(header_->step, step); }

SectionDepth ProgressWriter::OpenSection(uint16_t name, Phase phase, uint64_t limit_ns, uint64_t now_ns) {
  const SectionDepth depth = depth_++;
  const uint64_t opened = LoadWord(header_->sections_opened) + 1;
  if (depth < rows_.size()) {
    SectionRow& row = rows_[depth];
    StoreWord(row.start_ns, now_ns);
    StoreWord(row.limit_ns, limit_ns);
    StoreWord(row.progress, 0);
    StoreWord(row.opened, opened);
    const RowHead head = {.id = SectionId(*segment_, name), .phase = static_cast<uint8_t>(phase),
                          .flags = limit_ns == 0 ? uint8_t{0} : kLimitIsDeclared, .name = name};
    blackbox::StoreRecord(&row, head);
  }
  StoreWord(header_->sections_opened, opened);
  PublishInnermost();
  return depth;
}

void ProgressWriter::CloseSection(SectionDepth depth) {
  if (depth >= depth_) return;
  const size_t with_row = std::min<size_t>(depth_, rows_.size());
  for (size_t i = with_row; i > depth; --i) blackbox::StoreWordAt(&rows_[i - 1], 0);
  depth_ = depth;
  PublishInnermost();
}

void ProgressWriter::CloseSection() {
  if (depth_ > 0) CloseSection(depth_ - 1);
}

void ProgressWriter::Tick(uint64_t count) {
  if (depth_ > 0) Tick(depth_ - 1, count);
}

void ProgressWriter::Tick(SectionDepth depth, uint64_t count) {
  if (depth < depth_ && depth < rows_.size()) StoreWord(rows_[depth].progress, count);
}

// The word that tells a reader most, stored last. Below the last row it names the section of that row.
void ProgressWriter::PublishInnermost() {
  const size_t with_row = std::min<size_t>(depth_, rows_.size());
  if (with_row == 0) return StoreWord(header_->section_word, 0);
  const auto head = blackbox::LoadRecord<RowHead>(&rows_[with_row - 1]);
  StoreWord(header_->section_word, uint64_t{head.id} << 32 | uint64_t{depth_ & 0xffff} << 16 |
                                       uint64_t{head.phase} << 8 | head.flags);
}

void ProgressWriter::SetUnwinding(uint64_t unwinding) { StoreWord(header_->unwinding, unwinding); }
void ProgressWriter::SetError(int64_t error) { StoreWord(header_->last_error, error); }
void ProgressWriter::BeatNative() { Increment(header_->beat_native); }
void ProgressWriter::BeatGil() { Increment(header_->beat_gil); }
void ProgressWriter::BeatMain() { Increment(header_->beat_main); }

void AgentWords::SetAbortGeneration(uint64_t generation) {
  uint64_t found = LoadWord(header_->abort_generation);
  while (found < generation && !__atomic_compare_exchange_n(&header_->abort_generation, &found, generation, false,
                                                            __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
}

namespace {

void ReadSections(const SegmentView& view, uint64_t now_ns, ProgressSnapshot& snapshot) {
  const uint64_t rows = std::min<uint64_t>(view.rows(AreaKind::kSections), kSectionRows);
  for (uint64_t i = 0; i < rows; ++i) {
    const auto row = view.Row<SectionRow>(AreaKind::kSections, i);
    if (row.id == 0) continue;
    snapshot.sections.push_back({.id = row.id,
                                 .phase = static_cast<Phase>(row.phase),
                                 .name = view.String(row.name),
                                 .start_ns = row.start_ns,
                                 .age_ns = now_ns > row.start_ns ? now_ns - row.start_ns : 0,
                                 .limit_ns = row.limit_ns,
                                 .limit_is_declared = (row.flags & kLimitIsDeclared) != 0,
                                 .progress = row.progress,
                                 .opened = row.opened});
  }
}

}  // namespace

ProgressSnapshot ReadProgress(const SegmentView& view, uint64_t now_ns) {
  const auto header = blackbox::LoadRecord<SegmentHeader>(view.bytes().data());
  ProgressSnapshot snapshot = {.job_id = header.job_id,
                               .boot_id = header.boot_id,
                               .generation = header.generation,
                               .slot = header.slot,
                               .rank = header.rank,
                               .world = header.world,
                               .local_rank = header.local_rank,
                               .incarnation = header.incarnation,
                               .pid = header.pid,
                               .pid_start_time = header.pid_start_time,
                               .beat_native = header.beat_native,
                               .beat_gil = header.beat_gil,
                               .beat_main = header.beat_main,
                               .step = header.step,
                               .sections_opened = header.sections_opened,
                               .unwinding = header.unwinding,
                               .last_error = header.last_error,
                               .flight_overflow = header.flight_overflow,
                               .abort_generation = header.abort_generation,
                               .stop_step = header.stop_step,
                               .trace_mask = header.trace_mask,
                               .depth = static_cast<uint32_t>(header.section_word >> 16 & 0xffff),
                               .phase = static_cast<Phase>(header.section_word >> 8 & 0xff)};
  ReadSections(view, now_ns, snapshot);
  return snapshot;
}

bool ProgressSnapshot::MovedSince(const ProgressSnapshot& earlier) const {
  const auto same_section = [](const OpenSection& a, const OpenSection& b) {
    return a.id == b.id && a.opened == b.opened && a.progress == b.progress;
  };
  return step != earlier.step || sections_opened != earlier.sections_opened || depth != earlier.depth ||
         !std::equal(sections.begin(), sections.end(), earlier.sections.begin(), earlier.sections.end(), same_section);
}

}  // namespace outlast
