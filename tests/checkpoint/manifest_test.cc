#include "checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "checkpoint/json.h"
#include "checkpoint/writer.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/status.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

Receipt ExampleReceipt() {
  Receipt receipt;
  receipt.job = Id128::FromName("job");
  receipt.run = Id128::FromName("run");
  receipt.claim = 3;
  receipt.checkpoint = "step-000000000900-0000002a";
  receipt.parent = "step-000000000800-00000001";
  receipt.step = 900;
  receipt.generation = 2;
  receipt.writer = receipt.rank = 1;
  receipt.world = 2;
  receipt.plan = std::string(64, 'a');
  receipt.mesh = {{"data", 2}};
  receipt.hooks = {"gate"};
  receipt.boot_id = Id128::FromName("boot");
  receipt.file = ShardFile{"w00001.safetensors", 4096 + 8, 0x01020304, kChunkBytes, {0xdeadbeef}};
  receipt.tensors = {{"w", "w", DType::kF32, {4}, {2}, {2}, 0, 8}};
  receipt.aliases = {{"head", "w"}};
  return receipt;
}

Manifest ExampleManifest() {
  Manifest manifest;
  manifest.job = Id128::FromName("job");
  manifest.claim = 3;
  manifest.checkpoint = "step-000000000900-0000002a";
  manifest.step = 900;
  manifest.generation = 2;
  manifest.parent = "step-000000000800-00000001";
  manifest.ancestors = {"step-000000000800-00000001"};
  manifest.world = 1;
  manifest.mesh = {{"data", 1}};
  manifest.plan = std::string(64, 'b');
  manifest.tensors = 1;
  manifest.bytes = 8;
  manifest.receipts = {{"w00000.receipt.json", 700, 0xabcdef01, 8}};
  manifest.committed_by = {"0", 3, 2};
  return manifest;
}

TEST(Manifest, HasTheTextThatTheFormatSays) {
  const std::string text = ToText(ExampleManifest()).value();
  const std::string body =
      R"({"format":"outlast.manifest","version":1,"job":")" + Id128::FromName("job").hex() +
      R"(","claim":3,"checkpoint":"step-000000000900-0000002a","step":900,"generation":2,"parent":"step-000000000800-00000001",)"
      R"("ancestors":["step-000000000800-00000001"],"world":1,"mesh":{"data":1},"plan":")" +
      std::string(64, 'b') +
      R"(","tensors":1,"bytes":8,"receipts":[{"name":"w00000.receipt.json","bytes":700,"crc32c":"abcdef01","data_bytes":8}],)"
      R"("hooks":[],"committed_by":{"agent":"0","claim":3,"generation":2},"self_crc32c":")";
  char digits[9];
  snprintf(digits, sizeof digits, "%08x", Crc32c(body));
  EXPECT_EQ(text, body + digits + "\"}\n");
}

TEST(Manifest, ReadsBackWhatItWrote) {
  const std::string text = ToText(ExampleManifest()).value();
  const Manifest manifest = ParseManifest(text).value();
  EXPECT_EQ(manifest.parent, "step-000000000800-00000001");
  EXPECT_EQ(manifest.receipts.at(0).crc32c, 0xabcdef01);
  EXPECT_EQ(ToText(manifest).value(), text);
}

TEST(Manifest, RefusesANameOutsideItsFolder) {
  const std::string text = ToText(ExampleManifest()).value();
  for (const std::string_view name :
       {"../w00000.receipt.json", "/etc/passwd", "w00001.receipt.json", "w0.receipt.json", ""}) {
    const absl::Status status = ParseManifest(Forged(text, "w00000.receipt.json", name)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("receipts.name"));
  }
  EXPECT_FALSE(ParseManifest(Forged(text, "\"checkpoint\":\"step-000000000900-0000002a",
                                    "\"checkpoint\":\"../step"))
                   .ok());
  EXPECT_FALSE(
      ParseManifest(Forged(text, "\"parent\":\"step-000000000800-00000001", "\"parent\":\".."))
          .ok());
  EXPECT_FALSE(ParseManifest(Forged(text, "[\"step-000000000800-00000001", "[\"../x")).ok());
}

TEST(Receipt, RefusesAFileThatIsNotItsOwnShard) {
  const std::string text = ToText(ExampleReceipt()).value();
  for (const std::string_view name : {"../w00001.safetensors", "w00000.safetensors", "/tmp/x"}) {
    EXPECT_EQ(ParseReceipt(Forged(text, "w00001.safetensors", name)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << name;
  }
}

TEST(Receipt, RefusesBoxesThatDoNotFit) {
  const std::string text = ToText(ExampleReceipt()).value();
  EXPECT_TRUE(ParseReceipt(Forged(text, "\"offsets\":[2]", "\"offsets\":[1]")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"offsets\":[2]", "\"offsets\":[3]")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"offsets\":[2]", "\"offsets\":[-1]")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"offsets\":[2]", "\"offsets\":[2,0]")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"shape\":[4]", "\"shape\":[9223372036854775807]")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"begin\":0,\"end\":8", "\"begin\":4,\"end\":12")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"begin\":0,\"end\":8", "\"begin\":0,\"end\":9")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"bytes\":4104", "\"bytes\":4")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "deadbeef", "deadbeefdeadbeef")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"rank\":1", "\"rank\":0")).ok());
}

// What is written is checked as it is read, and by the same words.
TEST(Receipt, IsNotWrittenWhereNoReaderWouldTakeIt) {
  EXPECT_EQ(ToCheckedText(ExampleReceipt()).value(), ToText(ExampleReceipt()).value());
  const std::vector<std::function<void(Receipt&)>> faults = {
      [](Receipt& receipt) { receipt.tensors[0].offset = {3}; },
      [](Receipt& receipt) {
        receipt.tensors[0].offset = {2, 0};
      },
      [](Receipt& receipt) { receipt.tensors[0].end = 9; },
      [](Receipt& receipt) { receipt.tensors[0].begin = 4, receipt.tensors[0].end = 12; },
      [](Receipt& receipt) {
        receipt.tensors.push_back({"v", "w", DType::kU8, {1}, {0}, {1}, 8, 9});
      },
      [](Receipt& receipt) { receipt.tensors[0].name.clear(); },
      [](Receipt& receipt) { receipt.tensors[0].key.assign((16 << 10) + 17, 'k'); },
      [](Receipt& receipt) { receipt.file->bytes = 4; },
      [](Receipt& receipt) { receipt.file.reset(); },
      [](Receipt& receipt) { receipt.file->chunks.push_back(1); },
      [](Receipt& receipt) { receipt.rank = 0; },
      [](Receipt& receipt) { receipt.plan = "x"; },
      [](Receipt& receipt) { receipt.checkpoint = "../step"; },
  };
  for (size_t i = 0; i < faults.size(); ++i) {
    Receipt receipt = ExampleReceipt();
    faults[i](receipt);

    const absl::Status refused = ToCheckedText(receipt).status();

    const absl::Status wanted = ParseReceipt(ToText(receipt).value()).status();
    EXPECT_FALSE(wanted.ok()) << i;
    EXPECT_EQ(refused.code(), wanted.code()) << i;
    EXPECT_EQ(MessageOf(refused), MessageOf(wanted)) << i;
  }
}

// Boxes are read by a scanner that knows only our own spelling, or by the JSON parser: the same
// comes of both.
TEST(Receipt, ReadsBoxesInAnySpellingAlike) {
  Receipt receipt = ExampleReceipt();
  receipt.tensors[0].name = "wörter / \xf0\x9f\x8e\x89";
  const std::string text = ToText(receipt).value();
  const Receipt scanned = ParseReceipt(text).value();
  const Receipt parsed =
      ParseReceipt(Forged(text, ",\"tensors\":[{", ", \"tensors\" : [ {")).value();
  ASSERT_EQ(scanned.tensors.size(), receipt.tensors.size());
  ASSERT_EQ(parsed.tensors.size(), receipt.tensors.size());
  for (size_t i = 0; i < receipt.tensors.size(); ++i) {
    for (const SavedBox& box : {scanned.tensors[i], parsed.tensors[i]}) {
      const SavedBox& wanted = receipt.tensors[i];
      EXPECT_EQ(std::tie(box.name, box.key, box.dtype, box.begin, box.end),
                std::tie(wanted.name, wanted.key, wanted.dtype, wanted.begin, wanted.end));
      EXPECT_EQ(box.global, wanted.global);
      EXPECT_EQ(box.offset, wanted.offset);
      EXPECT_EQ(box.extent, wanted.extent);
    }
  }
  // What only the parser knows: escapes, an unknown member, another order.
  EXPECT_EQ(ParseReceipt(Forged(text, "/ ", "\\/\\u0020"))->tensors[0].name,
            receipt.tensors[0].name);
  EXPECT_TRUE(ParseReceipt(Forged(text, "{\"name\":", "{\"new\":[{}],\"name\":")).ok());
  // A list of the same name in a member that is not ours.
  const auto nested = ParseReceipt(
      Forged(text, "\"version\":1", "\"version\":1,\"future\":{\"a\":1,\"tensors\":[]}"));
  ASSERT_TRUE(nested.ok()) << nested.status();
  EXPECT_EQ(nested->tensors.size(), receipt.tensors.size());
  // Numbers as JSON has them, and no others.
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"begin\":0,", "\"begin\":00,")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"begin\":0,", "\"begin\":+0,")).ok());
  EXPECT_FALSE(ParseReceipt(Forged(text, "\"begin\":0,", "\"begin\":0.0,")).ok());
}

TEST(Receipt, RefusesAHigherVersionAndIgnoresUnknownMembers) {
  const std::string text = ToText(ExampleReceipt()).value();
  EXPECT_EQ(ParseReceipt(Forged(text, "\"version\":1", "\"version\":2")).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ParseReceipt(Forged(text, "outlast.receipt", "outlast.manifest")).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(
      ParseReceipt(Forged(text, "\"version\":1", "\"version\":1,\"future\":{\"a\":[1.5]}")).ok());
  EXPECT_FALSE(
      ParseReceipt(Forged(text, "\"version\":1",
                          "\"version\":1,\"deep\":" + std::string(40, '[') + std::string(40, ']')))
          .ok());
}

TEST(Receipt, FindsEachFlippedByteAndEachCut) {
  const std::string text = ToText(ExampleReceipt()).value();
  for (size_t i = 0; i < text.size(); ++i) {
    std::string flipped = text;
    flipped[i] ^= 1;
    EXPECT_FALSE(ParseReceipt(flipped).ok()) << i;
    EXPECT_EQ(ParseReceipt(text.substr(0, i)).status().code(), absl::StatusCode::kDataLoss) << i;
  }
}

TEST(Receipt, GivesExtrasBackByteForByte) {
  Receipt receipt = ExampleReceipt();
  receipt.extra = {
      {"cursor",
       R"({ "seed": 18446744073709551617, "rate": 1.10, "s": "}\"" })"},  // numbers that no double
                                                                          // holds
      {"random", std::string("\x00\xff\x01", 3)},
      {"empty", ""},
      {"text", "not json"},
      {"array", "[1]"},
      {"looks", R"({"base64":"AAAA"})"},
      {"spaces", " {}"},
      {"nested", R"({"a":{"base64":"AAAA"}})"},
      {"quo\"te", R"({})"},
  };
  const std::string text = ToText(receipt).value();
  EXPECT_THAT(text,
              HasSubstr(R"("cursor":{ "seed": 18446744073709551617, "rate": 1.10, "s": "}\"" })"));
  EXPECT_THAT(text, HasSubstr(R"("random":{"base64":"AP8B"})"));
  EXPECT_EQ(ParseReceipt(text)->extra, receipt.extra);
}

TEST(CheckpointName, IsReadBackExactlyOrNotAtAll) {
  EXPECT_EQ(CheckpointName(12000, 0x7f3a91c2), "step-000000012000-7f3a91c2");
  EXPECT_EQ(ParseCheckpointName("step-000000012000-7f3a91c2")->step, 12000);
  EXPECT_EQ(ParseCheckpointName(CheckpointName(1'234'567'890'123, 1))->step, 1'234'567'890'123);
  for (const std::string_view name :
       {"step-abc", "step-000000012000-7F3A91C2", "step-000000012000-00000000",
        "step-00000012000-7f3a91c2", "step-0000000012000-7f3a91c2", "step-000000012000-7f3a91c2/",
        "../step-000000012000-7f3a91c2", "step-99999999999999999999-7f3a91c2",
        "step-00000001200a-7f3a91c2"}) {
    EXPECT_FALSE(ParseCheckpointName(name).has_value()) << name;
  }
}

TEST(SmallFiles, ReadBackWhatTheyWrote) {
  const RootRecord root{Id128::FromName("x"), "x"};
  EXPECT_EQ(ToText(root).value(), R"({"format":"outlast.root","version":1,"job":")" +
                                      root.job.hex() + "\",\"name\":\"x\"}\n");
  EXPECT_EQ(ParseRootRecord(ToText(root).value())->name, "x");
  const Claim claim{root.job, Id128::FromName("r"), "host", Id128::FromName("b"), 4026531836, 77,
                    123456};
  EXPECT_EQ(ParseClaim(ToText(claim).value())->pid_namespace, 4026531836u);
  EXPECT_EQ(ParseLatest(ToText(Latest{"step-000000000001-00000001", 1}).value())->step, 1);
  EXPECT_EQ(ParseQuarantine(
                ToText(std::vector<QuarantineEntry>{{"step-000000000001-00000001", "why"}}).value())
                ->at(0)
                .reason,
            "why");
  EXPECT_EQ(
      ParseHooks(
          ToText(HooksRecord{"step-000000000001-00000001", {{"gate", "veto", "nan"}}}).value())
          ->hooks.at(0)
          .result,
      "veto");
  EXPECT_FALSE(
      ParseHooks(ToText(HooksRecord{"step-000000000001-00000001", {{"gate", "maybe", ""}}}).value())
          .ok());
  EXPECT_FALSE(ToText(RootRecord{root.job, "\xff"}).ok());
}

TEST(Crcs, OfChunksMakeTheCrcOfTheWhole) {
  // "123456789" is e3069283; any cut of it must combine to that.
  for (size_t cut = 0; cut <= 9; ++cut) {
    const std::string_view text = "123456789";
    EXPECT_EQ(CombineCrcs(Crc32c(text.substr(0, cut)), Crc32c(text.substr(cut)), 9 - cut),
              0xe3069283u);
  }
}

TEST(Base64, ReadsBackAndRefusesSloppyText) {
  EXPECT_EQ(ToBase64("foob"), "Zm9vYg==");  // RFC 4648, section 10
  for (const std::string text : {"", "f", "fo", "foo", "foob", "fooba", "foobar"})
    EXPECT_EQ(FromBase64(ToBase64(text)), text);
  for (const std::string_view text : {"Zg", "Zg=", "Zh==", "Z g==", "Zg==\n", "====", "!!!!"})
    EXPECT_FALSE(FromBase64(text).has_value());
}

// Any bytes: a Status, never a crash.
TEST(SmallFiles, SurviveDamage) {
  const uint64_t seed = RandomU64();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::string receipt = ToText(ExampleReceipt()).value(),
                    manifest = ToText(ExampleManifest()).value();
  const std::string claim =
      ToText(Claim{Id128::FromName("a"), Id128::FromName("b"), "h", {}, 1, 2, 3}).value();
  for (int round = 0; round < 5'000; ++round) {
    std::string text = round % 3 == 0 ? receipt : round % 3 == 1 ? manifest : claim;
    for (uint64_t edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % (text.size() - 30);
      if (random() % 2 == 0)
        text[at] = "{}[]\",:0-\\ae"[random() % 12];
      else
        text.insert(at, 1, "{}[]\",:0-\\"[random() % 10]);
    }
    if (round % 3 != 2) {  // past the checksum, to the parser behind it
      char digits[9];
      snprintf(digits, sizeof digits, "%08x",
               Crc32c(std::string_view(text).substr(0, text.size() - 11)));
      text.replace(text.size() - 11, 8, digits);
    }
    (void)ParseReceipt(text);
    (void)ParseManifest(text);
    (void)ParseClaim(text);
    (void)RawMembers(text);
  }
}

}  // namespace
}  // namespace outlast
