#include "outlast/elastic/membership.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <tuple>

#include "base/error.h"

namespace outlast {
namespace {

// Where a rank is held. agent: an index of the live ones; kGone: it is dead; kDone: its work is
// done, and nobody need hold it.
constexpr int kGone = -1;
constexpr int kDone = -2;
struct Place {
  int agent = kGone;
  int slot = 0;
  int last_rank = -1;  // in the last map
};

std::string WorldsThatFit(const MembershipOptions& options) {
  std::string fitting;
  for (int world = 1; world <= options.max_world; ++world) {
    if (FitsWorld(world, options)) fitting += (fitting.empty() ? "" : ", ") + std::to_string(world);
  }
  return fitting.empty() ? "none" : fitting;
}

class Assigner {
 public:
  Assigner(const AssignRequest& request, const MembershipOptions& options)
      : request_(request), options_(options), agents_(request.live) {
    std::sort(agents_.begin(), agents_.end(), [](const LiveAgent& one, const LiveAgent& other) {
      return std::tie(one.node, one.incarnation) < std::tie(other.node, other.incarnation);
    });
    used_.resize(agents_.size());
    for (size_t i = 0; i < agents_.size(); ++i)
      used_[i].resize(static_cast<size_t>(std::max(agents_[i].capacity, 0)));
    is_member_.resize(agents_.size());
  }

  absl::StatusOr<RankMap> Run() {
    KeepSurvivors();
    FillTheDead();
    OUTLAST_RETURN_IF_ERROR(Shrink());
    if (places_.empty() || request_.may_grow) Grow();
    if (places_.empty()) return TooFew(FreeSlots());
    return ToMap();
  }

 private:
  // Rule 1.
  void KeepSurvivors() {
    for (const RankRun& run : request_.last.runs) {
      const int agent = FindAgent(run.node);
      if (agent != kGone) is_member_[static_cast<size_t>(agent)] = true;
      bool works = false;
      for (int i = 0; i < run.count; ++i) {
        const int rank = run.first_rank + i, slot = run.first_slot + i;
        const bool done =
            std::binary_search(request_.finished.begin(), request_.finished.end(), rank);
        works = works || !done;
        if (agent != kGone && slot < agents_[static_cast<size_t>(agent)].capacity) {
          Take(agent, slot);
          places_.push_back({agent, slot, rank});
        } else {
          places_.push_back({done ? kDone : kGone, slot, rank});
        }
      }
      Count(run, works, agent == kGone);
    }
  }
  void Count(const RankRun& run, bool works, bool gone) {
    if (!works) return;
    auto& nodes = gone ? gone_nodes_ : live_nodes_;
    if (std::find(nodes.begin(), nodes.end(), run.node) == nodes.end()) nodes.push_back(run.node);
  }

  // Rule 2. Where the free slots don't suffice, the blocks that lack the least are mended first.
  void FillTheDead() {
    std::vector<std::pair<int, int>> blocks;  // missing, block
    const int unit = options_.unit;
    for (int first = 0; first < static_cast<int>(places_.size()); first += unit) {
      int missing = 0;
      for (int rank = first; rank < EndOfBlock(first); ++rank) missing += IsDead(rank) ? 1 : 0;
      if (missing > 0) blocks.emplace_back(missing, first);
    }
    int missing = 0;
    for (const auto& [lacks, block] : blocks) missing += lacks;
    if (missing > FreeSlots()) std::sort(blocks.begin(), blocks.end());
    for (const auto& [lacks, block] : blocks) {
      for (int rank = block; rank < EndOfBlock(block); ++rank) {
        if (IsDead(rank)) rank = FillGroup(rank, EndOfBlock(block)) - 1;
      }
    }
  }
  // Dead ranks from `first` on that were on one node; returns the rank after them.
  int FillGroup(int first, int end_of_block) {
    const RankRun& run = *request_.last.Find(first);
    int end = first;
    while (end < end_of_block && IsDead(end) && end < run.first_rank + run.count) ++end;
    for (int rank = first; rank < end;) {
      const int agent = BestFor(run, end - rank);
      if (agent == kGone) return end;
      for (int slot = 0; slot < Capacity(agent) && rank < end; ++slot) {
        if (IsUsed(agent, slot)) continue;
        Take(agent, slot);
        places_[static_cast<size_t>(rank)].agent = agent;
        places_[static_cast<size_t>(rank)].slot = slot;
        ++rank;
      }
    }
    return end;
  }
  int BestFor(const RankRun& run, int wanted) const {
    int best = kGone;
    const auto key = [&](int agent) {
      const auto i = static_cast<size_t>(agent);
      return std::make_tuple(!is_member_[i], agents_[i].segment != run.segment,
                             FreeSlotsOf(agent) < wanted);
    };
    for (int agent = 0; agent < static_cast<int>(agents_.size()); ++agent) {
      if (FreeSlotsOf(agent) == 0) continue;
      if (best == kGone || key(agent) < key(best)) best = agent;
    }
    return best;
  }

  // Rules 3, 4 and 6.
  absl::Status Shrink() {
    const int total = static_cast<int>(places_.size());
    std::vector<Place> kept, rest;
    bool lacks = false;
    for (int first = 0; first < total; first += options_.unit) {
      const int end = EndOfBlock(first);
      bool whole = end - first == options_.unit;
      for (int rank = first; rank < end; ++rank) whole = whole && !IsDead(rank);
      for (int rank = first; rank < end; ++rank) {
        lacks = lacks || IsDead(rank);
        if (!IsDead(rank)) (whole ? kept : rest).push_back(places_[static_cast<size_t>(rank)]);
      }
    }
    if (total == 0 || (!lacks && FitsWorld(total, options_))) return absl::OkStatus();
    if (!request_.trusts_link && gone_nodes_.size() > live_nodes_.size()) {
      return Error(absl::StatusCode::kUnavailable,
                   "{} of {} nodes are gone at once: it may be the coordinator's own link",
                   gone_nodes_.size(), gone_nodes_.size() + live_nodes_.size());
    }
    kept.insert(kept.end(), rest.begin(), rest.end());
    const int world = LargestFit(static_cast<int>(kept.size()));
    if (world == 0) return TooFew(static_cast<int>(kept.size()));
    for (size_t i = static_cast<size_t>(world); i < kept.size(); ++i) Release(kept[i]);
    kept.resize(static_cast<size_t>(world));
    places_ = std::move(kept);
    return absl::OkStatus();
  }

  // Rule 5 is what this leaves.
  void Grow() {
    const int now = static_cast<int>(places_.size());
    const int world = LargestFit(now + FreeSlots());
    std::vector<int> order(agents_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::stable_sort(order.begin(), order.end(),
                     [this](int one, int other) { return OrderOf(one) < OrderOf(other); });
    for (const int agent : order) {
      for (int slot = 0; slot < Capacity(agent); ++slot) {
        if (static_cast<int>(places_.size()) >= world) return;
        if (IsUsed(agent, slot)) continue;
        Take(agent, slot);
        places_.push_back({agent, slot, -1});
      }
    }
  }
  std::tuple<int, std::string_view, std::string_view> OrderOf(int agent) const {
    const LiveAgent& live = agents_[static_cast<size_t>(agent)];
    const int hint = live.slot_hint < 0 ? std::numeric_limits<int>::max() : live.slot_hint;
    return {hint, live.segment, live.node};
  }

  RankMap ToMap() const {
    RankMap map;
    map.world = static_cast<int>(places_.size());
    if (options_.global_micro_batches > 0)
      map.micro_batches = options_.global_micro_batches / (map.world / options_.unit);
    for (int rank = 0; rank < map.world; ++rank) {
      const Place& place = places_[static_cast<size_t>(rank)];
      RankRun run{.first_rank = rank, .count = 1, .first_slot = place.slot};
      if (place.agent >= 0) {
        const LiveAgent& live = agents_[static_cast<size_t>(place.agent)];
        run.node = live.node;
        run.incarnation = live.incarnation;
        run.segment = live.segment;
      } else {
        const RankRun& last = *request_.last.Find(place.last_rank);
        run.node = last.node;
        run.incarnation = last.incarnation;
        run.segment = last.segment;
      }
      if (!map.runs.empty()) {
        RankRun& before = map.runs.back();
        if (before.node == run.node && before.incarnation == run.incarnation &&
            before.first_slot + before.count == run.first_slot) {
          ++before.count;
          continue;
        }
      }
      map.runs.push_back(std::move(run));
    }
    return map;
  }

  absl::Status TooFew(int possible) const {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{} ranks can be placed, at least {} are wanted; world sizes that fit: {}",
                 possible, options_.min_world, WorldsThatFit(options_));
  }
  int LargestFit(int limit) const {
    for (int world = std::min(limit, options_.max_world); world > 0; --world) {
      if (FitsWorld(world, options_)) return world;
    }
    return 0;
  }

  int FindAgent(std::string_view node) const {
    for (size_t i = 0; i < agents_.size(); ++i) {
      if (agents_[i].node == node) return static_cast<int>(i);
    }
    return kGone;
  }
  bool IsDead(int rank) const { return places_[static_cast<size_t>(rank)].agent == kGone; }
  int EndOfBlock(int first) const {
    return std::min(first + options_.unit, static_cast<int>(places_.size()));
  }
  int Capacity(int agent) const {
    return static_cast<int>(used_[static_cast<size_t>(agent)].size());
  }
  bool IsUsed(int agent, int slot) const {
    return used_[static_cast<size_t>(agent)][static_cast<size_t>(slot)];
  }
  void Take(int agent, int slot) {
    used_[static_cast<size_t>(agent)][static_cast<size_t>(slot)] = true;
  }
  void Release(const Place& place) {
    if (place.agent < 0) return;
    used_[static_cast<size_t>(place.agent)][static_cast<size_t>(place.slot)] = false;
  }
  int FreeSlotsOf(int agent) const {
    const auto& used = used_[static_cast<size_t>(agent)];
    return static_cast<int>(std::count(used.begin(), used.end(), false));
  }
  int FreeSlots() const {
    int free = 0;
    for (size_t i = 0; i < agents_.size(); ++i) free += FreeSlotsOf(static_cast<int>(i));
    return free;
  }

  const AssignRequest& request_;
  const MembershipOptions& options_;
  std::vector<LiveAgent> agents_;
  std::vector<std::vector<bool>> used_;               // slots of each agent
  std::vector<bool> is_member_;                       // of the last generation
  std::vector<std::string> live_nodes_, gone_nodes_;  // of the last generation, with work to do
  std::vector<Place> places_;                         // by rank
};

}  // namespace

const RankRun* RankMap::Find(int rank) const {
  for (const RankRun& run : runs) {
    if (rank >= run.first_rank && rank < run.first_rank + run.count) return &run;
  }
  return nullptr;
}

int RankMap::RankOf(std::string_view node, int slot) const {
  for (const RankRun& run : runs) {
    if (run.node == node && slot >= run.first_slot && slot < run.first_slot + run.count)
      return run.first_rank + slot - run.first_slot;
  }
  return -1;
}

bool RankMap::Has(std::string_view node, uint64_t incarnation) const {
  return std::any_of(runs.begin(), runs.end(), [&](const RankRun& run) {
    return run.node == node && run.incarnation == incarnation;
  });
}

bool FitsWorld(int world, const MembershipOptions& options) {
  if (world < std::max(1, options.min_world) || world > options.max_world) return false;
  if (world % options.unit != 0) return false;
  return options.global_micro_batches % (world / options.unit) == 0;
}

absl::Status CheckLargestWorld(const MembershipOptions& options) {
  if (FitsWorld(options.max_world, options)) return absl::OkStatus();
  const std::string fitting = WorldsThatFit(options);
  if (options.max_world % options.unit != 0)
    return Error(absl::StatusCode::kInvalidArgument,
                 "--ranks-per-replica {}: a world of {} ranks is not made of whole replicas; world "
                 "sizes that fit: {}",
                 options.unit, options.max_world, fitting);
  return Error(absl::StatusCode::kInvalidArgument,
               "--micro-batches {}: a world of {} ranks ({} replicas) cannot split them evenly; "
               "world sizes that fit: {}",
               options.global_micro_batches, options.max_world, options.max_world / options.unit,
               fitting);
}

absl::StatusOr<RankMap> Assign(const AssignRequest& request, const MembershipOptions& options) {
  return Assigner(request, options).Run();
}

}  // namespace outlast
