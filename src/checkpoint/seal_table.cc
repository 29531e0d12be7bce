#include "checkpoint/seal_table.h"

#include <sched.h>

#include <algorithm>

#include "outlast/blackbox/segment.h"

namespace outlast {
namespace {

// A step that some rank holds but that can never become common: another rank has gone past it
// without it.
bool IsVoid(std::span<const HeldSteps> ranks, int64_t step) {
  return std::any_of(ranks.begin(), ranks.end(), [&](const HeldSteps& held) {
    return held.newest() > step && !held.holds(step);
  });
}

}  // namespace

bool HeldSteps::holds(int64_t wanted) const {
  return std::find(step.begin(), step.end(), wanted) != step.end();
}

int64_t HeldSteps::newest() const {
  return std::max(passed, *std::max_element(step.begin(), step.end()));
}

int64_t CommonStep(std::span<const HeldSteps> ranks) {
  int64_t common = kNoStep;
  if (ranks.empty()) return common;
  for (const int64_t step : ranks.front().step) {
    if (step > common && std::all_of(ranks.begin(), ranks.end(),
                                     [&](const HeldSteps& held) { return held.holds(step); }))
      common = step;
  }
  return common;
}

std::optional<int> PickBuffer(std::span<const HeldSteps> ranks, size_t rank,
                              const std::array<bool, kMaxBuffers>& pinned) {
  const HeldSteps& own = ranks[rank];
  const int64_t common = CommonStep(ranks);
  std::optional<int> picked;
  for (int i = 0; i < own.buffers; ++i) {
    const auto index = static_cast<size_t>(i);
    const int64_t step = own.step[index];
    if (pinned[index] || (step != kNoStep && step >= common && !IsVoid(ranks, step))) continue;
    if (!picked || step < own.step[static_cast<size_t>(*picked)]) picked = i;
  }
  return picked;
}

size_t SealTable::BytesFor(int world) {
  return sizeof(Header) + sizeof(Row) * static_cast<size_t>(world);
}

// Seqlock with one writer. Acquire loads keep the second look at the sequence behind them. A writer
// that was killed in the middle leaves an odd sequence until the keeper rewrites its row: such a
// rank counts as holding nothing, so that its peers overwrite nothing that could be common.
HeldSteps SealTable::ReadRow(int rank) const {
  constexpr int kLooks = 200;
  const Row& shared = row(rank);
  for (int look = 0; look < kLooks; ++look) {
    const uint64_t before = LoadWord(shared.sequence);
    HeldSteps held;
    const uint64_t buffers = LoadWord(shared.buffers);
    held.buffers = buffers >= 1 && buffers <= kMaxBuffers ? static_cast<int>(buffers) : kMaxBuffers;
    for (size_t i = 0; i < held.step.size(); ++i)
      held.step[i] = LoadWord(shared.step_plus_one[i]) - 1;
    held.passed = LoadWord(shared.passed_plus_one) - 1;
    if (before % 2 == 0 && LoadWord(shared.sequence) == before) return held;
    sched_yield();
  }
  return {};
}

std::vector<HeldSteps> SealTable::Read() const {
  std::vector<HeldSteps> ranks;
  ranks.reserve(static_cast<size_t>(world_));
  for (int rank = 0; rank < world_; ++rank) ranks.push_back(ReadRow(rank));
  return ranks;
}

void SealTable::Write(int rank, const HeldSteps& held) {
  Row& shared = row(rank);
  // Odd, whatever a killed writer left; the release stores below cannot move before it.
  const uint64_t sequence = LoadWord(shared.sequence) | 1;
  StoreWord(shared.sequence, sequence);
  StoreWord(shared.buffers, static_cast<uint64_t>(held.buffers));
  for (size_t i = 0; i < held.step.size(); ++i)
    StoreWord(shared.step_plus_one[i], held.step[i] + 1);
  StoreWord(shared.passed_plus_one, held.passed + 1);
  StoreWord(shared.sequence, sequence + 1);
}

int64_t SealTable::wanted_step() const { return LoadWord(header().wanted_step_plus_one) - 1; }

void SealTable::SetWantedStep(int64_t step) { StoreWord(header().wanted_step_plus_one, step + 1); }

bool SealTable::is_led() const { return LoadWord(header().led) != 0; }

void SealTable::SetLed() { StoreWord(header().led, uint64_t{1}); }

SealTable::Cadence SealTable::cadence() const {
  const uint64_t word = LoadWord(header().cadence);
  if (word == 0) return {};
  return {static_cast<int64_t>(word >> 16),
          std::max<int64_t>(1, static_cast<int64_t>(word & 0xffff))};
}

void SealTable::SetCadence(const Cadence& cadence) {
  const uint64_t word = static_cast<uint64_t>(cadence.from) << 16 |
                        static_cast<uint64_t>(std::min<int64_t>(cadence.every, 0xffff));
  StoreWord(header().cadence, word);
}

}  // namespace outlast
