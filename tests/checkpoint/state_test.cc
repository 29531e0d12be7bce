// States of every kind through a whole job: snapshot, restore from memory, save, restore from disk.
#include <gmock/gmock.h>

#include <numeric>
#include <random>

#include "checkpoint/overlap.h"
#include "checkpoint/packer.h"
#include "checkpoint/snapshotter.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/id.h"
#include "outlast/checkpoint/stateful.h"
#include "tests/checkpoint/trial_state.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void ComesBack(int ranks, const MakeState& make) {
  TempFolder folder;
  SaveThroughMemory(folder / "root", ranks, make);
  if (!::testing::Test::HasFatalFailure()) RestoreFromDisk(folder / "root", ranks, make);
}

MakeState Every(const std::function<void(TrialState&, int rank, int world)>& fill) {
  return [fill](int rank, int world) {
    auto state = std::make_unique<TrialState>();
    fill(*state, rank, world);
    return state;
  };
}

// pytorch#192485, torchtitan#651, safetensors#586: integers, bools and F8 broke saves or loads.
TEST(State, KeepsEveryDTypeAsScalarTensorAndNothing) {
  ComesBack(2, Every([](TrialState& state, int, int) {
              for (int i = 0; i < kDTypeCount; ++i) {
                const auto dtype = static_cast<DType>(i);
                const std::string name(NameOf(dtype));
                state.Add("tensor." + name, dtype, {3, 8});
                state.Add("none." + name, dtype, {0, 5});
                state.Add("large." + name, dtype, {100'000});
                if (BitsOf(dtype) >= 8) state.Add("scalar." + name, dtype, {});
              }
            }));
}

// pytorch#108869, #150862, #163480, #132366; orbax#1309: empty, uneven, size-1 and zero-size
// shards.
TEST(State, KeepsEmptyUnevenAndSingleShards) {
  ComesBack(4, Every([](TrialState& state, int rank, int world) {
              state.Add("six over four", DType::kF32, {6}, Slice({6}, rank, world));
              state.Add("one over four", DType::kI64, {1}, Slice({1}, rank, world));
              state.Add("leading one", DType::kBF16, {1, 9, 5}, Slice({1, 9, 5}, rank, world));
              state.Add("columns", DType::kF32, {5, 7}, Slice({5, 7}, rank, world, 1));
              state.Add("no rows", DType::kF32, {0, 5}, Slice({0, 5}, rank, world));
              state.Add("no middle", DType::kF32, {3, 0, 2}, Slice({3, 0, 2}, rank, world));
              state.Add("large", DType::kU8, {4096 * 30 + 1, 13},
                        Slice({4096 * 30 + 1, 13}, rank, world));
            }));
}

// pytorch#721, tensorizer#82: strided tensors refused, or saved as if they were packed.
TEST(State, PacksViewsThatAreNotContiguous) {
  ComesBack(2, Every([](TrialState& state, int rank, int world) {
              state.Add("transposed", DType::kF32, {700, 900}, {}, {1, 700});
              state.Add("columns of a wider one", DType::kF64, {500, 300}, {}, {512, 1});
              state.Add("every third", DType::kU8, {400'000}, {}, {3});
              state.Add("permuted", DType::kBF16, {20, 30, 40}, {}, {30, 1, 600});
              state.Add("padded rows", DType::kI16, {1000, 3, 7}, {}, {64, 7, 1});
              state.Add("small and eager", DType::kF32, {3, 4}, {}, {1, 3});
              state.Add("my rows, transposed", DType::kF32, {601, 500},
                        Slice({601, 500}, rank, world),
                        {1, Slice({601, 500}, rank, world).extent[0]});
              state.Add("written in pieces", DType::kF32, {2000, 1000}, {}, {1, 2000});
              state.Add("packed, said so", DType::kF32, {2, 1, 3}, {}, {3, 77, 1});
            }));
}

// What is strided when it is saved may be packed when it is restored, and the other way round.
TEST(State, DoesNotKeepStrides) {
  TempFolder folder;
  SaveThroughMemory(folder / "root", 2, Every([](TrialState& state, int, int) {
                      state.Add("a", DType::kF32, {300, 400}, {}, {1, 300});
                      state.Add("b", DType::kF32, {300, 400});
                    }));
  RestoreFromDisk(folder / "root", 3, Every([](TrialState& state, int rank, int world) {
                    const Box box = Slice({300, 400}, rank, world);
                    state.Add("a", DType::kF32, {300, 400}, box);
                    state.Add("b", DType::kF32, {300, 400}, box, {2, 2 * box.extent[0]});
                  }));
}

// pytorch#155192: views of one storage were doubled.
TEST(State, StoresTiedRegionsOnceAndRestoresEach) {
  TempFolder folder;
  const MakeState make = Every([](TrialState& state, int, int) {
    state.Add("wte", DType::kF32, {500, 64});
    state.Tie("lm_head", "wte");
    state.Tie("zz", "wte");
    state.Add("turned", DType::kF32, {40, 50}, {}, {1, 40});
    state.Tie("turned again", "turned");
  });
  SaveThroughMemory(folder / "root", 2, make);
  RestoreFromDisk(folder / "root", 2, make);
  const auto reader = CheckpointReader::Open(OnlyCheckpoint(folder / "root")).value();
  EXPECT_EQ(reader->manifest().bytes, (500u * 64 + 40 * 50) * 4);
  EXPECT_THAT(reader->receipts()[0].aliases,
              ElementsAre(std::pair("turned again", "turned"), std::pair("wte", "lm_head"),
                          std::pair("zz", "lm_head")));

  // A program that does not tie them gets the bytes under each name.
  OwnedState untied;
  for (const char* name : {"lm_head", "wte", "zz"}) untied.AddZeros(name, DType::kF32, {500, 64});
  ASSERT_TRUE(reader->ReadState(untied.view(), Strictness::kMatching).ok());
  EXPECT_TRUE(std::ranges::equal(untied.view().regions[0].bytes, untied.view().regions[2].bytes));
}

// The last stage of a pipeline ties two names, the first one holds one of them alone.
TEST(State, KeepsWhatIsTiedOnOneRankAndNotOnAnother) {
  TempFolder folder;
  const MakeState make = Every([](TrialState& state, int rank, int) {
    if (rank == 0) {
      state.Add("head", DType::kF32, {50});
      state.Tie("wte", "head");
    } else {
      // The same bytes as rank 0 has under that name.
      state.Add("head", DType::kF32, {50});
      state.Tie("wte", "head");
      Region own = state.view().regions[1];
      state.view().regions.pop_back();
      state.view().regions[0] = own;
    }
  });
  SaveThroughMemory(folder / "root", 2, make);
  RestoreFromDisk(folder / "root", 2, make);
}

TEST(State, HoldsOtherNamesOnEachRank) {
  const MakeState make = Every([](TrialState& state, int rank, int world) {
    for (int stage = 0; stage < 6; ++stage) {
      if (stage % world == rank)
        state.Add("stage" + std::to_string(stage), DType::kF32, {stage + 1, 100});
    }
  });
  TempFolder folder;
  SaveThroughMemory(folder / "root", 3, make);
  for (const int world : {3, 1, 2}) RestoreFromDisk(folder / "root", world, make);
}

TEST(State, KeepsAnyNameUpToSixteenKiB) {
  ComesBack(2, Every([](TrialState& state, int, int) {
              for (const std::string& name :
                   {std::string("a/b/c.weight"), std::string("../up"), std::string("/abs"),
                    std::string("wörter \"und\\mehr\"\n\t\x01 \xf0\x9f\x8e\x89"),
                    std::string(10'000, 'k'), std::string(kMaxNameBytes, 'n'), std::string(" "),
                    std::string("w#1"), std::string("w"), std::string("__metadata_")}) {
                state.Add(name, DType::kF32, {7, 11});
              }
            }));
}

TEST(State, RefusesTheNameOfTheFormatsMetadata) {
  TrialState state;
  state.Add("__metadata__", DType::kF32, {1});
  EXPECT_THAT(std::string(MessageOf(state.view().Validate())), HasSubstr("__metadata__"));
}

TEST(State, KeepsFiftyThousandTinyTensors) {
  ComesBack(2, Every([](TrialState& state, int, int) {
              for (int i = 0; i < 50'000; ++i)
                state.Add("layers." + std::to_string(i) + ".bias", DType::kF32, {i % 5});
            }));
}

// --- Past 4 GiB

TEST(CopyPlan, ReachesPastFourGiB) {
  constexpr int64_t kRows = int64_t{5} << 10, kColumns = int64_t{1} << 20;
  for (const Shape& strides : {Shape{}, Shape{1, kRows}}) {
    // Never touched: a plan is made from sizes alone.
    static std::byte nowhere;
    Region region{"w", DType::kU8, {kRows, kColumns}, {}, {kRows, kColumns}, {}};
    region.strides = strides;
    region.bytes = {&nowhere, size_t{kRows} * kColumns};
    const StateView state{{region}, {}};
    const RankTable table{{{"w", DType::kU8, region.global, {{0, {{0, 0}, region.extent}}}}}, {}};
    const Plan plan = MakePlan(MergeTables(std::vector{table}).value()).value();
    const Assignment assignment = AssignmentOf(plan, 0).value();
    EXPECT_EQ(assignment.data_bytes, uint64_t{5} << 30);
    const BufferLayout layout{.image_bytes = assignment.image_bytes(), .extra_capacity = 64};
    const CopyPlan copy = MakeCopyPlan(assignment, layout, state).value();
    uint64_t at = layout.image_offset() + assignment.header.size(), bytes = 0;
    for (const auto& chunk : copy.chunks) {
      for (const CopyPiece& piece : chunk) {
        ASSERT_EQ(piece.to, at);
        ASSERT_EQ(piece.from, bytes);
        at += piece.bytes;
        bytes += piece.bytes;
      }
    }
    EXPECT_EQ(bytes, uint64_t{5} << 30);
  }
}

// A sparse shard of 5 GiB: only the chunks that hold wanted bytes are read, past 4 GiB too.
TEST(Reader, ReadsPastFourGiBOfASparseShard) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  constexpr int64_t kRows = int64_t{5} << 10, kColumns = int64_t{1} << 20;
  const RankTable table{{{"w", DType::kU8, {kRows, kColumns}, {{0, {{0, 0}, {kRows, kColumns}}}}}},
                        {}};
  const Plan plan = MakePlan(MergeTables(std::vector{table}).value()).value();
  const Assignment assignment = AssignmentOf(plan, 0).value();
  const std::string checkpoint = root->NewCheckpoint(2).value();
  const std::string path = root->PathOf(checkpoint) + "/" + ShardName(0);
  WriteFileText(path, assignment.header);
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(assignment.image_bytes())), 0);
  // A mark in row 4500, which begins past 4 GiB.
  const uint64_t mark = assignment.header.size() + uint64_t{4500} * kColumns + 17;
  {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(mark));
    file.put('\x5a');
  }
  Receipt receipt;
  receipt.job = root->job();
  receipt.run = Id128::FromName("run");
  receipt.claim = root->claim();
  receipt.checkpoint = checkpoint;
  receipt.step = 2;
  receipt.generation = 1;
  receipt.plan = ToHex(plan.digest);
  receipt.boot_id = BootId();
  receipt.tensors = SavedBoxesOf(assignment);
  const std::vector<std::byte> zeros(kChunkBytes);
  receipt.file = ShardFile{ShardName(0), assignment.image_bytes(), 0, kChunkBytes, {}};
  const uint64_t chunks = (assignment.image_bytes() + kChunkBytes - 1) / kChunkBytes;
  receipt.file->chunks.assign(chunks, Crc32c(zeros));
  const auto set = [&](uint64_t chunk, std::vector<std::byte> content) {
    receipt.file->chunks[chunk] = Crc32c(content);
  };
  std::vector<std::byte> first(kChunkBytes);
  std::memcpy(first.data(), assignment.header.data(), assignment.header.size());
  set(0, first);
  std::vector<std::byte> marked(kChunkBytes);
  marked[mark % kChunkBytes] = std::byte{0x5a};
  set(mark / kChunkBytes, marked);
  set(chunks - 1, std::vector<std::byte>((assignment.image_bytes() - 1) % kChunkBytes + 1));
  ASSERT_TRUE(WriteReceipt(root->PathOf(checkpoint), receipt).ok());
  Manifest manifest = root->ComposeManifest(checkpoint, 1).value();
  manifest.committed_by = {"0", root->claim(), 1};
  ASSERT_TRUE(root->Commit(manifest).ok());

  const auto reader = CheckpointReader::Open(root->PathOf(checkpoint)).value();
  OwnedState rows, columns;
  rows.AddZeros("w", DType::kU8, {kRows, kColumns}, Box{{4499, 0}, {3, kColumns}});
  ASSERT_TRUE(reader->ReadRegion(rows.view().regions[0]).ok());
  EXPECT_EQ(rows.view().regions[0].bytes[kColumns + 17], std::byte{0x5a});
  EXPECT_EQ(reader->bytes_read(), 4u * kChunkBytes);  // three rows, and the header pushes them on
  // A column of rows that are a chunk long: a chunk a row, and no more.
  columns.AddZeros("w", DType::kU8, {kRows, kColumns}, Box{{4490, 10}, {20, 8}});
  const uint64_t before = reader->bytes_read();
  ASSERT_TRUE(reader->ReadRegion(columns.view().regions[0]).ok());
  EXPECT_EQ(columns.view().regions[0].bytes[10 * 8 + 7], std::byte{0x5a});
  EXPECT_LE(reader->bytes_read() - before, 21u * kChunkBytes);
}

// --- Refusals

std::string WhyRefused(std::vector<Region> regions) {
  return std::string(MessageOf(StateView{std::move(regions), {}}.Validate()));
}

TEST(State, RefusesRegionsThatShareAPartOfTheirMemory) {
  std::vector<std::byte> memory(4096);
  const std::span all(memory);
  const auto floats = [&](std::string_view name, size_t from, const Shape& shape,
                          const Shape& strides = {}) {
    return Region{name,
                  DType::kF32,
                  shape,
                  {},
                  shape,
                  all.subspan(from, MemoryBytesOf(DType::kF32, shape, strides).value()),
                  RegionKind::kStable,
                  strides};
  };
  const auto names_both = AllOf(HasSubstr("'a'"), HasSubstr("'b'"), HasSubstr("shares memory"));
  EXPECT_THAT(WhyRefused({floats("a", 0, {10}), floats("b", 36, {10})}), names_both);
  EXPECT_THAT(WhyRefused({floats("b", 8, {2}), floats("a", 0, {10})}), names_both);
  EXPECT_EQ(WhyRefused({floats("a", 0, {10}), floats("b", 40, {10})}), "");
  EXPECT_EQ(WhyRefused({floats("a", 0, {10}), floats("b", 0, {10})}), "");  // tied
  // One memory, seen otherwise.
  EXPECT_THAT(WhyRefused({floats("a", 0, {4, 4}), floats("b", 0, {16})}), names_both);
  EXPECT_THAT(WhyRefused({floats("a", 0, {4, 4}), floats("b", 0, {4, 4}, {1, 4})}), names_both);
  Region eager = floats("b", 0, {10});
  eager.kind = RegionKind::kEager;
  EXPECT_THAT(WhyRefused({floats("a", 0, {10}), eager}), names_both);
  // Columns of one matrix lie between each other, and share nothing.
  EXPECT_EQ(WhyRefused({floats("a", 0, {9, 3}, {8, 1}), floats("b", 12, {9, 5}, {8, 1})}), "");
  EXPECT_THAT(WhyRefused({floats("a", 0, {9, 3}, {8, 1}), floats("b", 8, {9, 5}, {8, 1})}),
              names_both);
  // A row in a gap, and one that is not.
  EXPECT_EQ(WhyRefused({floats("a", 0, {4, 2}, {16, 1}), floats("b", 8, {14})}), "");
  EXPECT_THAT(WhyRefused({floats("a", 0, {4, 2}, {16, 1}), floats("b", 8, {15})}), names_both);
}

TEST(State, RefusesStridesThatCannotBe) {
  std::vector<std::byte> memory(4096);
  const auto why = [&](DType dtype, const Shape& shape, const Shape& strides, size_t bytes = 64) {
    return WhyRefused({{"w",
                        dtype,
                        shape,
                        {},
                        shape,
                        std::span(memory).first(bytes),
                        RegionKind::kStable,
                        strides}});
  };
  EXPECT_EQ(why(DType::kF32, {4, 3}, {4, 1}, 60), "");
  EXPECT_THAT(why(DType::kF32, {4, 3}, {4, 1}, 64), HasSubstr("60 wanted"));
  EXPECT_THAT(why(DType::kF32, {4, 3}, {2, 1}), HasSubstr("two elements in one place"));
  EXPECT_THAT(why(DType::kF32, {4, 4}, {0, 1}), HasSubstr("two elements in one place"));
  EXPECT_THAT(why(DType::kF32, {4, 4}, {-4, 1}), HasSubstr("none negative"));
  EXPECT_THAT(why(DType::kF32, {4, 4}, {1}), HasSubstr("one stride a dimension"));
  EXPECT_THAT(why(DType::kF4, {4, 4}, {8, 1}), HasSubstr("packed memory wanted"));
  EXPECT_THAT(why(DType::kF32, {4, 4}, {int64_t{1} << 62, 1}), HasSubstr("2^60"));
  EXPECT_EQ(why(DType::kF32, {0, 4}, {-1, 1}, 0), "");  // no elements: nothing to lay out
}

TEST(Footprint, KnowsWhatABruteForceKnows) {
  const uint64_t seed = RandomU64();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::vector<std::byte> memory(1 << 12);
  const auto any = [&] {
    Region region;
    region.dtype = random() % 2 == 0 ? DType::kU8 : DType::kI16;
    Shape extent = Shape::Zeros(3), strides = Shape::Zeros(3);
    int64_t stride = 1;
    for (const int i : random() % 2 == 0 ? std::array{2, 1, 0} : std::array{0, 2, 1}) {
      extent.set(i, static_cast<int64_t>(1 + random() % 4));
      strides.set(i, stride + static_cast<int64_t>(random() % 3));
      stride = strides[i] * extent[i];
    }
    region.global = region.extent = extent;
    region.strides = strides;
    const auto bytes = MemoryBytesOf(region.dtype, extent, strides).value();
    region.bytes = std::span(memory).subspan(random() % 300, bytes);
    return region;
  };
  const auto bytes_of = [&](const Region& region) {
    std::vector<bool> covered(memory.size());
    const size_t size = static_cast<size_t>(BitsOf(region.dtype)) / 8;
    const auto base = static_cast<size_t>(region.bytes.data() - memory.data());
    for (int64_t i = 0; i < region.extent[0]; ++i) {
      for (int64_t j = 0; j < region.extent[1]; ++j) {
        for (int64_t k = 0; k < region.extent[2]; ++k) {
          const auto at = static_cast<size_t>(i * region.strides[0] + j * region.strides[1] +
                                              k * region.strides[2]);
          for (size_t b = 0; b < size; ++b) covered[base + at * size + b] = true;
        }
      }
    }
    return covered;
  };
  for (int round = 0; round < 3000; ++round) {
    const Region a = any(), b = any();
    const auto in_a = bytes_of(a), in_b = bytes_of(b);
    bool wanted = false;
    for (size_t i = 0; i < memory.size(); ++i) wanted = wanted || (in_a[i] && in_b[i]);
    uint64_t budget = 1 << 20;
    ASSERT_EQ(ShareBytes(Footprint(a), Footprint(b), budget), wanted)
        << a.extent.text() << a.strides.text() << " and " << b.extent.text() << b.strides.text();
  }
}

// Every stretch, from every place, both ways.
TEST(Packer, MovesAnyStretch) {
  const Shape extent{3, 4, 5}, strides{1, 15, 3};  // elements of 2 bytes
  std::vector<std::byte> memory(MemoryBytesOf(DType::kI16, extent, strides).value());
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i + 1);
  const Box held{{10, 10, 10}, extent}, box{{11, 10, 12}, {2, 4, 3}};
  const Packer packer(DType::kI16, held, strides, box);
  std::vector<std::byte> wanted;
  for (int64_t i = 1; i < 3; ++i) {
    for (int64_t j = 0; j < 4; ++j) {
      for (int64_t k = 2; k < 5; ++k) {
        const auto at = static_cast<size_t>(2 * (i * 1 + j * 15 + k * 3));
        wanted.insert(wanted.end(), {memory[at], memory[at + 1]});
      }
    }
  }
  for (size_t from = 0; from <= wanted.size(); ++from) {
    for (size_t bytes = 0; from + bytes <= wanted.size(); ++bytes) {
      std::vector<std::byte> packed(bytes);
      packer.Gather(memory.data(), from, packed);
      ASSERT_TRUE(std::ranges::equal(packed, std::span(wanted).subspan(from, bytes)));
      std::vector<std::byte> back(memory.size());
      packer.Scatter(packed, from, back.data());
      std::vector<std::byte> again(bytes);
      packer.Gather(back.data(), from, again);
      ASSERT_EQ(again, packed);
      ASSERT_EQ(std::ranges::count_if(back, [](std::byte b) { return b != std::byte{0}; }),
                std::ranges::count_if(packed, [](std::byte b) { return b != std::byte{0}; }));
    }
  }
}

// --- Extras

TEST(Extras, FillTheRoomThatWasAskedForAndNoMore) {
  TempFolder folder;
  const auto run = outlast::Run::Join().value();
  TrialState state;
  state.Add("w", DType::kF32, {4});
  const auto checkpoints =
      Checkpointer::Open(*run, {.uri = folder / "root", .extras_bytes = 1 << 20}).value();
  const std::string key = "random";
  state.SetTo(1);
  state.view().extras = {{key, std::string((1 << 20) - 8 - key.size(), '\xff')}};
  EXPECT_TRUE(checkpoints->SaveIfDue(1, state.view()).ok());
  EXPECT_TRUE(checkpoints->Finish(1, state.view()).ok());
  const auto reader = CheckpointReader::Open(OnlyCheckpoint(folder / "root")).value();
  EXPECT_EQ(reader->ExtrasOf(0).value(), state.view().extras);

  state.view().extras[key] += std::string(8192, 'x');
  const absl::Status full = checkpoints->SaveIfDue(2, state.view());
  EXPECT_EQ(full.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(MessageOf(full)), HasSubstr("extras_bytes"));
}

TEST(Extras, AreCapped) {
  StateView state;
  state.extras = {{"a", std::string(kMaxExtrasBytes - 1, 'x')}};
  EXPECT_TRUE(state.Validate().ok());
  state.extras["a"] += 'x';
  EXPECT_THAT(std::string(MessageOf(state.Validate())), HasSubstr("at most 16777216"));
  state.extras = {{std::string(kMaxNameBytes + 1, 'k'), ""}};
  EXPECT_THAT(std::string(MessageOf(state.Validate())), HasSubstr("a key of 16385 bytes"));
  state.extras = {{"\xff", ""}};
  EXPECT_FALSE(state.Validate().ok());
  const auto run = outlast::Run::Join().value();
  EXPECT_THAT(
      std::string(MessageOf(
          Checkpointer::Open(*run, {.uri = "/tmp/x", .extras_bytes = (16 << 20) + 1}).status())),
      HasSubstr("extras_bytes"));
}

// --- Objects

class Layer : public Stateful {
 public:
  explicit Layer(size_t size) : weights(size) {}
  void Describe(StatePart& part) override {
    const Shape shape{static_cast<int64_t>(weights.size())};
    part.Add({"weight", DType::kF32, shape, {}, shape, std::as_writable_bytes(std::span(weights))});
    part.AddExtra("seen", "{\"batches\":" + std::to_string(seen) + "}");
  }
  absl::Status OnRestored(int64_t step, const Extras& extras) override {
    restored_step = step;
    restored = extras;
    return fails ? absl::InternalError("no") : absl::OkStatus();
  }
  std::vector<float> weights;
  int seen = 0;
  bool fails = false;
  int64_t restored_step = 0;
  Extras restored;
};

TEST(StateViewBuilder, GathersObjectsUnderTheirPrefixes) {
  Layer model(3), head(2), bare(1);
  StateViewBuilder builder;
  builder.Add("model", model);
  builder.Add("model.head", head);
  builder.Add("", bare);
  model.seen = 7;
  const StateView& view = builder.View();
  ASSERT_EQ(view.regions.size(), 3u);
  EXPECT_EQ(view.regions[0].name, "model.weight");
  EXPECT_EQ(view.regions[1].name, "model.head.weight");
  EXPECT_EQ(view.regions[2].name, "weight");
  EXPECT_TRUE(view.Validate().ok());
  const Extras first = view.extras;
  EXPECT_EQ(first.at("model.seen"), "{\"batches\":7}");

  const char* before = view.regions[1].name.data();
  builder.View();
  EXPECT_EQ(view.regions[1].name.data(), before) << "names stay where they are";

  EXPECT_TRUE(builder.OnRestored(0, {}).ok());
  EXPECT_EQ(model.restored_step, 0) << "nothing was restored";
  ASSERT_TRUE(builder.OnRestored(12, first).ok());
  EXPECT_EQ(model.restored_step, 12);
  EXPECT_EQ(model.restored, (Extras{{"seen", "{\"batches\":7}"}}));
  EXPECT_EQ(head.restored, (Extras{{"seen", "{\"batches\":0}"}}));
  EXPECT_EQ(bare.restored, (Extras{{"seen", "{\"batches\":0}"}}));

  head.fails = true;
  EXPECT_THAT(std::string(MessageOf(builder.OnRestored(12, first))), HasSubstr("model.head"));
}

TEST(StateViewBuilder, ComesBackThroughACheckpoint) {
  TempFolder folder;
  for (const int64_t last : {3, 6}) {
    const auto run = outlast::Run::Join().value();
    const auto checkpoints = Checkpointer::Open(*run, {.uri = folder / "root"}).value();
    Layer model(50'000), optimizer(70'000);
    StateViewBuilder state;
    state.Add("model", model);
    state.Add("optimizer", optimizer);
    const absl::Status status = run->ForEachGeneration([&](Generation&) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(int64_t step, checkpoints->Restore(state.View()));
      OUTLAST_RETURN_IF_ERROR(state.OnRestored(step, checkpoints->restored_extras()));
      EXPECT_EQ(step, last - 3);
      EXPECT_EQ(optimizer.weights.back(), static_cast<float>(step));
      EXPECT_EQ(model.restored.contains("seen"), step > 0);
      if (step > 0) {
        EXPECT_EQ(model.restored["seen"], "{\"batches\":3}");
      }
      for (; step < last; ++step) {
        OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
        std::ranges::fill(optimizer.weights, static_cast<float>(step + 1));
        model.seen = static_cast<int>(step + 1);
        OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(step + 1, state.View()));
      }
      return checkpoints->Finish(last, state.View());
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace outlast
