#include "checkpoint/overlap.h"

#include <algorithm>

namespace outlast {
namespace {

// Runs that all pairs of a state together may cost: some tens of milliseconds.
constexpr uint64_t kBudget = uint64_t{1} << 21;

}  // namespace

Footprint::Footprint(const Region& region)
    : begin_(reinterpret_cast<uintptr_t>(region.bytes.data())) {
  if (region.bytes.empty()) return;
  if (IsPacked(region)) {
    run_ = region.bytes.size();
    return;
  }
  const auto element = static_cast<uint64_t>(BitsOf(region.dtype)) / 8;
  for (int i = 0; i < region.extent.rank(); ++i) {
    if (region.extent[i] > 1)
      axes_.push_back({static_cast<uint64_t>(region.extent[i]),
                       static_cast<uint64_t>(region.strides[i]) * element});
  }
  std::ranges::sort(axes_, std::ranges::greater(), &Axis::stride);
  run_ = element;
  while (!axes_.empty() && axes_.back().stride == run_) {
    run_ *= axes_.back().count;
    axes_.pop_back();
  }
  for (const Axis& axis : axes_) runs_ *= axis.count;
}

// The offset of the first run that begins at or after `offset`.
std::optional<uint64_t> Footprint::FirstRunFrom(uint64_t offset) const {
  uint64_t base = 0;
  for (size_t i = 0; i < axes_.size(); ++i) {
    const auto [count, stride] = axes_[i];
    uint64_t index = offset / stride;
    offset -= index * stride;
    if (offset > reach(i + 1)) {  // past all of this slice: the next one's first
      ++index;
      offset = 0;
    }
    if (index >= count) return std::nullopt;
    base += index * stride;
    if (offset == 0) return base;
  }
  return offset == 0 ? std::optional(base) : std::nullopt;
}

bool Footprint::Touches(uintptr_t from, uintptr_t until) const {
  if (run_ == 0 || from >= end() || until <= begin_) return false;
  // The first run that ends after `from`.
  const uint64_t wanted = from < begin_ + run_ ? 0 : from - begin_ - run_ + 1;
  const std::optional<uint64_t> run = FirstRunFrom(wanted);
  return run.has_value() && begin_ + *run < until;
}

bool ShareBytes(const Footprint& a, const Footprint& b, uint64_t& budget) {
  if (a.end() <= b.begin() || b.end() <= a.begin()) return false;
  const Footprint& few = a.runs() <= b.runs() ? a : b;
  const Footprint& many = a.runs() <= b.runs() ? b : a;
  if (few.runs() > budget) return false;
  budget -= few.runs();
  return few.Any([&](uintptr_t from, uintptr_t until) { return many.Touches(from, until); });
}

std::optional<std::pair<const Region*, const Region*>> FindOverlap(const StateView& state) {
  struct Placed {
    const Region* region;
    Footprint footprint;
  };
  std::vector<Placed> placed;
  placed.reserve(state.regions.size());
  for (const Region& region : state.regions) {
    if (!region.bytes.empty()) placed.push_back({&region, Footprint(region)});
  }
  std::vector<const Placed*> order;
  order.reserve(placed.size());
  for (const Placed& one : placed) order.push_back(&one);
  std::ranges::stable_sort(order, {}, [](const Placed* one) { return one->footprint.begin(); });
  uint64_t budget = kBudget;
  std::vector<const Placed*> open;  // that reach to where the sweep is
  for (const Placed* next : order) {
    const Placed& one = *next;
    std::erase_if(open, [&](const Placed* earlier) {
      return earlier->footprint.end() <= one.footprint.begin();
    });
    bool is_alias = false;
    for (const Placed* earlier : open) {
      is_alias =
          IsSameView(*earlier->region, *one.region) && earlier->region->kind == one.region->kind;
      if (is_alias) break;
      if (ShareBytes(earlier->footprint, one.footprint, budget))
        return std::pair(earlier->region, one.region);
    }
    if (!is_alias) open.push_back(&one);
  }
  return std::nullopt;
}

}  // namespace outlast
