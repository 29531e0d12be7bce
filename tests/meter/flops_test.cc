// Expected values: worked out by hand from the rule in flops.h, or the published goldens that are
// named.
#include "outlast/meter/flops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/paths.h"

namespace outlast {
namespace {

constexpr FlopOptions kCausal = {.attention = AttentionCount::kCausal};
constexpr FlopOptions kFull = {.attention = AttentionCount::kFull};

DenseTransformerShape Llama3_8B(int64_t sequence) {
  return {.layers = 32,
          .hidden = 4096,
          .ffn = 14336,
          .heads = 32,
          .kv_heads = 8,
          .head_dim = 128,
          .vocab = 128256,
          .sequence = sequence};
}

DenseTransformerShape Gpt2Small() {
  return {.layers = 12,
          .hidden = 768,
          .ffn = 3072,
          .heads = 12,
          .kv_heads = 12,
          .head_dim = 64,
          .vocab = 50257,
          .gated = false,
          .sequence = 1024};
}

int64_t ModelFlops(const DenseTransformerShape& shape, const FlopOptions& options) {
  return FlopsOf(shape, options).value().model;
}

TEST(Flops, OfLlama3At8192TokensAreExact) {
  // 6 * 7,504,658,432 weights in GEMMs = 45,027,950,592; the core is 12 * 32 * 32 * 128 * 8192 =
  // 12,884,901,888 in full.
  EXPECT_EQ(ModelFlops(Llama3_8B(8192), kCausal), 51'470'401'536);
  EXPECT_EQ(ModelFlops(Llama3_8B(8192), kFull), 57'912'852'480);
}

TEST(Flops, OfPublishedModelsMatchToFiveDigits) {
  struct Case {
    DenseTransformerShape shape;
    double causal, full;
  };
  const Case cases[] = {
      {{80, 8192, 28672, 64, 8, 128, 128256, true, 8192}, 4.4922e11, 4.8143e11},  // Llama-3-70B
      {{126, 16384, 53248, 128, 8, 128, 128256, true, 8192},
       2.5240e12,
       2.6254e12},                                                               // Llama-3.1-405B
      {{80, 8192, 28672, 64, 8, 128, 32000, true, 4096}, 4.2839e11, 4.4449e11},  // Llama-2-70B
      {{96, 12288, 49152, 96, 96, 128, 51200, false, 2048}, 0, 1.0764e12},       // GPT-3 175B
  };
  for (const Case& each : cases) {
    if (each.causal > 0) {
      EXPECT_NEAR(static_cast<double>(ModelFlops(each.shape, kCausal)) / each.causal, 1, 2e-5);
    }
    EXPECT_NEAR(static_cast<double>(ModelFlops(each.shape, kFull)) / each.full, 1, 5e-5);
  }
}

TEST(Flops, OfGpt2AreThreeTimesItsForwardPass) {
  // Forward of one sequence: 291,648,307,200 (nanoGPT's sizing notebook, 124M, V 50257, full
  // attention).
  EXPECT_EQ(ModelFlops(Gpt2Small(), kFull) * 1024, 3 * 291'648'307'200);
}

TEST(Flops, CountsTheHeadEvenIfTied) {
  // GPT-2 ties its head to the embedding: 6 * h * V = 231,584,256 FLOPs a token belong to the head
  // all the same.
  DenseTransformerShape small_vocab = Gpt2Small();
  small_vocab.vocab = 1;
  EXPECT_EQ(ModelFlops(Gpt2Small(), kFull) - ModelFlops(small_vocab, kFull), 6ll * 768 * 50256);
}

TEST(Flops, CountTheEmbeddingOnlyWhereTheConventionSaysSo) {
  const FlopCount with = FlopsOf(Llama3_8B(8192), {.embedding = true}).value();
  EXPECT_EQ(with.model - ModelFlops(Llama3_8B(8192), kCausal), 6ll * 4096 * 128256);
  EXPECT_EQ(ToString(with.convention), "causal attention, embedding in, router out, recompute out");
}

TEST(Flops, MatchNemosGoldensOfOneBatch) {
  // gbs 1, S 128, h 768, L 12, ffn 3072, 12 heads; causal, but BERT full.
  struct Case {
    int64_t vocab;
    bool gated;
    FlopOptions options;
    int64_t want;
  };
  const Case cases[] = {
      {51200, false, kCausal, 96'334'774'272},  {32000, true, kCausal, 106'753'425'408},
      {128256, true, kCausal, 163'527'524'352}, {256000, false, kCausal, 217'130'729'472},
      {29000, false, kFull, 84'146'651'136},
  };
  for (const Case& each : cases) {
    const DenseTransformerShape shape = {12, 768, 3072, 12, 12, 64, each.vocab, each.gated, 128};
    EXPECT_EQ(ModelFlops(shape, each.options) * 128, each.want) << "vocab " << each.vocab;
  }
}

TEST(Flops, PackedDocumentsNeverAttendAcross) {
  // Goldens of verl, less the embedding that it counts (its own numbers with .embedding). Causal.
  struct Case {
    DenseTransformerShape shape;
    double short_with, short_without, long_with, long_without;
  };
  const Case cases[] = {
      {{32, 4096, 11008, 32, 32, 128, 32000, true, 0},  // Llama-2-7B
       149226491215872,
       146407918927872,
       536372695793664,
       526709019377664},
      {{28, 3584, 18944, 28, 4, 128, 152064, true, 0},  // Qwen2.5-7B
       167073690943488,
       155354067369984,
       591764889010176,
       551583322472448},
      {{36, 4096, 12288, 32, 8, 128, 151936, true, 0},  // Qwen3-8B
       180997438046208,
       167614856822784,
       648394032807936,
       602510897184768},
  };
  const std::vector<int64_t> mixed = {512, 1024, 2048};
  const std::vector<int64_t> equal = {4096, 4096, 4096};
  for (const Case& each : cases) {
    EXPECT_EQ(PackedFlops(each.shape, mixed, {.embedding = true}).value(), each.short_with);
    EXPECT_EQ(PackedFlops(each.shape, mixed).value(), each.short_without);
    EXPECT_EQ(PackedFlops(each.shape, equal, {.embedding = true}).value(), each.long_with);
    EXPECT_EQ(PackedFlops(each.shape, equal).value(), each.long_without);
  }
}

TEST(Flops, RecomputationChangesHardwareFlopsOnly) {
  const FlopCount none = FlopsOf(Llama3_8B(8192)).value();
  const FlopCount full = FlopsOf(Llama3_8B(8192), {.recompute = Recompute::kFull}).value();
  const FlopCount selective =
      FlopsOf(Llama3_8B(8192), {.recompute = Recompute::kSelective}).value();

  EXPECT_EQ(none.hardware, none.model);
  EXPECT_EQ(full.model, none.model);
  // 2 * 6,979,321,856 weights of the layers + 2,147,483,648 of the core = 16,106,127,360 more.
  EXPECT_EQ(full.hardware - full.model, 16'106'127'360);
  EXPECT_NEAR(static_cast<double>(full.hardware) / static_cast<double>(full.model), 1.3129, 5e-5);
  EXPECT_EQ(selective.hardware - selective.model, 2'147'483'648);
}

TEST(Flops, OfALinearLayerDependOnWhetherItsInputHasAGradient) {
  // 1024 -> 1024, 32 rows: forward 67,108,864.
  EXPECT_EQ(FlopsOf(MlpShape{.widths = {1024, 1024}}).value().model * 32, 201'326'592);
  EXPECT_EQ(
      FlopsOf(MlpShape{.widths = {1024, 1024}, .input_has_gradient = false}).value().model * 32,
      134'217'728);
}

TEST(Flops, OfAnMlpAreCountedASample) {
  const FlopCount count = FlopsOf(MlpShape{.widths = {512, 1024, 1024, 256}}).value();
  EXPECT_EQ(count.model, 6 * (512 * 1024 + 1024 * 1024 + 1024 * 256));
  EXPECT_EQ(count.unit, FlopUnit::kSample);
}

TEST(Flops, RefuseAShapeByTheNameOfItsField) {
  DenseTransformerShape shape = Llama3_8B(8192);
  shape.ffn = 0;
  EXPECT_EQ(FlopsOf(shape).status().message(), "DenseTransformerShape.ffn is 0, wanted at least 1");
  shape = Llama3_8B(8192);
  shape.kv_heads = 5;
  EXPECT_EQ(FlopsOf(shape).status().message(),
            "DenseTransformerShape.kv_heads is 5, wanted a divisor of heads (32)");
  EXPECT_EQ(FlopsOf(Llama3_8B(0)).status().message(),
            "DenseTransformerShape.sequence is 0, wanted at least 1");
  EXPECT_EQ(FlopsOf(MlpShape{.widths = {3}}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FlopsOf(MlpShape{.widths = {3, -1}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const std::vector<int64_t> empty_document = {512, 0};
  EXPECT_EQ(PackedFlops(Llama3_8B(0), empty_document).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Flops, ThatPass2To63AreAnErrorNotANegativeNumber) {
  DenseTransformerShape shape = Llama3_8B(8192);
  shape.hidden = shape.ffn = int64_t{1} << 32;
  EXPECT_EQ(FlopsOf(shape).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FlopsOf(Llama3_8B(int64_t{1} << 50)).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FlopsOf(MlpShape{.widths = {int64_t{1} << 40, int64_t{1} << 40}}).status().code(),
            absl::StatusCode::kOutOfRange);
}

TEST(Flops, KeepTheirInvariantsForAnyShape) {
  const unsigned seed = 20260;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int i = 0; i < 500; ++i) {
    const int64_t kv_heads = pick(1, 8);
    DenseTransformerShape shape = {.layers = pick(1, 100),
                                   .hidden = pick(1, 8192),
                                   .ffn = pick(1, 30000),
                                   .heads = kv_heads * pick(1, 8),
                                   .kv_heads = kv_heads,
                                   .head_dim = pick(1, 256),
                                   .vocab = pick(1, 200000),
                                   .gated = pick(0, 1) == 1,
                                   .sequence = pick(1, 1 << 20)};
    const FlopCount count = FlopsOf(shape, {.recompute = Recompute::kFull}).value();
    EXPECT_LE(count.model, count.hardware);  // MFU <= HFU

    DenseTransformerShape longer = shape;
    longer.sequence *= 2;
    EXPECT_GT(ModelFlops(longer, kCausal), count.model);

    // Grouped queries leave the core alone.
    DenseTransformerShape all_heads = shape;
    all_heads.kv_heads = shape.heads;
    EXPECT_EQ(ModelFlops(all_heads, kFull) - ModelFlops(all_heads, kCausal),
              ModelFlops(shape, kFull) - ModelFlops(shape, kCausal));

    // Packed <= unpacked at equal tokens, and equal for a single document; linear in the number of
    // equal documents.
    const std::vector<int64_t> one = {4096};
    const std::vector<int64_t> split = {1000, 3096};
    const std::vector<int64_t> three = {4096, 4096, 4096};
    const double whole = PackedFlops(shape, one).value();
    shape.sequence = 4096;
    EXPECT_DOUBLE_EQ(whole, static_cast<double>(ModelFlops(shape, kCausal)) * 4096);
    EXPECT_LT(PackedFlops(shape, split).value(), whole);
    EXPECT_DOUBLE_EQ(PackedFlops(shape, three).value(), 3 * whole);
  }
}

// Rows of llm-foundry's benchmarking page. Its form is 6 N + 12 L h S with all parameters; HFU is
// 4/3 of MFU with activation checkpointing.
TEST(Flops, ReproduceEveryPublishedMptRowWithin0_01Points) {
  const std::string path = (testing::SharedFolder() / "data/mpt_216.csv").string();
  std::ifstream file(path);
  if (!file) GTEST_SKIP() << "the table of published rows is not here: " << path;
  const auto peak_of = [](const std::string& gpu, const std::string& precision) {
    if (gpu.starts_with("a100")) return 312e12;
    return precision.find("fp8") != std::string::npos ? 1979e12 : 989.5e12;
  };
  std::string line;
  std::getline(file, line);
  int rows = 0;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::vector<std::string> row;
    for (std::string field; std::getline(fields, field, ',');) row.push_back(field);
    ASSERT_EQ(row.size(), 12u) << line;
    const FlopCount count = FlopsOfParameters({.parameters = std::stoll(row[7]),
                                               .layers = std::stoll(row[1]),
                                               .attention_width = std::stoll(row[2]),
                                               .sequence = std::stoll(row[3])})
                                .value();
    const double mfu = static_cast<double>(count.model) * std::stod(row[8]) /
                       (std::stod(row[4]) * peak_of(row[5], row[6])) * 100;
    EXPECT_NEAR(mfu, std::stod(row[9]), 0.01) << line;
    const double hfu = row[11].starts_with("T") ? mfu * 4 / 3 : mfu;
    EXPECT_NEAR(hfu, std::stod(row[10]), 0.01) << line;
    ++rows;
  }
  EXPECT_EQ(rows, 216);
}

}  // namespace
}  // namespace outlast
