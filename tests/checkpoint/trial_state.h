// States whose every byte is known, taken through a whole job: saved, restored from memory, and
// restored from disk by another world.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/save_service.h"
#include "outlast/base/status.h"
#include "outlast/checkpoint/checkpointer.h"
#include "outlast/run/collectives.h"
#include "outlast/run/run.h"
#include "outlast/testing/local_world.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {

// The state of one rank. An element's bytes are a function of its tensor's name, the step, and its
// place in the whole tensor: so any two layouts of one tensor can be compared.
class TrialState {
 public:
  // `strides` in elements; the memory between the elements belongs to nobody, and must stay as it
  // is.
  Region& Add(const std::string& name, DType dtype, const Shape& global,
              std::optional<Box> box = std::nullopt, const Shape& strides = {},
              RegionKind kind = RegionKind::kStable) {
    names_.push_back(name);
    const Box held = box.value_or(Box{Shape::Zeros(global.rank()), global});
    memory_.emplace_back(MemoryBytesOf(dtype, held.extent, strides).value(), kGap);
    view_.regions.push_back(
        {names_.back(), dtype, global, held.offset, held.extent, memory_.back(), kind, strides});
    return view_.regions.back();
  }
  // The same memory under another name.
  void Tie(const std::string& name, const std::string& to) {
    names_.push_back(name);
    for (const Region& region : view_.regions) {
      if (region.name != to) continue;
      Region tied = region;
      tied.name = names_.back();
      view_.regions.push_back(tied);
      tied_[name] = to;
      return;
    }
  }

  void SetTo(int64_t step) {
    for (const Region& region : view_.regions) {
      ForEachElement(region, [&](std::span<std::byte> element, uint64_t place) {
        for (size_t i = 0; i < element.size(); ++i)
          element[i] = ByteOf(region.name, step, place * element.size() + i);
      });
    }
    view_.extras["step"] = std::to_string(step);
  }
  // Empty, or the first thing that is not as it was at `step`.
  std::string Difference(int64_t step) const {
    for (const Region& region : view_.regions) {
      std::string wrong;
      uint64_t elements = 0;
      ForEachElement(region, [&](std::span<std::byte> element, uint64_t place) {
        ++elements;
        for (size_t i = 0; i < element.size() && wrong.empty(); ++i) {
          if (element[i] != ByteOf(region.name, step, place * element.size() + i))
            wrong = std::string(region.name.substr(0, 40)) + " at " + std::to_string(place);
        }
      });
      if (!wrong.empty()) return wrong;
      const auto gaps = static_cast<uint64_t>(std::ranges::count(region.bytes, kGap));
      const uint64_t element = region.bytes.size() < elements ? 1 : SizeOf(region);
      if (!IsPacked(region) && gaps < region.bytes.size() - elements * element)
        return std::string(region.name) + ": the gaps of its memory were written to";
    }
    return "";
  }
  StateView& view() { return view_; }

 private:
  static constexpr std::byte kGap{0xee};

  static size_t SizeOf(const Region& region) {
    return std::max<size_t>(1, static_cast<size_t>(BitsOf(region.dtype)) / 8);
  }

  std::byte ByteOf(std::string_view name, int64_t step, uint64_t place) const {
    const auto tied = tied_.find(std::string(name));
    if (tied != tied_.end()) name = tied->second;
    uint64_t x = std::hash<std::string_view>{}(name) ^ static_cast<uint64_t>(step) << 48 ^ place;
    x *= 0x9e3779b97f4a7c15;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9;
    return static_cast<std::byte>(x >> 56);
  }

  // Types of less than a byte: bytes, which are whole tensors in the tests.
  template <typename Visit>
  static void ForEachElement(const Region& region, Visit visit) {
    if (BitsOf(region.dtype) < 8) {
      for (size_t i = 0; i < region.bytes.size(); ++i) visit(region.bytes.subspan(i, 1), i);
      return;
    }
    const int rank = region.extent.rank();
    std::vector<int64_t> strides(static_cast<size_t>(rank));
    int64_t packed = 1;
    for (int i = rank - 1; i >= 0; --i) {
      strides[static_cast<size_t>(i)] = region.strides.rank() == 0 ? packed : region.strides[i];
      packed *= region.extent[i];
    }
    const Shape offset = OffsetOf(region);
    std::vector<int64_t> index(static_cast<size_t>(rank));
    for (int64_t n = 0; n < packed; ++n) {
      int64_t at = 0;
      uint64_t place = 0;
      for (int i = 0; i < rank; ++i) {
        const auto d = static_cast<size_t>(i);
        at += index[d] * strides[d];
        place = place * static_cast<uint64_t>(region.global[i]) +
                static_cast<uint64_t>(offset[i] + index[d]);
      }
      visit(region.bytes.subspan(static_cast<size_t>(at) * SizeOf(region), SizeOf(region)), place);
      for (int i = rank - 1; i >= 0; --i) {
        const auto d = static_cast<size_t>(i);
        if (++index[d] < region.extent[i]) break;
        index[d] = 0;
      }
    }
  }

  std::deque<std::string> names_;
  std::deque<std::vector<std::byte>> memory_;
  std::map<std::string, std::string> tied_;
  StateView view_;
};

using MakeState = std::function<std::unique_ptr<TrialState>(int rank, int world)>;

// A world over a root, with a save service as the agent has it.
inline testing::LocalWorldResult RunWorld(
    int ranks, int restarts, const std::function<absl::Status(testing::LocalWorld&, Run&)>& body) {
  std::unique_ptr<SaveService> service;
  testing::LocalWorldOptions options;
  options.job.max_restarts = restarts;
  options.prepare = [&](Keeper& keeper) {
    service = std::make_unique<SaveService>(keeper, SaveServiceOptions{});
    keeper.Attach(service.get());
  };
  options.finish = [&](Keeper& keeper) {
    keeper.Detach(service.get());
    service.reset();
  };
  testing::LocalWorld world(ranks, options);
  return world.Run([&](Run& run) { return body(world, run); });
}

// Saves step 1, overwrites every byte, ends the generation with all ranks alive, restores step 1
// from memory, and saves it to disk.
inline void SaveThroughMemory(const std::string& root, int ranks, const MakeState& make,
                              CheckpointerOptions options = {}) {
  std::atomic<int> checked{0};
  options.uri = root;
  options.every = Every::Steps(1'000'000);
  options.snapshot_every = Every::Steps(1);
  const testing::LocalWorldResult result =
      RunWorld(ranks, 1, [&](testing::LocalWorld& world, Run& run) -> absl::Status {
        const auto state = make(run.rank(), ranks);
        OUTLAST_ASSIGN_OR_RETURN(const auto checkpoints, Checkpointer::Open(run, options));
        return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
          OUTLAST_ASSIGN_OR_RETURN(auto group, Group::Make(generation, run, "trial", 4096));
          OUTLAST_ASSIGN_OR_RETURN(const int64_t step, checkpoints->Restore(state->view()));
          if (step == 1) {
            EXPECT_EQ(checkpoints->stats().restored_from, "memory");
            EXPECT_EQ(state->Difference(1), "") << "rank " << run.rank() << " from memory";
            EXPECT_EQ(checkpoints->restored_extras(), state->view().extras);
            ++checked;
            return checkpoints->Finish(1, state->view());
          }
          OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
          state->SetTo(1);
          OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(1, state->view()));
          OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
          const std::string wanted_step = state->view().extras["step"];
          state->SetTo(99);
          state->view().extras["step"] = wanted_step;  // what the comparison above expects
          OUTLAST_RETURN_IF_ERROR(group.Barrier());
          if (run.rank() == 0) {
            world.OnKeeper([](Keeper& keeper) {
              keeper.Dispatch(
                  VerdictGiven{.culprit = 0, .verdict_class = "test", .detail = "test"});
            });
          }
          while (generation.Check().ok()) usleep(500);
          return generation.Check();
        });
      });
  ASSERT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(checked, ranks);
}

// Restores step 1 from disk into a world of `ranks`.
inline void RestoreFromDisk(
    const std::string& root, int ranks, const MakeState& make,
    const std::function<void(Run&, Checkpointer&)>& look = [](Run&, Checkpointer&) {}) {
  std::atomic<int> checked{0};
  const testing::LocalWorldResult result =
      RunWorld(ranks, 0, [&](testing::LocalWorld&, Run& run) -> absl::Status {
        const auto state = make(run.rank(), ranks);
        OUTLAST_ASSIGN_OR_RETURN(const auto checkpoints, Checkpointer::Open(run, {.uri = root}));
        return run.ForEachGeneration([&](Generation&) -> absl::Status {
          OUTLAST_ASSIGN_OR_RETURN(const int64_t step, checkpoints->Restore(state->view()));
          EXPECT_EQ(step, 1);
          EXPECT_EQ(checkpoints->stats().restored_from, "disk");
          EXPECT_EQ(state->Difference(1), "")
              << "rank " << run.rank() << " of " << ranks << " from disk";
          look(run, *checkpoints);
          ++checked;
          return absl::OkStatus();
        });
      });
  ASSERT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(checked, ranks);
}

// The folder of the root's only checkpoint.
inline std::string OnlyCheckpoint(const std::string& root) {
  RootOptions options;
  options.access = Access::kRead;
  const auto opened = Root::Open(root, options).value();
  const Listing listing = opened->List().value();
  EXPECT_EQ(listing.checkpoints.size(), 1u);
  return opened->PathOf(listing.checkpoints.at(0).name);
}

// Box `index` of `count` along dimension 0 by ceiling division, as PyTorch's chunks: the last ones
// may be short or empty.
inline Box Slice(const Shape& global, int index, int count, int dimension = 0) {
  const int64_t length = global[dimension], each = (length + count - 1) / count;
  Box box{Shape::Zeros(global.rank()), global};
  const int64_t begin = std::min(length, each * index);
  box.offset.set(dimension, begin);
  box.extent.set(dimension, std::min(each, length - begin));
  return box;
}

}  // namespace outlast
