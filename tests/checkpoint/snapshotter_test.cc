#include "checkpoint/snapshotter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "outlast/base/memory.h"

namespace outlast {
namespace {

constexpr absl::Duration kShortLimit = absl::Milliseconds(50);

// A rank of a world of `world` with a large stable tensor, a small stable one and an eager one.
class Rank {
 public:
  using Recheck = Snapshotter::Options::Recheck;
  explicit Rank(uint32_t rank = 0, uint32_t world = 1, int buffers = 3, size_t big = 700'001,
                Recheck recheck = Recheck::kSample, size_t other = 0,
                absl::Duration stall_limit = absl::Minutes(1))
      : big_(big),
        other_(other),
        small_(10),
        table_(Mapping::Anonymous(SealTable::BytesFor(static_cast<int>(world))).value(),
               static_cast<int>(world)) {
    std::vector<RankTable> tables;
    for (uint32_t r = 0; r < world; ++r) tables.push_back(TableOfRank(State(), r).value());
    const Plan plan = MakePlan(MergeTables(tables).value()).value();
    assignment_ = AssignmentOf(plan, rank).value();
    const BufferLayout layout{.image_bytes = assignment_.image_bytes(),
                              .replicated_bytes = assignment_.replicated_bytes,
                              .extra_capacity = 4096};
    std::vector<Buffer> mine;
    for (int i = 0; i < buffers; ++i) {
      buffers_.push_back(Buffer::Create(layout, {job_, run_, rank, world}).value());
      mine.push_back(Buffer::Open(Duplicate(buffers_.back().fd()).value()).value());
    }
    Snapshotter::Options options;
    options.job_id = job_;
    options.run_id = run_;
    options.rank = rank;
    options.world = world;
    options.is_aborted = [this](uint64_t) {
      at_chunk();
      return aborted.load();
    };
    options.stall_limit = stall_limit;
    options.recheck = recheck;
    options.on_changed = [this](int64_t step, uint64_t) { changed.push_back(step); };
    options.on_wanted_sealed = [this](int64_t step, uint64_t, int, uint32_t, bool) {
      wanted.push_back(step);
    };
    options.on_wanted_skipped = [this](int64_t step, uint64_t) { skipped.push_back(step); };
    snapshotter_ =
        Snapshotter::Make(std::move(options), table_, std::move(mine), assignment_, State())
            .value();
  }

  StateView State() {
    StateView state;
    const auto add = [&](std::string_view name, std::vector<float>& values, RegionKind kind) {
      const Shape shape{static_cast<int64_t>(values.size())};
      state.regions.push_back(
          {name, DType::kF32, shape, {}, shape, std::as_writable_bytes(std::span(values)), kind});
    };
    add("big", big_, RegionKind::kStable);
    if (!other_.empty()) add("other", other_, RegionKind::kStable);
    add("small", small_, RegionKind::kStable);
    state.extras = extras;
    return state;
  }
  void Fill(float value) {
    std::fill(big_.begin(), big_.end(), value);
    std::fill(other_.begin(), other_.end(), value);
    std::fill(small_.begin(), small_.end(), value);
  }
  bool IsAll(float value) const {
    const auto is = [&](float found) { return found == value; };
    return std::all_of(big_.begin(), big_.end(), is) &&
           std::all_of(other_.begin(), other_.end(), is) &&
           std::all_of(small_.begin(), small_.end(), is);
  }
  bool Begin(int64_t step, Snapshotter::Mode mode = Snapshotter::Mode::kLazy,
             Snapshotter::Want want = Snapshotter::Want::kMemory) {
    return snapshotter_->Begin({step, 1, 0, want, mode, false}, State()).value();
  }
  // The buffer that holds `step`; -1: none.
  int BufferOf(int64_t step) const {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const auto sealed = buffers_[i].ReadSealed(run_, BootId(), assignment_.layout_hash);
      if (sealed.ok() && sealed->header.step == step) return static_cast<int>(i);
    }
    return -1;
  }
  absl::Status RestoreStep(int64_t step, Belief belief = Belief::kNothing) {
    const int buffer = BufferOf(step);
    const uint32_t turn = buffers_[static_cast<size_t>(buffer)].control().Read().turn;
    return snapshotter_->Restore(buffer, turn, State(), belief);
  }

  std::vector<float> big_, other_, small_;
  Extras extras;
  std::atomic<bool> aborted{false};
  std::function<void()> at_chunk = [] {};  // by whoever is about to copy one, and at the end
  std::vector<int64_t> wanted, skipped, changed;
  Id128 job_ = Id128::Random(), run_ = Id128::Random();
  SealTable table_;
  Assignment assignment_;
  std::vector<Buffer> buffers_;
  std::unique_ptr<Snapshotter> snapshotter_;
};

TEST(Snapshot, GivesBackEveryByteAndTheExtras) {
  Rank rank;
  rank.Fill(3);
  rank.extras["cursor"] = R"({"position":7})";
  ASSERT_TRUE(rank.Begin(1));
  ASSERT_TRUE(rank.snapshotter_->Finish());
  rank.Fill(9);
  ASSERT_TRUE(rank.RestoreStep(1).ok());
  EXPECT_TRUE(rank.IsAll(3));
  EXPECT_EQ(rank.snapshotter_->ReadExtras(rank.BufferOf(1)).value(), rank.extras);
}

TEST(Snapshot, HoldsTheValuesOfTheSaveCallWhenTheSourceChangesAfterItIsFinished) {
  Rank rank;
  for (int64_t step = 1; step <= 20; ++step) {
    rank.Fill(static_cast<float>(step));
    ASSERT_TRUE(rank.Begin(step));
    ASSERT_TRUE(rank.snapshotter_->Finish());
    rank.Fill(-1);
    ASSERT_TRUE(rank.RestoreStep(step).ok());
    ASSERT_TRUE(rank.IsAll(static_cast<float>(step)));
  }
}

TEST(Snapshot, CopiesScalarsEagerly) {
  Rank rank;
  rank.Fill(1);
  ASSERT_TRUE(rank.Begin(1));
  std::fill(rank.small_.begin(), rank.small_.end(),
            -5.0f);  // at once: its values of the call are in the buffer already
  ASSERT_TRUE(rank.snapshotter_->Finish());
  ASSERT_TRUE(rank.RestoreStep(1).ok());
  EXPECT_EQ(rank.small_[0], 1);
}

TEST(Snapshot, EagerModeIsSealedWhenTheCallReturns) {
  Rank rank;
  rank.Fill(4);
  ASSERT_TRUE(rank.Begin(1, Snapshotter::Mode::kEager));
  EXPECT_FALSE(rank.snapshotter_->is_running());
  EXPECT_GE(rank.BufferOf(1), 0);
}

TEST(Snapshot, SealsNothingOfAnAbortedStep) {
  Rank rank;
  ASSERT_TRUE(rank.Begin(1, Snapshotter::Mode::kEager));
  ASSERT_TRUE(rank.Begin(2));
  rank.aborted = true;
  rank.snapshotter_->Finish();
  // The copier may have sealed it before the abort was raised; another one, begun after it, never
  // is.
  rank.Begin(3);
  EXPECT_FALSE(rank.snapshotter_->Finish());
  EXPECT_EQ(rank.BufferOf(3), -1);
  EXPECT_GE(rank.BufferOf(1), 0);
}

TEST(Snapshot, SkipsWhenNoBufferIsFreeAndSparesTheCommonOne) {
  // Rank 1 of two never seals anything but step 1, so 1 stays the common step for ever.
  Rank rank(0, 2, 2);
  ASSERT_TRUE(rank.Begin(1, Snapshotter::Mode::kEager));
  rank.table_.Write(1, {{1, kNoStep, kNoStep}, 2});
  EXPECT_TRUE(rank.Begin(2, Snapshotter::Mode::kEager));
  EXPECT_FALSE(rank.Begin(3, Snapshotter::Mode::kEager));
  EXPECT_GE(rank.BufferOf(1), 0);
  EXPECT_GE(rank.BufferOf(2), 0);
}

TEST(Snapshot, SkipsWhileAPersistPinsOneOfTwo) {
  Rank rank(0, 1, 2);
  ASSERT_TRUE(rank.Begin(1, Snapshotter::Mode::kEager, Snapshotter::Want::kDisk));
  EXPECT_EQ(rank.wanted, std::vector<int64_t>{1});
  ASSERT_TRUE(rank.Begin(2, Snapshotter::Mode::kEager));
  EXPECT_FALSE(rank.Begin(3, Snapshotter::Mode::kEager)) << "1 is pinned, 2 is common";
  const Buffer& pinned = rank.buffers_[static_cast<size_t>(rank.BufferOf(1))];
  ASSERT_TRUE(pinned.control().Unpin(BufferPin::kPersist, pinned.control().Read().turn));
  EXPECT_TRUE(rank.Begin(3, Snapshotter::Mode::kEager));
}

// Who would drop that save may be gone; memory's snapshots go on.
TEST(Snapshot, OneForTheDiskIsForMemoryAloneWhileAFormerOneIsBeingSaved) {
  Rank rank(0, 1, 3);
  for (int64_t step = 1; step <= 6; ++step) {
    ASSERT_TRUE(rank.snapshotter_
                    ->Begin({.step = step,
                             .generation = 1,
                             .want = Snapshotter::Want::kDisk,
                             .mode = Snapshotter::Mode::kEager,
                             .may_be_left_out = step > 1},
                            rank.State())
                    .value());
  }
  EXPECT_EQ(rank.wanted, std::vector<int64_t>{1});
  EXPECT_EQ(rank.skipped, (std::vector<int64_t>{2, 3, 4, 5, 6}));
  EXPECT_NE(rank.BufferOf(1), -1);
  EXPECT_NE(rank.BufferOf(6), -1);
  // A last one is never left out.
  ASSERT_TRUE(rank.Begin(7, Snapshotter::Mode::kEager, Snapshotter::Want::kDiskLast));
  EXPECT_EQ(rank.wanted, (std::vector<int64_t>{1, 7}));
}

TEST(Snapshot, RestoreFindsADamagedChunk) {
  Rank rank;
  rank.Fill(2);
  ASSERT_TRUE(rank.Begin(1, Snapshotter::Mode::kEager));
  rank.buffers_[static_cast<size_t>(rank.BufferOf(1))].image()[1'500'000] ^= std::byte{1};
  const absl::Status status = rank.RestoreStep(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
}

TEST(Snapshot, HoldsTheSameBytesWhoeverWritesThem) {
  // Two ranks share out what is written; each buffer serves the whole state all the same.
  for (uint32_t r = 0; r < 2; ++r) {
    Rank rank(r, 2);
    rank.Fill(static_cast<float>(r) + 5);
    ASSERT_TRUE(rank.Begin(1, Snapshotter::Mode::kEager));
    rank.Fill(0);
    ASSERT_TRUE(rank.RestoreStep(1).ok());
    EXPECT_TRUE(rank.IsAll(static_cast<float>(r) + 5));
  }
}

TEST(Replica, ServesTheStateOfARankThatWritesOtherParts) {
  Rank server(0, 2), lost(1, 2);
  server.Fill(5);
  ASSERT_TRUE(server.Begin(1, Snapshotter::Mode::kEager));
  const Buffer& buffer = server.buffers_[static_cast<size_t>(server.BufferOf(1))];
  ASSERT_NE(server.assignment_.image_bytes(), lost.assignment_.image_bytes());
  const CopyPlan plan =
      MakeReplicaPlan(lost.assignment_, server.assignment_, buffer.layout(), lost.State()).value();

  ASSERT_TRUE(CopyBack(buffer, plan, 1, lost.State(), Belief::kNothing).ok());
  EXPECT_TRUE(lost.IsAll(5));

  buffer.image()[1'500'000] ^= std::byte{1};
  EXPECT_EQ(CopyBack(buffer, plan, 1, lost.State(), Belief::kNothing).code(),
            absl::StatusCode::kDataLoss);
}

TEST(Snapshot, ADamagedOneIsMendedFromAStateThatHoldsIt) {
  Rank rank;
  rank.Fill(2);
  ASSERT_TRUE(rank.Begin(1, Snapshotter::Mode::kEager));
  const int index = rank.BufferOf(1);
  const Buffer& buffer = rank.buffers_[static_cast<size_t>(index)];
  const uint32_t turn = buffer.control().Read().turn;
  for (const size_t at : {size_t{3}, size_t{1'500'000}}) buffer.image()[at] ^= std::byte{1};
  ASSERT_FALSE(rank.RestoreStep(1).ok());

  rank.Fill(2);
  ASSERT_TRUE(rank.snapshotter_->Mend(index, turn, rank.State()).ok());
  rank.Fill(0);
  EXPECT_TRUE(rank.RestoreStep(1).ok());
  EXPECT_TRUE(rank.IsAll(2));

  buffer.image()[1'500'000] ^= std::byte{1};
  rank.Fill(3);
  EXPECT_EQ(rank.snapshotter_->Mend(index, turn, rank.State()).code(), absl::StatusCode::kDataLoss);
}

// A tensor that both hold whole, and one that is cut between them.
TEST(Replica, IsNoneWhereAPartIsAnotherRanks) {
  std::vector<float> whole(100), half(50);
  const auto state_of = [&](int64_t rank) {
    StateView state;
    state.regions.push_back(
        {"whole", DType::kF32, {100}, {}, {100}, std::as_writable_bytes(std::span(whole))});
    state.regions.push_back(
        {"cut", DType::kF32, {100}, {rank * 50}, {50}, std::as_writable_bytes(std::span(half))});
    return state;
  };
  const std::vector<RankTable> tables{TableOfRank(state_of(0), 0).value(),
                                      TableOfRank(state_of(1), 1).value()};
  const Plan plan = MakePlan(MergeTables(tables).value()).value();
  const Assignment own = AssignmentOf(plan, 0).value(), theirs = AssignmentOf(plan, 1).value();
  const BufferLayout layout{.image_bytes = theirs.image_bytes(),
                            .replicated_bytes = theirs.replicated_bytes};
  const absl::Status status = MakeReplicaPlan(own, theirs, layout, state_of(0)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("'cut'"), std::string::npos) << status;
}

TEST(Snapshot, AGivenUpOneLeavesAFreeBuffer) {
  Rank rank(0, 1, 2);
  for (int64_t step = 1; step <= 50; ++step) {
    ASSERT_TRUE(rank.Begin(step));
    if (step % 2 == 0) {
      rank.snapshotter_->GiveUp();
    } else {
      ASSERT_TRUE(rank.snapshotter_->Finish());
    }
  }
  EXPECT_GE(rank.BufferOf(49), 0);
}

// The keeper waits for a step that it wants until it hears of it, one way or the other.
TEST(Snapshot, OneThatTheDiskWantsEndsSealedOrIsToldAsSkipped) {
  Rank rank;
  std::vector<int64_t> begun;
  for (int64_t step = 1; step <= 40; ++step) {
    rank.aborted = step % 4 == 0;
    const int64_t told_of_others = static_cast<int64_t>(rank.wanted.size() + rank.skipped.size());
    ASSERT_TRUE(rank.Begin(step, Snapshotter::Mode::kLazy,
                           step % 5 == 0 ? Snapshotter::Want::kMemory : Snapshotter::Want::kDisk));
    if (step % 2 == 0) {
      rank.snapshotter_->GiveUp();
    } else {
      ASSERT_TRUE(rank.snapshotter_->Finish());
    }
    rank.snapshotter_->GiveUp();  // again: there is nothing to be given up
    const int64_t told = static_cast<int64_t>(rank.wanted.size() + rank.skipped.size());
    ASSERT_EQ(told - told_of_others, step % 5 == 0 ? 0 : 1) << step;
    if (const int buffer = rank.BufferOf(step); buffer >= 0 && step % 5 != 0) {
      EXPECT_EQ(rank.wanted.back(), step);
      BufferControl control = rank.buffers_[static_cast<size_t>(buffer)].control();
      control.Unpin(BufferPin::kPersist, control.Read().turn);
    } else if (step % 5 != 0) {
      EXPECT_EQ(rank.skipped.back(), step);
    }
  }
  EXPECT_THAT(rank.skipped, ::testing::IsSupersetOf({4, 8, 12, 16})) << "aborted ones";
  EXPECT_THAT(rank.wanted, ::testing::IsSupersetOf({1, 3, 7, 9}));
}

TEST(Snapshot, RefusesExtrasThatOutgrowTheirRoom) {
  Rank rank;
  rank.extras["big"] = std::string(8192, 'x');
  EXPECT_EQ(
      rank.snapshotter_
          ->Begin({1, 1, 0, Snapshotter::Want::kMemory, Snapshotter::Mode::kLazy}, rank.State())
          .status()
          .code(),
      absl::StatusCode::kInvalidArgument);
  rank.extras.clear();
  EXPECT_TRUE(rank.Begin(2));
}

TEST(Snapshot, WhatIsBelievedToBeUntouchedIsCheckedAndCopiedWhereItDiffers) {
  Rank rank;
  rank.Fill(1);
  ASSERT_TRUE(rank.Begin(1));
  ASSERT_TRUE(rank.snapshotter_->Finish());

  rank.big_[300'000] = 2;  // somebody wrote all the same
  rank.small_[3] = 2;
  ASSERT_TRUE(rank.RestoreStep(1, Belief::kUntouched).ok());

  EXPECT_TRUE(rank.IsAll(1));
}

TEST(Snapshot, NothingMoreIsCopiedOnceTheGenerationIsAborted) {
  Rank rank;
  rank.Fill(1);
  ASSERT_TRUE(rank.Begin(1));
  ASSERT_TRUE(rank.snapshotter_->Finish());
  rank.aborted = true;
  ASSERT_TRUE(rank.Begin(2));
  EXPECT_FALSE(rank.snapshotter_->Finish());
  EXPECT_EQ(rank.BufferOf(2), -1);
  EXPECT_NE(rank.BufferOf(1), -1);
}

// The copier ends the last snapshot by itself and is on its way out when the next one begins: what
// it still does must not touch the new one.
TEST(Snapshot, OneThatBeginsWhenTheLastIsJustCompleteIsWholeToo) {
  Rank rank(0, 1, 3, 100);
  for (int64_t step = 1; step <= 3000; ++step) {
    rank.Fill(static_cast<float>(step));
    ASSERT_TRUE(rank.Begin(step));
    while (rank.snapshotter_->is_running()) {
    }
    ASSERT_GE(rank.BufferOf(step), 0) << step;
    if (step < 3) continue;
    const int64_t held = step - step % 2;  // this one or the last
    ASSERT_TRUE(rank.RestoreStep(held).ok()) << step;
    ASSERT_TRUE(rank.IsAll(static_cast<float>(held)));
  }
}

// Who forgets BeforeUpdate changes what was copied and what was not yet: such a snapshot holds two
// steps, and is none. The copier itself changes the source here, between its chunks.
TEST(Snapshot, OfASourceThatChangedWhileItWasCopiedIsNotSealed) {
  for (const auto recheck : {Rank::Recheck::kAll, Rank::Recheck::kSample}) {
    Rank rank(0, 1, 3, 1'000'001, recheck);
    int64_t changed_in_sealed = 0;
    for (int64_t step = 1; step <= 64; ++step) {
      rank.Fill(static_cast<float>(step));
      int chunk = 0;
      rank.at_chunk = [&] {
        if (++chunk == 4) rank.Fill(-1);  // of four
      };
      ASSERT_TRUE(rank.Begin(step, Snapshotter::Mode::kLazy, Snapshotter::Want::kDisk));
      while (rank.snapshotter_->is_running()) {
      }
      rank.at_chunk = [] {};
      ASSERT_EQ(chunk, 5);
      if (rank.snapshotter_->Finish()) {
        ++changed_in_sealed;
        EXPECT_EQ(rank.wanted.back(), step);
        const auto& buffer = rank.buffers_[static_cast<size_t>(rank.BufferOf(step))];
        buffer.control().Unpin(BufferPin::kPersist, buffer.control().Read().turn);
      } else {
        EXPECT_EQ(rank.changed.back(), step);
        EXPECT_EQ(rank.skipped.back(), step) << "the keeper hears that it does not come";
        EXPECT_EQ(rank.BufferOf(step), -1);
      }
    }
    EXPECT_EQ(rank.changed.size() + static_cast<size_t>(changed_in_sealed), 64u);
    if (recheck == Rank::Recheck::kAll) {
      EXPECT_EQ(changed_in_sealed, 0);
    } else {
      EXPECT_GT(rank.changed.size(), 8u) << "of about 16 that a sample is taken of";
    }
  }
}

// What was copied in the call itself may change, as may what lies between the elements of a view.
TEST(Snapshot, IsSealedWhereOnlyWhatWasCopiedInTheCallChanges) {
  Rank rank(0, 1, 3, 700'001, Rank::Recheck::kAll);
  for (int64_t step = 1; step <= 20; ++step) {
    rank.Fill(static_cast<float>(step));
    rank.at_chunk = [&] { std::fill(rank.small_.begin(), rank.small_.end(), -1.0F); };
    ASSERT_TRUE(rank.Begin(step));
    while (rank.snapshotter_->is_running()) {
    }
    rank.at_chunk = [] {};
    ASSERT_TRUE(rank.snapshotter_->Finish());
    ASSERT_TRUE(rank.RestoreStep(step).ok());
    ASSERT_TRUE(rank.IsAll(static_cast<float>(step)));
  }
  EXPECT_TRUE(rank.changed.empty());
}

// Holds the copier before its first chunk, which is one of "big", until `may_go`.
struct HeldCopier {
  explicit HeldCopier(Rank& held) : rank(held) {
    rank.at_chunk = [this, trainer = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == trainer) return;
      is_held = true;
      while (!may_go) std::this_thread::yield();
    };
  }
  ~HeldCopier() {
    may_go = true;
    rank.snapshotter_.reset();  // its copier calls the hook
  }
  void Await() const {
    while (!is_held) std::this_thread::yield();
  }
  Rank& rank;
  std::atomic<bool> is_held{false}, may_go{false};
};

// All of the source is compared before the seal, but for what was announced: that has changed.
TEST(Snapshot, ARegionMayChangeOnceItIsCopiedThoughOthersAreNot) {
  for (const auto recheck : {Rank::Recheck::kAll, Rank::Recheck::kSample}) {
    Rank rank(0, 1, 3, 700'001, recheck, 900'001);
    HeldCopier copier(rank);
    rank.Fill(1);
    ASSERT_TRUE(rank.Begin(1));
    copier.Await();

    const uint32_t other = rank.snapshotter_->RegionOf("other").value();
    EXPECT_FALSE(rank.snapshotter_->Announce(other));
    rank.snapshotter_->FinishRegion(other);
    EXPECT_TRUE(rank.snapshotter_->Announce(other));
    std::fill(rank.other_.begin(), rank.other_.end(), -1.0F);
    EXPECT_FALSE(rank.snapshotter_->Announce(rank.snapshotter_->RegionOf("big").value()));

    copier.may_go = true;
    ASSERT_TRUE(rank.snapshotter_->Finish());
    EXPECT_TRUE(rank.changed.empty());
    ASSERT_TRUE(rank.RestoreStep(1).ok());
    EXPECT_TRUE(rank.IsAll(1));
  }
}

TEST(Snapshot, ARegionWhoseCopyIsHeldUpIsWaitedForUpToTheStallLimit) {
  Rank rank(0, 1, 3, 700'001, Rank::Recheck::kSample, 900'001, kShortLimit);
  HeldCopier copier(rank);
  rank.Fill(1);
  ASSERT_TRUE(rank.Begin(1));
  copier.Await();

  const uint32_t big = rank.snapshotter_->RegionOf("big").value();
  ASSERT_FALSE(rank.snapshotter_->Announce(big));
  const auto began = std::chrono::steady_clock::now();
  rank.snapshotter_->FinishRegion(big);
  EXPECT_GE(std::chrono::steady_clock::now() - began, absl::ToChronoMilliseconds(kShortLimit));

  copier.may_go = true;
  while (!rank.Begin(2)) std::this_thread::yield();  // the copier is still inside
  EXPECT_TRUE(rank.snapshotter_->Finish());
  EXPECT_EQ(rank.BufferOf(1), -1);
}

TEST(Snapshot, OfWhichEachRegionIsAnnouncedIsSealedByWhoeverCopiesTheLastChunk) {
#ifdef OUTLAST_SANITIZED
  constexpr int64_t kSteps = 10;
#else
  constexpr int64_t kSteps = 200;
#endif
  Rank rank(0, 1, 3, 700'001, Rank::Recheck::kAll, 900'001);
  for (int64_t step = 1; step <= kSteps; ++step) {
    rank.Fill(static_cast<float>(step));
    ASSERT_TRUE(rank.Begin(step));
    for (const char* name : {"other", "small", "big"}) {
      const uint32_t region = rank.snapshotter_->RegionOf(name).value();
      if (!rank.snapshotter_->Announce(region)) rank.snapshotter_->FinishRegion(region);
      auto& values = *name == 'o' ? rank.other_ : *name == 's' ? rank.small_ : rank.big_;
      std::fill(values.begin(), values.end(), -1.0F);
    }
    ASSERT_TRUE(rank.snapshotter_->Finish()) << step;
    ASSERT_TRUE(rank.RestoreStep(step).ok());
    ASSERT_TRUE(rank.IsAll(static_cast<float>(step)));
  }
  EXPECT_TRUE(rank.changed.empty());
  EXPECT_FALSE(rank.snapshotter_->RegionOf("bigger"));
}

// A copier that is held up (a page that comes from a dead file system, say) holds a step up no
// longer than the limit; what it then still copies is never sealed, and the next one waits for it.
TEST(Snapshot, IsGivenUpAtTheStallLimit) {
  Rank rank(0, 1, 3, 700'001, Rank::Recheck::kSample, 0, kShortLimit);
  rank.Fill(1);
  const auto trainer = std::this_thread::get_id();
  std::atomic<bool> is_held{false}, may_go{false};
  rank.at_chunk = [&] {
    if (std::this_thread::get_id() == trainer) return;
    is_held = true;
    while (!may_go) std::this_thread::yield();
  };
  ASSERT_TRUE(rank.Begin(1, Snapshotter::Mode::kLazy, Snapshotter::Want::kDisk));
  while (!is_held) std::this_thread::yield();

  const auto began = std::chrono::steady_clock::now();
  EXPECT_FALSE(rank.snapshotter_->Finish());
  EXPECT_GE(std::chrono::steady_clock::now() - began, absl::ToChronoMilliseconds(kShortLimit));
  EXPECT_FALSE(rank.Begin(2)) << "the copier is still inside";

  may_go = true;
  while (!rank.Begin(3)) std::this_thread::yield();
  EXPECT_TRUE(rank.snapshotter_->Finish());
  EXPECT_EQ(rank.BufferOf(1), -1);
  EXPECT_EQ(rank.skipped, std::vector<int64_t>{1});
  EXPECT_TRUE(rank.wanted.empty());
  EXPECT_GE(rank.BufferOf(3), 0);
}

// The source changes as hard as it can right after Finish: no snapshot mixes two steps.
TEST(Snapshot, NeverMixesSteps) {
  Rank rank(0, 1, 3, 300'000);
  for (int64_t step = 1; step <= 200; ++step) {
    rank.Fill(static_cast<float>(step));
    ASSERT_TRUE(rank.Begin(step));
    ASSERT_TRUE(rank.snapshotter_->Finish());
    rank.Fill(static_cast<float>(step) + 0.5f);
    std::vector<float> live = rank.big_;
    ASSERT_TRUE(rank.RestoreStep(step).ok());
    ASSERT_TRUE(rank.IsAll(static_cast<float>(step)));
    rank.big_ = live;
  }
}

}  // namespace
}  // namespace outlast
