// The states of a job painted over each other on its time line.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "outlast/meter/goodput.h"

namespace outlast {

using StateMask = uint32_t;

constexpr StateMask Bit(JobState state) { return StateMask{1} << static_cast<unsigned>(state); }
constexpr StateMask kAnyState = ~StateMask{0};

// A partition of [0, end) nanoseconds: whatever is painted, and in whatever order, the parts sum to
// `end`. What nobody painted is unknown.
class Painter {
 public:
  explicit Painter(int64_t end) : end_(end) { from_.emplace(0, JobState::kUnknown); }

  // [begin, end), clipped; only where one of the states of `over` is now.
  void Paint(int64_t begin, int64_t end, JobState state, StateMask over = kAnyState);

  // How long each state is.
  std::array<int64_t, kJobStates> Sums() const;

 private:
  void Split(int64_t at);
  void Join(int64_t begin, int64_t end);

  int64_t end_;
  std::map<int64_t, JobState> from_;
};

}  // namespace outlast
