// Whether regions share memory.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "outlast/checkpoint/state.h"

namespace outlast {

// The bytes that a valid region covers, as runs of one length at the places of a lattice.
class Footprint {
 public:
  explicit Footprint(const Region& region);

  uintptr_t begin() const { return begin_; }
  uintptr_t end() const { return begin_ + reach(0) + run_; }
  uint64_t runs() const { return runs_; }
  // Does any byte lie in [from, until)?
  bool Touches(uintptr_t from, uintptr_t until) const;
  // Calls visit(from, until) for each run until it returns true; whether it did.
  template <typename Visit>
  bool Any(Visit visit) const {
    return AnyFrom(0, begin_, visit);
  }

 private:
  struct Axis {
    uint64_t count = 0, stride = 0;  // bytes
  };

  // From the first run of the axes from `axis` on to their last.
  uint64_t reach(size_t axis) const {
    uint64_t bytes = 0;
    for (; axis < axes_.size(); ++axis) bytes += (axes_[axis].count - 1) * axes_[axis].stride;
    return bytes;
  }
  std::optional<uint64_t> FirstRunFrom(uint64_t offset) const;
  template <typename Visit>
  bool AnyFrom(size_t axis, uintptr_t base, Visit& visit) const {
    if (axis == axes_.size()) return visit(base, base + run_);
    for (uint64_t i = 0; i < axes_[axis].count; ++i) {
      if (AnyFrom(axis + 1, base + i * axes_[axis].stride, visit)) return true;
    }
    return false;
  }

  uintptr_t begin_ = 0;
  uint64_t run_ = 0;  // bytes; 0: the region has no elements
  uint64_t runs_ = 1;
  std::vector<Axis> axes_;  // by stride, largest first; each stride passes all inside it
};

// Whether two footprints have a byte in common. Looks at no more runs than `budget`, which it
// lowers; past it the answer is false.
bool ShareBytes(const Footprint& a, const Footprint& b, uint64_t& budget);

// Two regions that share memory and are not the same view with the same kind; none: no such pair.
// The regions are valid one by one.
std::optional<std::pair<const Region*, const Region*>> FindOverlap(const StateView& state);

}  // namespace outlast
