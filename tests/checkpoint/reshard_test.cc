// Any world from any other.
#include <gmock/gmock.h>

#include <cmath>

#include "checkpoint/widen.h"
#include "tests/checkpoint/trial_state.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// What each rank of a world holds of a 10x20 tensor, and how it lies in its memory.
struct Layout {
  std::string name;
  std::vector<Box> boxes;
  bool is_transposed = false;
};

std::vector<Layout> Layouts() {
  const auto rows = [](std::vector<int64_t> counts) {
    std::vector<Box> boxes;
    int64_t begin = 0;
    for (const int64_t count : counts) {
      boxes.push_back({{begin, 0}, {count, 20}});
      begin += count;
    }
    return boxes;
  };
  const Box whole{{0, 0}, {10, 20}};
  const Box left{{0, 0}, {10, 12}}, right{{0, 12}, {10, 8}};
  return {
      {"whole", {whole}},
      {"rows", rows({5, 5})},
      {"uneven rows", rows({2, 1, 3, 3, 1})},
      {"rows, some empty", rows({4, 0, 4, 2, 0})},
      {"columns", {{{0, 0}, {10, 7}}, {{0, 7}, {10, 7}}, {{0, 14}, {10, 6}}}},
      {"replicated", {whole, whole, whole}},
      {"blocks", {{{0, 0}, {5, 10}}, {{0, 10}, {5, 10}}, {{5, 0}, {5, 10}}, {{5, 10}, {5, 10}}}},
      {"two replicas of columns", {left, right, left, right}},
      {"two replicas of rows, the other way",
       {{{0, 0}, {3, 20}}, {{0, 0}, {3, 20}}, {{3, 0}, {7, 20}}, {{3, 0}, {7, 20}}}},
      {"transposed columns", {{{0, 0}, {10, 7}}, {{0, 7}, {10, 13}}}, true},
      {"transposed rows", rows({2, 1, 3, 3, 1}), true},
  };
}

MakeState StateOf(const Layout& layout) {
  return [layout](int rank, int) {
    auto state = std::make_unique<TrialState>();
    const Box box = layout.boxes[static_cast<size_t>(rank)];
    const Shape strides = layout.is_transposed ? Shape{1, box.extent[0] + 1} : Shape{};
    state->Add("w", DType::kF32, {10, 20}, box, strides);
    state->Add("everywhere", DType::kI64, {3});
    return state;
  };
}

// Case D24: DCP's test_file_system_checkpoint_cpu.py, with more layouts; pytorch#132366 and
// radixark/Megatron-LM#66 lost uneven ones.
TEST(Reshard, EveryLayoutPairIsEqual) {
  TempFolder folder;
  int saved = 0;
  for (const Layout& from : Layouts()) {
    SCOPED_TRACE("from " + from.name);
    const std::string path = folder / std::to_string(saved++);
    SaveThroughMemory(path, static_cast<int>(from.boxes.size()), StateOf(from));
    if (HasFailure()) return;
    const auto reader = CheckpointReader::Open(OnlyCheckpoint(path)).value();
    EXPECT_EQ(reader->manifest().bytes, 10u * 20 * 4 + 3 * 8) << "each byte is written once";
    for (const Layout& to : Layouts()) {
      for (size_t rank = 0; rank < to.boxes.size(); ++rank) {
        const auto state = StateOf(to)(static_cast<int>(rank), 0);
        const auto report = reader->ReadState(state->view());
        ASSERT_TRUE(report.ok()) << to.name << ": " << report.status();
        EXPECT_EQ(state->Difference(1), "") << to.name << ", rank " << rank;
      }
    }
  }
}

TEST(Reshard, ChangesTheWorldOfAWholeJob) {
  const MakeState make = [](int rank, int world) {
    auto state = std::make_unique<TrialState>();
    state->Add("rows", DType::kF32, {601, 300}, Slice({601, 300}, rank, world));
    state->Add("columns", DType::kBF16, {300, 601}, Slice({300, 601}, rank, world, 1));
    const Box box = Slice({401, 77}, rank, world);
    state->Add("transposed", DType::kF32, {401, 77}, box, {1, box.extent[0]});
    state->Add("everywhere", DType::kF64, {40'000});
    state->Add("scalar", DType::kI32, {});
    return state;
  };
  TempFolder folder;
  SaveThroughMemory(folder / "root", 4, make);
  for (const int world : {1, 2, 3, 6, 4}) {
    RestoreFromDisk(
        folder / "root", world, make, [&](outlast::Run& run, Checkpointer& checkpoints) {
          EXPECT_EQ(checkpoints.restored_extras().at("step"), "1");
          // Nothing that a vanished rank had put there is lost.
          EXPECT_EQ(checkpoints.saved_extras().size(), world == 4 ? 0u : 4u) << run.rank();
        });
  }
}

TEST(Reshard, GivesAGrownWorldTheExtrasOfRankZero) {
  TempFolder folder;
  const auto make = [](int rank, int) {
    auto state = std::make_unique<TrialState>();
    state->Add("w", DType::kF32, {8});
    state->view().extras["rank"] = std::to_string(rank);
    return state;
  };
  SaveThroughMemory(folder / "root", 2, make);
  RestoreFromDisk(folder / "root", 3, make, [](outlast::Run& run, Checkpointer& checkpoints) {
    const std::string wanted = run.rank() == 1 ? "1" : "0";
    EXPECT_EQ(checkpoints.restored_extras().at("rank"), wanted);
    EXPECT_EQ(checkpoints.saved_extras().at(1).at("rank"), "1");
  });
}

// A rank reads the chunks that hold its own bytes, and no others.
TEST(Reshard, ReadsOnlyWhatOverlaps) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  const Shape global{64, 1 << 18};  // 64 rows of 1 MiB
  std::vector<OwnedState> ranks(4);
  for (int rank = 0; rank < 4; ++rank)
    ranks[static_cast<size_t>(rank)].Add("w", DType::kF32, global, Slice(global, rank, 4));
  const std::string name = Save(*root, 1, ranks).value();
  uint64_t all = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const auto reader = CheckpointReader::Open(root->PathOf(name)).value();
    OwnedState mine, wanted;
    mine.AddZeros("w", DType::kF32, global, Slice(global, rank, 3));
    wanted.Add("w", DType::kF32, global, Slice(global, rank, 3));
    ASSERT_TRUE(reader->ReadState(mine.view()).ok());
    EXPECT_EQ(mine.Digest(), wanted.Digest());
    // A box begins and ends inside a chunk, in at most two files.
    EXPECT_LE(reader->bytes_read(), mine.view().regions[0].bytes.size() + (4u << 20)) << rank;
    all += reader->bytes_read();
  }
  EXPECT_LT(all, (64u << 20) + 3 * (4u << 20));
  // 16 columns of each row: a chunk or two a row of 1 MiB, if only a few rows are asked for.
  const auto reader = CheckpointReader::Open(root->PathOf(name)).value();
  OwnedState columns;
  columns.AddZeros("w", DType::kF32, global, Box{{20, 1 << 17}, {4, 16}});
  ASSERT_TRUE(reader->ReadState(columns.view()).ok());
  EXPECT_LE(reader->bytes_read(), 4u << 20);
}

// The other half of case D24.
TEST(Reshard, WidensWhereItMayAndNeverNarrows) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  std::vector<OwnedState> ranks(1);
  ranks[0].Add("w", DType::kBF16, {400, 500});
  ranks[0].Add("n", DType::kI32, {3});
  const auto reader = CheckpointReader::Open(root->PathOf(Save(*root, 1, ranks).value())).value();
  OwnedState wide;
  wide.AddZeros("w", DType::kF32, {400, 500}, Box{{7, 3}, {300, 400}});
  wide.AddZeros("n", DType::kI64, {3});
  EXPECT_THAT(std::string(MessageOf(reader->ReadState(wide.view()).status())),
              AllOf(HasSubstr("w: F32 [400, 500], saved BF16 [400, 500]"), HasSubstr("n: I64")));
  const auto read = [&](OwnedState& state) {
    return reader->ReadState(state.view(), Strictness::kStrict, IoMode::kDirect, Widening::kAllow)
        .status();
  };
  ASSERT_TRUE(read(wide).ok());
  // A BF16 is the upper half of its F32.
  const auto saved = ranks[0].view().regions[0].bytes;
  const auto found = wide.view().regions[0].bytes;
  for (size_t row = 0; row < 300; ++row) {
    for (size_t column = 0; column < 400; ++column) {
      const size_t from = ((row + 7) * 500 + column + 3) * 2, to = (row * 400 + column) * 4;
      ASSERT_EQ(found[to], std::byte{0});
      ASSERT_EQ(found[to + 2], saved[from]);
      ASSERT_EQ(found[to + 3], saved[from + 1]);
    }
  }
  for (const DType narrow : {DType::kF16, DType::kU8, DType::kF8E4M3}) {
    OwnedState state;
    state.AddZeros("w", narrow, {400, 500});
    state.AddZeros("n", DType::kI32, {3});
    EXPECT_EQ(read(state).code(), absl::StatusCode::kInvalidArgument) << NameOf(narrow);
  }
}

template <typename To>
std::vector<To> Widened(DType from, DType to, std::vector<uint16_t> values) {
  std::vector<std::byte> bytes;
  for (const uint16_t value : values) {
    bytes.push_back(static_cast<std::byte>(value));
    if (BitsOf(from) == 16) bytes.push_back(static_cast<std::byte>(value >> 8));
  }
  std::vector<To> result(values.size());
  WidenerOf(from, to)(bytes.data(), reinterpret_cast<std::byte*>(result.data()), values.size());
  return result;
}

// Values by the formats' definitions: IEEE 754 binary16; OCP 8-bit floating point, tables 1 and 2.
TEST(Widen, KeepsEveryValue) {
  EXPECT_THAT(Widened<float>(DType::kF16, DType::kF32,
                             {0x3c00, 0xc000, 0x7bff, 0x0001, 0x7c00, 0x8000, 0x0400}),
              ElementsAre(1, -2, 65504, 0x1p-24f, INFINITY, 0, 0x1p-14f));
  EXPECT_TRUE(std::signbit(Widened<float>(DType::kF16, DType::kF32, {0x8000})[0]));
  EXPECT_TRUE(std::isnan(Widened<float>(DType::kF16, DType::kF32, {0x7e01})[0]));
  EXPECT_THAT(Widened<double>(DType::kF8E4M3, DType::kF64, {0x38, 0x7e, 0x01, 0xb8, 0x08}),
              ElementsAre(1, 448, 0x1p-9, -1, 0x1p-6));
  EXPECT_TRUE(std::isnan(Widened<float>(DType::kF8E4M3, DType::kF32, {0xff})[0]));
  EXPECT_THAT(Widened<float>(DType::kF8E5M2, DType::kF32, {0x3c, 0x7b, 0x01, 0xfc}),
              ElementsAre(1, 57344, 0x1p-16f, -INFINITY));
  EXPECT_THAT(Widened<int64_t>(DType::kI8, DType::kI64, {0x80, 0x7f, 0xff}),
              ElementsAre(-128, 127, -1));
  EXPECT_THAT(Widened<int32_t>(DType::kU16, DType::kI32, {0xffff, 1}), ElementsAre(65535, 1));
  for (const auto& [from, to] : {std::pair(DType::kF32, DType::kF16),
                                 {DType::kF32, DType::kI64},
                                 {DType::kI32, DType::kU64},
                                 {DType::kF32, DType::kF32},
                                 {DType::kBool, DType::kU16},
                                 {DType::kF16, DType::kBF16}}) {
    EXPECT_EQ(WidenerOf(from, to), nullptr) << NameOf(from) << " to " << NameOf(to);
  }
}

// --- A program whose names changed (case O19, pytorch#137327), over two ranks

// Rank 0 asks for what was saved, rank 1 for something else: nobody's bytes change.
TEST(RestoreMatch, ChangesNothingBeforeAllRanksMatch) {
  TempFolder folder;
  SaveThroughMemory(folder / "root", 2, [](int rank, int) {
    auto state = std::make_unique<TrialState>();
    state->Add("everywhere", DType::kF32, {10});
    state->Add("of" + std::to_string(rank), DType::kF32, {10});
    return state;
  });
  const testing::LocalWorldResult result =
      RunWorld(2, 0, [&](testing::LocalWorld&, outlast::Run& run) -> absl::Status {
        TrialState state;
        state.Add("everywhere", DType::kF32, {10});
        if (run.rank() == 0) state.Add("of0", DType::kF32, {10});
        if (run.rank() == 1) state.Add("new", DType::kI64, {2});
        if (run.rank() == 1) state.Add("of1", DType::kF64, {10});
        state.SetTo(50);
        OUTLAST_ASSIGN_OR_RETURN(const auto checkpoints,
                                 Checkpointer::Open(run, {.uri = folder / "root"}));
        return run.ForEachGeneration([&](Generation&) -> absl::Status {
          const absl::Status strict = checkpoints->Restore(state.view()).status();
          EXPECT_EQ(strict.code(), absl::StatusCode::kInvalidArgument) << strict;
          EXPECT_THAT(std::string(MessageOf(strict)),
                      AllOf(HasSubstr("missing in the checkpoint: new"),
                            HasSubstr("mismatched: of1: F64 [10], saved F32 [10]")));
          EXPECT_EQ(state.Difference(50), "") << "rank " << run.rank();
          return absl::OkStatus();
        });
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(RestoreMatch, TakesWhatMatchesIfItIsAskedTo) {
  TempFolder folder;
  SaveThroughMemory(folder / "root", 2, [](int, int) {
    auto state = std::make_unique<TrialState>();
    state->Add("a", DType::kF32, {10});
    state->Add("b", DType::kF16, {10});
    state->Add("gone", DType::kF32, {1});
    return state;
  });
  const testing::LocalWorldResult result =
      RunWorld(3, 0, [&](testing::LocalWorld&, outlast::Run& run) -> absl::Status {
        TrialState same, other;
        same.Add("a", DType::kF32, {10}, Slice({10}, run.rank(), 3));
        other.Add("new", DType::kI64, {2});
        other.Add("b", DType::kF32, {10});
        same.SetTo(50);
        other.SetTo(50);
        StateView state = same.view();
        state.regions.insert(state.regions.end(), other.view().regions.begin(),
                             other.view().regions.end());
        OUTLAST_ASSIGN_OR_RETURN(const auto checkpoints,
                                 Checkpointer::Open(run, {.uri = folder / "root"}));
        return run.ForEachGeneration([&](Generation&) -> absl::Status {
          OUTLAST_ASSIGN_OR_RETURN(
              const int64_t step,
              checkpoints->Restore(state, {.strictness = Strictness::kMatching}));
          EXPECT_EQ(step, 1);
          EXPECT_EQ(same.Difference(1), "");
          EXPECT_EQ(other.Difference(50), "") << "what does not match stays";
          const MatchReport& report = checkpoints->restored_report();
          EXPECT_THAT(report.missing, ElementsAre("new"));
          EXPECT_THAT(report.unexpected, ElementsAre("gone"));
          EXPECT_THAT(report.mismatched, ElementsAre("b: F32 [10], saved F16 [10]"));
          return absl::OkStatus();
        });
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

}  // namespace
}  // namespace outlast
