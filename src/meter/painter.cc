#include "meter/painter.h"

#include <algorithm>
#include <iterator>

namespace outlast {

void Painter::Paint(int64_t begin, int64_t end, JobState state, StateMask over) {
  begin = std::max<int64_t>(begin, 0);
  end = std::min(end, end_);
  if (begin >= end) return;
  Split(begin);
  Split(end);
  for (auto it = from_.find(begin); it != from_.end() && it->first < end; ++it) {
    if (over & Bit(it->second)) it->second = state;
  }
  Join(begin, end);
}

std::array<int64_t, kJobStates> Painter::Sums() const {
  std::array<int64_t, kJobStates> sums{};
  for (auto it = from_.begin(); it != from_.end(); ++it) {
    const auto next = std::next(it);
    sums[static_cast<size_t>(it->second)] += (next == from_.end() ? end_ : next->first) - it->first;
  }
  return sums;
}

void Painter::Split(int64_t at) {
  const auto after = from_.upper_bound(at);
  if (at < end_) from_.emplace_hint(after, at, std::prev(after)->second);
}

// Neighbours in one state become one piece: a year of steps stays as small as its interruptions.
void Painter::Join(int64_t begin, int64_t end) {
  auto it = from_.find(begin);
  if (it != from_.begin()) --it;
  while (true) {
    const auto next = std::next(it);
    if (next == from_.end() || next->first > end) return;
    if (next->second == it->second) {
      from_.erase(next);
    } else {
      it = next;
    }
  }
}

}  // namespace outlast
