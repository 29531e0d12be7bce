#include "checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "outlast/checkpoint/state.h"
#include "tests/checkpoint/disk_fixture.h"
#include "tests/support/paths.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

std::span<const std::byte> Bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string FromHexText(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes += static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
  return bytes;
}

std::string File(std::string_view header, std::string_view data = "") {
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file.append(header).append(data);
}

absl::StatusOr<SafetensorsFile> Parse(const std::string& file) {
  return ParseSafetensors(Bytes(file), file.size());
}

// `{"step":"7"}`, a = F32 [1.0, -2.0]; the bytes are those of the format's description, 104 of
// them.
constexpr std::string_view kGolden =
    "58000000000000007b225f5f6d657461646174615f5f223a7b2273746570223a2237227d2c2261223a7b2264747970"
    "65223a22463332222c22736861706522"
    "3a5b325d2c22646174615f6f666673657473223a5b302c385d7d7d2020202020200000803f000000c0";

TEST(Safetensors, ReadsTheGoldenFile) {
  const std::string file = FromHexText(kGolden);
  ASSERT_EQ(file.size(), 104u);

  const SafetensorsFile parsed = Parse(file).value();

  EXPECT_EQ(parsed.metadata, (std::map<std::string, std::string>{{"step", "7"}}));
  ASSERT_EQ(parsed.tensors.size(), 1u);
  EXPECT_EQ(parsed.tensors[0].key, "a");
  EXPECT_EQ(parsed.tensors[0].dtype, DType::kF32);
  EXPECT_EQ(parsed.tensors[0].shape, (Shape{2}));
  EXPECT_EQ(parsed.data_begin, 96u);
  float values[2];
  std::memcpy(values, file.data() + parsed.data_begin, 8);
  EXPECT_EQ(values[0], 1.0f);
  EXPECT_EQ(values[1], -2.0f);
}

struct Fixture {
  std::string file, outcome, reason;
};

std::string SharedFolder() { return testing::SharedFolder().string(); }

std::vector<Fixture> Fixtures() {
  std::vector<Fixture> fixtures;
  std::istringstream table(ReadFileText(SharedFolder() + "/cases/fixtures/expected.tsv"));
  for (std::string line; std::getline(table, line);) {
    std::istringstream row(line);
    std::string file, format, outcome, reason;
    std::getline(row, file, '\t');
    std::getline(row, format, '\t');
    std::getline(row, outcome, '\t');
    std::getline(row, reason, '\t');
    if (format == "safetensors") fixtures.push_back({file, outcome, reason});
  }
  return fixtures;
}

// The table of formats.md, section 18: 8 good and 18 broken files, and the two shards of an index.
TEST(Safetensors, AcceptsAndRefusesTheSharedFixtures) {
  const std::vector<Fixture> fixtures = Fixtures();
  if (fixtures.empty()) GTEST_SKIP() << "the shared fixtures are not at " << SharedFolder();
  ASSERT_EQ(fixtures.size(), 28u);
  for (const Fixture& fixture : fixtures) {
    const std::string path = SharedFolder() + "/cases/fixtures/" + fixture.file;
    const auto parsed = ReadSafetensors(path);
    EXPECT_EQ(parsed.ok(), fixture.outcome == "accept")
        << fixture.file << " (" << fixture.reason << "): " << parsed.status();
    if (!parsed.ok()) {
      EXPECT_THAT(parsed.status().ToString(), HasSubstr(path));
    }
  }
}

TEST(Safetensors, ReadsTheValuesOfTheSharedFixtures) {
  const std::string folder = SharedFolder() + "/cases/fixtures/st/";
  if (Fixtures().empty()) GTEST_SKIP() << "the shared fixtures are not at " << SharedFolder();
  EXPECT_TRUE(ReadSafetensors(folder + "ok_empty.safetensors")->tensors.empty());
  EXPECT_FALSE(ReadSafetensors(folder + "ok_meta_only.safetensors")->metadata.empty());
  EXPECT_EQ(ReadSafetensors(folder + "ok_scalar.safetensors")->tensors.at(0).shape.rank(), 0);
  const SafetensorsFile bf16 = ReadSafetensors(folder + "ok_bf16.safetensors").value();
  EXPECT_EQ(bf16.tensors.at(0).dtype, DType::kBF16);
  EXPECT_EQ(ReadFileText(folder + "ok_bf16.safetensors").substr(bf16.data_begin),
            std::string("\x80\x3f\x00\xc0", 4));
}

TEST(Safetensors, RefusesWhatTheParserUnderneathWouldLetPass) {
  const std::string good = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  ASSERT_TRUE(Parse(File(good, "x")).ok());
  EXPECT_TRUE(Parse(File(" \n" + good + "\t ", "x")).ok());  // white space around is legal to read
  EXPECT_FALSE(Parse(File("\xef\xbb\xbf" + good, "x")).ok());
  EXPECT_FALSE(Parse(File(good + std::string("\0junk", 5), "x")).ok());
  EXPECT_FALSE(Parse(File(good + "{}", "x")).ok());
  EXPECT_FALSE(Parse(File("", "x")).ok());
  EXPECT_FALSE(Parse(File("[]")).ok());
  EXPECT_FALSE(Parse(File("null")).ok());
}

TEST(Safetensors, NamesTheRuleThatIsBroken) {
  const auto why = [](std::string_view header, std::string_view data = "") {
    return std::string(MessageOf(Parse(File(header, data)).status()));
  };
  EXPECT_THAT(why(R"({"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}})", "x"),
              HasSubstr("'dtype' is there twice"));
  EXPECT_THAT(why(R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", "x"),
              HasSubstr("no integer"));
  EXPECT_THAT(why(R"({"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}})", "x"),
              HasSubstr("no integer"));
  EXPECT_THAT(why(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", "x"),
              HasSubstr("negative"));
  EXPECT_THAT(why(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", "x"),
              HasSubstr("two data_offsets"));
  EXPECT_THAT(why(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", "x"),
              HasSubstr("more than two"));
  EXPECT_THAT(why(R"({"a":{"dtype":"U8","shape":[1]}})", "x"), HasSubstr("data_offsets wanted"));
  EXPECT_THAT(why(R"({"__metadata__":{"a":"1","a":"2"}})"), HasSubstr("twice"));
  EXPECT_THAT(why(R"({"__metadata__":{},"__metadata__":{}})"), HasSubstr("twice"));
  EXPECT_THAT(why(R"({"__metadata__":{"a":{}}})"), HasSubstr("a string wanted"));
  EXPECT_THAT(why(R"({"a":7})"), HasSubstr("an object wanted"));
  EXPECT_THAT(
      why(R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})",
          "x"),
      HasSubstr("16"));
  EXPECT_THAT(
      why(R"({"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1]}})", "x"),
      HasSubstr("overflow"));
}

TEST(Safetensors, PassesOverMembersOfATensorThatItDoesNotKnow) {
  EXPECT_TRUE(
      Parse(
          File(
              R"({"a":{"x":[{"dtype":[1]},null],"y":{"shape":2},"z":-1.5,"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
              "x"))
          .ok());
  std::string deep = R"({"a":{"x":)" + std::string(1000, '[') + std::string(1000, ']') +
                     R"(,"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  EXPECT_FALSE(Parse(File(deep, "x")).ok());
}

TEST(Safetensors, WritesTheStrictFormByElementSizeThenName) {
  std::vector<SafetensorsBox> boxes = {
      {"b", "", DType::kU8, {3}, {0}, {3}},
      {"c", "", DType::kF64, {}, {}, {}},
      {"d", "", DType::kF32, {4, 2}, {2, 0}, {2, 2}},
      {"a\"", "", DType::kF32, {0, 5}, {0, 0}, {0, 5}},
  };
  ASSERT_EQ(LayOut(boxes).value(), 8u + 0u + 16u + 3u);
  const std::string header = BuildHeader(boxes).value();

  // Worked out by hand: F64 first, then F32 by name, then U8.
  const std::string json =
      R"({"__metadata__":{"format":"pt","DCP_SHARDING_INFO":"{\"c\":{\"saved_offsets\":[]},\"a\\\"\":{\"saved_offsets\":[0,0]},)"
      R"(\"d\":{\"saved_offsets\":[2,0]},\"b\":{\"saved_offsets\":[0]}}","DCP_VERSION":"1.0"},)"
      R"("c":{"dtype":"F64","shape":[],"data_offsets":[0,8]},"a\"":{"dtype":"F32","shape":[0,5],"data_offsets":[8,8]},)"
      R"("d":{"dtype":"F32","shape":[2,2],"data_offsets":[8,24]},"b":{"dtype":"U8","shape":[3],"data_offsets":[24,27]}})";
  ASSERT_EQ(header.size(), 4096u);
  EXPECT_EQ(header.substr(8, json.size()), json);
  EXPECT_EQ(header.substr(8 + json.size()), std::string(4096 - 8 - json.size(), ' '));
  const SafetensorsFile parsed = Parse(header + std::string(27, 'x')).value();
  EXPECT_EQ(parsed.data_begin, 4096u);
  EXPECT_EQ(parsed.metadata.at("format"), "pt");
  EXPECT_EQ(parsed.tensors.size(), 4u);
}

TEST(Safetensors, GivesASecondBoxOfATensorAKeyOfItsOwn) {
  std::vector<SafetensorsBox> boxes = {{"w", "", DType::kU8, {4}, {2}, {2}},
                                       {"w", "", DType::kU8, {4}, {0}, {1}}};
  ASSERT_TRUE(LayOut(boxes).ok());
  EXPECT_EQ(boxes[0].key, "w");
  EXPECT_EQ(boxes[0].offset, (Shape{0}));
  EXPECT_EQ(boxes[1].key, "w#1");

  boxes.push_back({"w#1", "", DType::kU8, {1}, {0}, {1}});
  EXPECT_FALSE(LayOut(boxes).ok());
}

TEST(Safetensors, RefusesAHeaderPastSixtyFourMiBWhenItIsPlanned) {
  std::vector<SafetensorsBox> boxes;
  for (int i = 0; i < 900; ++i) {
    boxes.push_back({std::string(40'000, 'n') + std::to_string(i), "", DType::kU8, {1}, {0}, {1}});
  }
  ASSERT_TRUE(LayOut(boxes).ok());
  EXPECT_EQ(BuildHeader(boxes).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(DType, NamesAndSizesAreThoseOfTheFormat) {
  EXPECT_EQ(NameOf(DType::kF8E4M3), "F8_E4M3");
  EXPECT_EQ(NameOf(DType::kBool), "BOOL");
  EXPECT_EQ(NameOf(DType::kU64), "U64");
  EXPECT_EQ(BitsOf(DType::kF6E2M3), 6);
  EXPECT_EQ(BitsOf(DType::kC64), 64);
  for (int i = 0; i < kDTypeCount; ++i)
    EXPECT_EQ(DTypeFromName(NameOf(static_cast<DType>(i))), static_cast<DType>(i));
  EXPECT_FALSE(DTypeFromName("f32").has_value());
  EXPECT_FALSE(BytesOf(DType::kF4, {3}).ok());
  EXPECT_EQ(BytesOf(DType::kF4, {4}).value(), 2u);
}

TEST(Shape, RefusesTooManyDimensionsAndOverflow) {
  EXPECT_EQ(Shape({}).elements(), 1);
  EXPECT_EQ(Shape({3, 0, 2}).elements(), 0);
  EXPECT_FALSE(Shape({1LL << 40, 1LL << 40}).elements().has_value());
  EXPECT_FALSE(Shape(std::vector<int64_t>(17, 1)).is_valid());
  EXPECT_FALSE(Shape(std::vector<int64_t>(17, 1)).elements().has_value());
  EXPECT_FALSE(BytesOf(DType::kF32, {-1}).ok());
}

TEST(StateView, RefusesWhatCannotBeSaved) {
  std::vector<std::byte> memory(8);
  const auto why = [&](Region region) {
    const StateView state{{region}, {}};
    return std::string(MessageOf(state.Validate()));
  };
  EXPECT_EQ(why({"a", DType::kF32, {2}, {}, {2}, memory}), "");
  EXPECT_THAT(why({"", DType::kF32, {2}, {}, {2}, memory}), HasSubstr("a name of 0 bytes"));
  EXPECT_THAT(why({"\xff", DType::kF32, {2}, {}, {2}, memory}), HasSubstr("UTF-8"));
  EXPECT_THAT(why({"a", DType::kF32, {2}, {}, {3}, memory}), HasSubstr("leave the tensor"));
  EXPECT_THAT(why({"a", DType::kF32, {2}, {1}, {2}, memory}), HasSubstr("leave the tensor"));
  EXPECT_THAT(why({"a", DType::kF32, {4}, {}, {4}, memory}),
              HasSubstr("8 bytes of memory, 16 wanted"));
  EXPECT_THAT(why({"a", DType::kF32, {2}, {}, {2, 1}, memory}), HasSubstr("dimensions"));
  const Region region{"a", DType::kF32, {2}, {}, {2}, memory};
  const StateView twice{{region, region}, {}};
  EXPECT_THAT(std::string(MessageOf(twice.Validate())), HasSubstr("twice"));
  const StateView large{{}, {{"k", std::string(kMaxExtrasBytes, 'x')}}};
  EXPECT_THAT(std::string(MessageOf(large.Validate())), HasSubstr("at most"));
}

// Any bytes: an answer, never a crash. Run under sanitizers this is the fuzzer's smoke test.
TEST(Safetensors, SurvivesDamagedHeaders) {
  const uint64_t seed = RandomU64();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::string golden = FromHexText(kGolden);
  std::vector<std::string> corpus = {golden};
  for (const Fixture& fixture : Fixtures())
    corpus.push_back(ReadFileText(SharedFolder() + "/cases/fixtures/" + fixture.file));
  int accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string file = corpus[random() % corpus.size()];
    for (uint64_t edits = random() % 4; edits > 0 && !file.empty(); --edits) {
      const size_t at = random() % file.size();
      switch (random() % 4) {
        case 0:
          file[at] = static_cast<char>(random());
          break;
        case 1:
          file.erase(at, random() % 8);
          break;
        case 2:
          file.insert(at, 1, "{}[]\",:0-\\"[random() % 10]);
          break;
        default:
          file.resize(at);
      }
    }
    const auto parsed = Parse(file);
    if (!parsed.ok()) continue;
    ++accepted;
    uint64_t bytes = 0;
    for (const SafetensorsTensor& tensor : parsed->tensors) bytes += tensor.end - tensor.begin;
    ASSERT_EQ(bytes, parsed->data_bytes);
  }
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace outlast
