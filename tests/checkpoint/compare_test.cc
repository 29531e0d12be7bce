#include "checkpoint/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "checkpoint/tensor_pieces.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

template <typename T>
std::vector<std::byte> Bytes(std::initializer_list<T> values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.begin(), bytes.size());
  return bytes;
}

// The one difference between two elements.
double Distance(DType dtype, std::vector<std::byte> a, std::vector<std::byte> b) {
  const ValueDifference difference = CompareValues(dtype, a, b);
  EXPECT_EQ(difference.elements, 1u);
  return difference.max_abs.value_or(-1);
}

TEST(CompareValues, CountsElementsAndTakesTheLargestDistance) {
  const ValueDifference difference =
      CompareValues(DType::kF32, Bytes<float>({1, 2, 3, 4}), Bytes<float>({1, 2.5f, 3, 1}));
  EXPECT_EQ(difference.elements, 2u);
  EXPECT_EQ(difference.max_abs, 3.0);
  EXPECT_EQ(Distance(DType::kF64, Bytes<double>({1e300}), Bytes<double>({-1e300})), 2e300);
  EXPECT_EQ(Distance(DType::kC64, Bytes<float>({1, 2}), Bytes<float>({1, 7})), 5.0);
}

// Bit patterns from IEEE 754 (binary16), bfloat16's (the upper half of a binary32), and the OCP
// 8-bit specification's tables: E4M3 0x7e is 448, E5M2 0x7b is 57344.
TEST(CompareValues, KnowsEveryFloatOfAByteOrMore) {
  EXPECT_EQ(Distance(DType::kF16, Bytes<uint16_t>({0x3c00}), Bytes<uint16_t>({0x7bff})), 65503.0);
  EXPECT_EQ(Distance(DType::kF16, Bytes<uint16_t>({0x0001}), Bytes<uint16_t>({0x0000})),
            std::ldexp(1.0, -24));
  EXPECT_EQ(Distance(DType::kBF16, Bytes<uint16_t>({0x3f80}), Bytes<uint16_t>({0xc000})), 3.0);
  EXPECT_EQ(Distance(DType::kF8E4M3, Bytes<uint8_t>({0x7e}), Bytes<uint8_t>({0x00})), 448.0);
  EXPECT_EQ(Distance(DType::kF8E4M3, Bytes<uint8_t>({0x01}), Bytes<uint8_t>({0x00})),
            std::ldexp(1.0, -9));
  EXPECT_EQ(Distance(DType::kF8E5M2, Bytes<uint8_t>({0x7b}), Bytes<uint8_t>({0x00})), 57344.0);
  EXPECT_EQ(Distance(DType::kF8E4M3Fnuz, Bytes<uint8_t>({0x7f}), Bytes<uint8_t>({0x00})), 240.0);
  EXPECT_EQ(Distance(DType::kF8E5M2Fnuz, Bytes<uint8_t>({0x7f}), Bytes<uint8_t>({0x00})), 57344.0);
  EXPECT_EQ(Distance(DType::kF8E8M0, Bytes<uint8_t>({0x80}), Bytes<uint8_t>({0x7f})), 1.0);
}

TEST(CompareValues, KeepsNansAndInfinitiesInSight) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isnan(
      *CompareValues(DType::kF32, Bytes<float>({nan, 1}), Bytes<float>({1, 9})).max_abs));
  EXPECT_TRUE(std::isinf(Distance(DType::kF32, Bytes<float>({inf}), Bytes<float>({1}))));
  EXPECT_EQ(Distance(DType::kF32, Bytes<uint32_t>({0x7fc00000}), Bytes<uint32_t>({0x7fc00001})),
            0.0)
      << "two NaNs of other bits differ, by no distance";
  EXPECT_EQ(Distance(DType::kF32, Bytes<float>({0.0f}), Bytes<float>({-0.0f})), 0.0);
  EXPECT_TRUE(
      std::isnan(Distance(DType::kF8E4M3Fnuz, Bytes<uint8_t>({0x80}), Bytes<uint8_t>({0x00}))));
}

TEST(CompareValues, GivesIntegersACountOnly) {
  const ValueDifference difference =
      CompareValues(DType::kI64, Bytes<int64_t>({1, 2, 3}), Bytes<int64_t>({1, 0, 0}));
  EXPECT_EQ(difference.elements, 2u);
  EXPECT_EQ(difference.max_abs, std::nullopt);
}

TEST(CutTensors, CoversEachTensorWithContiguousPieces) {
  const SavedTensor small{"a", DType::kF32, {2, 2}, {}}, none{"b", DType::kF32, {0, 5}, {}};
  const SavedTensor large{"c", DType::kF32, {3, 5, 4}, {}}, scalar{"d", DType::kI64, {}, {}};
  const SavedTensor* const list[] = {&small, &none, &large, &scalar};

  const std::vector<TensorPiece> pieces = CutTensors(list, 32);  // two rows of c

  ASSERT_EQ(pieces.size(), 11u);  // a, 3 x (2 + 2 + 1) rows of c, d
  EXPECT_EQ(pieces[0].bytes, 16u);
  uint64_t at = 0;
  for (size_t i = 1; i < 10; ++i) {
    EXPECT_EQ(pieces[i].tensor, &large);
    EXPECT_EQ(pieces[i].begin, at);
    EXPECT_EQ(BytesOf(DType::kF32, pieces[i].box.extent).value(), pieces[i].bytes);
    EXPECT_LE(pieces[i].bytes, 32u);
    at += pieces[i].bytes;
  }
  EXPECT_EQ(at, 3u * 5 * 4 * 4);
  EXPECT_EQ(pieces[5].box, (Box{{1, 2, 0}, {1, 2, 4}}));
  EXPECT_EQ(pieces[10].bytes, 8u);
}

TEST(CutTensors, FollowsRowsThatAreLargerThanTheLimit) {
  const SavedTensor wide{"w", DType::kU8, {2, 10}, {}};
  const SavedTensor* const list[] = {&wide};
  const std::vector<TensorPiece> pieces = CutTensors(list, 4);
  ASSERT_EQ(pieces.size(), 6u);
  EXPECT_EQ(pieces[2].box, (Box{{0, 8}, {1, 2}}));
  EXPECT_EQ(pieces[3].box, (Box{{1, 0}, {1, 4}}));
}

TEST(PieceRuns, GathersSmallTensorsAndNeverOneTwice) {
  const SavedTensor a{"a", DType::kU8, {4}, {}}, b{"b", DType::kU8, {4}, {}},
      c{"c", DType::kU8, {9}, {}};
  const SavedTensor* const list[] = {&a, &b, &c};
  const std::vector<TensorPiece> pieces = CutTensors(list, 8);
  PieceRuns runs(pieces, 8);
  EXPECT_EQ(runs.Next().size(), 2u);  // a and b
  EXPECT_EQ(runs.Next().size(), 1u);  // c's first 8
  EXPECT_EQ(runs.Next().size(), 1u);
  EXPECT_TRUE(runs.Next().empty());
}

class CompareTest : public ::testing::Test {
 protected:
  std::unique_ptr<CheckpointReader> Saved(std::span<const OwnedState> ranks) {
    const std::string name = Save(*root_, ++step_, ranks).value();
    return CheckpointReader::Open(root_->PathOf(name)).value();
  }
  static OwnedState One(std::string name, DType dtype, const Shape& shape) {
    OwnedState state;
    state.Add(std::move(name), dtype, shape);
    return state;
  }

  TempFolder folder_;
  std::unique_ptr<Root> root_ = OpenRoot(folder_.path());
  int64_t step_ = 0;
};

// The layouts of case D24: rows, uneven rows, columns, replicated.
TEST_F(CompareTest, FindsEveryLayoutOfOneStateEqual) {
  const Shape shape{10, 20};
  std::vector<std::vector<OwnedState>> layouts;
  const auto add = [&](const std::vector<Box>& boxes) {
    std::vector<OwnedState> ranks(boxes.size());
    for (size_t i = 0; i < boxes.size(); ++i) ranks[i].Add("t", DType::kF32, shape, boxes[i]);
    layouts.push_back(std::move(ranks));
  };
  const Box whole{{0, 0}, shape};
  add({whole});
  add({whole, whole});
  add({{{0, 0}, {5, 20}}, {{5, 0}, {5, 20}}});
  add({{{0, 0}, {2, 20}},
       {{2, 0}, {1, 20}},
       {{3, 0}, {3, 20}},
       {{6, 0}, {3, 20}},
       {{9, 0}, {1, 20}}});
  add({{{0, 0}, {10, 7}}, {{0, 7}, {10, 13}}});
  std::vector<std::unique_ptr<CheckpointReader>> readers;
  for (const auto& layout : layouts) readers.push_back(Saved(layout));
  for (const auto& a : readers) {
    for (const auto& b : readers) {
      const Comparison comparison = CompareCheckpoints(*a, *b).value();
      EXPECT_TRUE(comparison.is_equal());
      EXPECT_EQ(comparison.equal_tensors, 1u);
    }
  }
}

// Case O19's rows, as a comparison sees them.
TEST_F(CompareTest, SortsDifferencesByTheirKind) {
  std::vector<OwnedState> first(1), second(2);
  first[0].Add("gone", DType::kBF16, {4});
  first[0].Add("shape", DType::kF32, {4});
  first[0].Add("same", DType::kI32, {8});
  first[0].Add("values", DType::kF32, {3});
  for (OwnedState& rank : second) {
    rank.Add("new", DType::kU8, {});
    rank.Add("shape", DType::kF32, {2, 2});
    rank.Add("same", DType::kI32, {8});
    rank.Add("values", DType::kF32, {3});
    std::memset(rank.view().regions[3].bytes.data() + 4, 0, 4);
  }
  float changed;
  std::memcpy(&changed, first[0].view().regions[3].bytes.data() + 4, 4);

  const Comparison comparison = CompareCheckpoints(*Saved(first), *Saved(second)).value();

  ASSERT_EQ(comparison.tensors.size(), 4u);
  using Kind = TensorDifference::Kind;
  const auto& [gone, added, shape, values] = std::tie(comparison.tensors[0], comparison.tensors[1],
                                                      comparison.tensors[2], comparison.tensors[3]);
  EXPECT_EQ(gone.kind, Kind::kMissing);
  EXPECT_EQ(gone.a, "BF16 [4]");
  EXPECT_EQ(added.kind, Kind::kAdded);
  EXPECT_EQ(added.b, "U8 []");
  EXPECT_EQ(shape.kind, Kind::kType);
  EXPECT_EQ(shape.b, "F32 [2, 2]");
  EXPECT_EQ(values.kind, Kind::kValues);
  EXPECT_EQ(values.values.elements, 1u);
  EXPECT_EQ(values.elements, 3u);
  EXPECT_EQ(values.values.max_abs, std::abs(static_cast<double>(changed)));
  EXPECT_EQ(comparison.equal_tensors, 1u);
}

TEST_F(CompareTest, NamesExtrasThatDifferInWorldsOfOneSize) {
  std::vector<OwnedState> first(1), second(1), wide(2);
  for (auto* ranks : {&first, &second, &wide})
    for (OwnedState& rank : *ranks) rank.Add("t", DType::kF32, {4});
  first[0].view().extras = {{"cursor", R"({"n":1})"}, {"rng", "abc"}};
  second[0].view().extras = {{"cursor", R"({"n":2})"}, {"more", "x"}};
  const auto a = Saved(first), b = Saved(second), c = Saved(wide);
  EXPECT_THAT(CompareCheckpoints(*a, *b)->extras,
              ElementsAre("rank 0: 'cursor' differs", "rank 0: 'more' is only in the second",
                          "rank 0: 'rng' is only in the first"));
  EXPECT_THAT(CompareCheckpoints(*a, *c)->extras, IsEmpty());
}

TEST_F(CompareTest, EndsAtADamagedChunk) {
  std::vector<OwnedState> ranks(1);
  ranks[0].Add("t", DType::kF32, {4});
  const auto a = Saved(ranks), b = Saved(ranks);
  const std::string shard = b->folder() + "/w00000.safetensors";
  std::string content = ReadFileText(shard);
  content.back() ^= 1;
  WriteFileText(shard, content);
  EXPECT_EQ(CompareCheckpoints(*a, *b).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace outlast
