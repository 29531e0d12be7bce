#include "outlast/data/cursor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "outlast/base/status.h"

namespace outlast {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
constexpr int64_t kPadding = Cursor::kPadding;

using Ids = std::vector<int64_t>;

Cursor Start(const CursorOptions& options) { return Cursor::Create(options).value(); }

// The ids of the next step and the cursor moved behind it.
Ids Take(Cursor& cursor) {
  Ids ids = cursor.StepIds().value();
  EXPECT_TRUE(cursor.Advance().ok());
  return ids;
}

std::vector<Ids> TakeSteps(Cursor cursor, int64_t steps) {
  std::vector<Ids> list;
  for (int64_t step = 0; step < steps; ++step) list.push_back(Take(cursor));
  return list;
}

std::string MessageOfText(const CursorOptions& options, std::string_view text,
                          absl::StatusCode code) {
  const absl::Status status = Cursor::FromText(options, text).status();
  EXPECT_EQ(status.code(), code) << text;
  return std::string(MessageOf(status));
}

constexpr CursorOptions kHundred{.samples = 100, .batch = 8, .seed = 7};

TEST(Cursor, TakesTheOrdersSamplesOneBatchAfterTheOther) {
  const SampleOrder order(100, 7, 0);
  Cursor cursor = Start(kHundred);
  Take(cursor);
  EXPECT_EQ(cursor.position(), 8);
  Ids second;
  for (int64_t position = 8; position < 16; ++position) second.push_back(order.IdAt(position));
  EXPECT_EQ(Take(cursor), second);
}

TEST(Cursor, EntersTheNextEpochWithItsOwnOrder) {
  Cursor cursor = Start(kHundred);
  for (int step = 0; step < 12; ++step) Take(cursor);
  EXPECT_EQ(cursor.epoch(), 1);
  EXPECT_EQ(cursor.position(), 0);
  EXPECT_EQ(cursor.consumed(), 96);
  EXPECT_EQ(cursor.StepIds().value().front(), SampleOrder(100, 7, 1).IdAt(0));
}

// Case O21
TEST(Cursor, ResumedAtAnyStepGivesTheListOfAnUninterruptedRun) {
  for (const Remainder remainder : {Remainder::kDrop, Remainder::kPad}) {
    CursorOptions options = kHundred;
    options.remainder = remainder;
    const int64_t steps = 3 * Start(options).steps_per_epoch();
    const std::vector<Ids> uninterrupted = TakeSteps(Start(options), steps);

    Cursor before = Start(options);
    for (int64_t killed_at = 0; killed_at < steps; ++killed_at) {
      const Cursor resumed = Cursor::FromText(options, before.ToText()).value();
      EXPECT_EQ(TakeSteps(resumed, steps - killed_at),
                std::vector<Ids>(uninterrupted.begin() + killed_at, uninterrupted.end()))
          << killed_at;
      Take(before);
    }
  }
}

// Case O21: kills twice, once in the second epoch.
TEST(Cursor, ResumedTwiceSkipsNothingInLaterEpochs) {
  const std::vector<Ids> uninterrupted = TakeSteps(Start(kHundred), 36);
  std::vector<Ids> list;
  std::string saved = Start(kHundred).ToText();
  for (const size_t until : {7, 17, 36}) {
    Cursor cursor = Cursor::FromText(kHundred, saved).value();
    while (list.size() < until) list.push_back(Take(cursor));
    saved = cursor.ToText();
  }
  EXPECT_EQ(list, uninterrupted);
}

// Case O21
TEST(Cursor, ConsumesEachSampleOncePerEpochUnderTheRule) {
  for (const Remainder remainder : {Remainder::kDrop, Remainder::kPad}) {
    CursorOptions options = kHundred;
    options.remainder = remainder;
    Cursor cursor = Start(options);
    for (int epoch = 0; epoch < 3; ++epoch) {
      std::vector<int> times(100, 0);
      while (cursor.epoch() == epoch) {
        for (const int64_t id : Take(cursor)) {
          if (id != kPadding) ++times.at(static_cast<size_t>(id));
        }
      }
      EXPECT_EQ(std::count(times.begin(), times.end(), 1),
                remainder == Remainder::kDrop ? 96 : 100);
      EXPECT_EQ(std::count(times.begin(), times.end(), 0), remainder == Remainder::kDrop ? 4 : 0);
    }
  }
}

// Case O22: the naive rule gave the ranks 2, 1 and 1 micro-batches, and consumed 12, 6 and 6.
TEST(Cursor, GivesRanksEqualCountsWhenTheBatchIsRagged) {
  CursorOptions options{.samples = 10, .batch = 2 * 3, .remainder = Remainder::kPad};
  Cursor cursor = Start(options);
  EXPECT_EQ(cursor.steps_per_epoch(), 2);
  Take(cursor);
  EXPECT_EQ(cursor.consumed(), 6);
  const SampleOrder order(10, 0, 0);
  EXPECT_THAT(cursor.RankIds(0, 3).value(), ElementsAre(order.IdAt(6), order.IdAt(7)));
  EXPECT_THAT(cursor.RankIds(1, 3).value(), ElementsAre(order.IdAt(8), order.IdAt(9)));
  EXPECT_THAT(cursor.RankIds(2, 3).value(), ElementsAre(kPadding, kPadding));
  Take(cursor);
  EXPECT_EQ(cursor.consumed(), 10);

  options.remainder = Remainder::kDrop;
  EXPECT_EQ(Start(options).steps_per_epoch(), 1);
}

// One epoch of O22: on every rank the same number of places, together the step's ids, counted
// without padding.
void CheckEpoch(const CursorOptions& options, int64_t micro_batch, int world) {
  Cursor cursor = Start(options);
  const int64_t steps = cursor.steps_per_epoch();
  int64_t data = 0;
  for (int64_t step = 0; step < steps; ++step) {
    Ids together;
    for (int rank = 0; rank < world; ++rank) {
      const Ids ids = cursor.RankIds(rank, world).value();
      ASSERT_EQ(ids.size(), static_cast<size_t>(micro_batch));
      together.insert(together.end(), ids.begin(), ids.end());
    }
    ASSERT_EQ(together, cursor.StepIds().value());
    data +=
        std::count_if(together.begin(), together.end(), [](int64_t id) { return id != kPadding; });
    ASSERT_EQ(cursor.epoch(), 0);
    ASSERT_TRUE(cursor.Advance().ok());
    ASSERT_EQ(cursor.consumed(), data);
  }
  const int64_t rest = options.samples % options.batch;
  EXPECT_EQ(data, options.remainder == Remainder::kPad ? options.samples : options.samples - rest);
  EXPECT_EQ(cursor.epoch(), steps > 0 ? 1 : 0);
}

// Case O22
TEST(Cursor, GivesRanksEqualCountsForAllSmallShapes) {
  for (const Remainder remainder : {Remainder::kDrop, Remainder::kPad}) {
    for (int64_t samples = 0; samples <= 60; ++samples) {
      for (int64_t micro_batch = 1; micro_batch <= 8; ++micro_batch) {
        for (int world = 1; world <= 7; ++world) {
          const CursorOptions options{
              .samples = samples, .batch = micro_batch * world, .seed = 3, .remainder = remainder};
          CheckEpoch(options, micro_batch, world);
        }
      }
    }
  }
}

// Case O22
TEST(Cursor, SaysWhenThereIsNoStepToTake) {
  Cursor few = Start({.samples = 5, .batch = 6});
  EXPECT_EQ(few.steps_per_epoch(), 0);
  EXPECT_EQ(few.StepIds().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(few.RankIds(0, 3).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(MessageOf(few.Advance()), "cursor: 5 samples give no step of 6 (remainder drop)");
  EXPECT_EQ(Cursor::FromText({.samples = 5, .batch = 6}, few.ToText()).value().epoch(), 0);
  EXPECT_EQ(Start({.samples = 0, .batch = 6, .remainder = Remainder::kPad}).steps_per_epoch(), 0);
}

TEST(Cursor, TakesTheSameSamplesWhateverTheWorldSize) {
  Cursor cursor = Start(kHundred);
  for (int step = 0; step < 30; ++step) {
    const Ids wanted = cursor.StepIds().value();
    for (int world = 1; world <= 11; ++world) {
      const size_t places = static_cast<size_t>((8 + world - 1) / world);
      Ids together;
      for (int rank = 0; rank < world; ++rank) {
        const Ids ids = cursor.RankIds(rank, world).value();
        EXPECT_EQ(ids.size(), places);
        together.insert(together.end(), ids.begin(), ids.end());
      }
      std::erase(together, kPadding);
      EXPECT_EQ(together, wanted) << world;
    }
    Take(cursor);
  }
}

TEST(Cursor, GoesOnWithAnotherBatchSizeWithoutRepeatingASample) {
  Cursor eights = Start(kHundred);
  for (int step = 0; step < 4; ++step) Take(eights);
  Cursor twenties =
      Cursor::FromText({.samples = 100, .batch = 20, .seed = 7}, eights.ToText()).value();
  EXPECT_EQ(twenties.position(), 32);
  EXPECT_EQ(Take(twenties).front(), SampleOrder(100, 7, 0).IdAt(32));
  for (int step = 1; step < 3; ++step) Take(twenties);  // 32 + 60 = 92: no whole batch is left
  EXPECT_EQ(twenties.epoch(), 1);
  EXPECT_EQ(twenties.consumed(), 92);
}

TEST(Cursor, RefusesSenselessOptionsAndRanks) {
  EXPECT_EQ(Cursor::Create({.samples = -1, .batch = 1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Cursor::Create({.samples = 1, .batch = 0}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Cursor::Create({.samples = 1, .batch = Cursor::kLargestBatch + 1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const Cursor cursor = Start(kHundred);
  EXPECT_EQ(cursor.RankIds(2, 2).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cursor.RankIds(-1, 2).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cursor.RankIds(0, 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(CursorText, IsTheDocumentedObject) {
  Cursor cursor = Start(kHundred);
  for (int step = 0; step < 13; ++step) Take(cursor);
  EXPECT_EQ(cursor.ToText(),
            R"({"format":"outlast.cursor","sources":[{"consumed":104,"epoch":1,"position":8,)"
            R"("remainder":"drop","samples":100,"seed":7}],"version":1})");
}

TEST(CursorText, KeepsSeedsOf64Bits) {
  const CursorOptions options{.samples = 9, .batch = 2, .seed = ~uint64_t{0}};
  EXPECT_EQ(Cursor::FromText(options, Start(options).ToText()).value().StepIds().value(),
            Start(options).StepIds().value());
}

TEST(CursorText, OfAnotherOrderIsRefusedWithBothValues) {
  const std::string text = Start(kHundred).ToText();
  constexpr auto kOther = absl::StatusCode::kFailedPrecondition;
  EXPECT_EQ(MessageOfText({.samples = 101, .batch = 8, .seed = 7}, text, kOther),
            "cursor: saved over 100 samples, the source has 101");
  EXPECT_EQ(MessageOfText({.samples = 100, .batch = 8, .seed = 9}, text, kOther),
            "cursor: saved with seed 7, this run has 9");
  EXPECT_EQ(MessageOfText({.samples = 100, .batch = 8, .seed = 7, .remainder = Remainder::kPad},
                          text, kOther),
            "cursor: saved with remainder drop, this run has pad");
}

struct BadText {
  std::string_view part;     // of a good text,
  std::string_view instead;  // replaced by this,
  std::string_view says;     // gives this
};

TEST(CursorText, ThatIsDamagedIsRefusedWithWhatIsWrong) {
  const BadText kCases[] = {
      {R"("format":"outlast.cursor")", R"("format":"x")", "'format': 'x' found"},
      {R"("format":"outlast.cursor",)", "", "'format': a string wanted"},
      {R"("version":1)", R"("version":2)", "'version': 2 found, 1 wanted"},
      {R"("sources":[)", R"("sources":[1,)", "'sources': 2 found, one wanted"},
      {R"("sources":[{)", R"("sources":{"a":[{)", "a JSON object wanted"},
      {R"("epoch":0)", R"("epoch":-1)", "'epoch': -1 found"},
      {R"("epoch":0)", R"("epoch":1.5)", "'epoch': an integer wanted"},
      {R"("epoch":0)", R"("epoch":9223372036854775807)", "'epoch': 9223372036854775807 found"},
      {R"("epoch":0)", R"("epoch":18446744073709551616)", "'epoch': an integer wanted"},
      {R"("position":0)", R"("position":101)", "cannot be of 100 samples"},
      {R"("position":0)", R"("position":8)", "cannot be of 100 samples"},
      {R"("consumed":0)", R"("consumed":1)", "cannot be of 100 samples"},
      {R"("remainder":"drop")", R"("remainder":"keep")", "'remainder': 'keep' found"},
      {R"("seed":7)", R"("seed":-7)", "'seed': an integer from 0 wanted"},
      {R"("samples":100)", R"("samples":"100")", "'samples': an integer wanted"},
  };
  for (const BadText& bad : kCases) {
    std::string text = Start(kHundred).ToText();
    text.replace(text.find(bad.part), bad.part.size(), bad.instead);
    EXPECT_THAT(MessageOfText(kHundred, text, absl::StatusCode::kInvalidArgument),
                HasSubstr(bad.says))
        << text;
  }
}

TEST(CursorText, ThatIsCutOffIsRefusedAtEveryLength) {
  const std::string text = Start(kHundred).ToText();
  for (size_t length = 0; length < text.size(); ++length) {
    MessageOfText(kHundred, text.substr(0, length), absl::StatusCode::kInvalidArgument);
  }
  MessageOfText(kHundred, "[]", absl::StatusCode::kInvalidArgument);
  MessageOfText(kHundred, std::string(100'000, '['), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace outlast
