#include "model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "adam.h"
#include "corpus.h"
#include "matmul.h"

namespace {

constexpr ModelShape kSmall{.context = 3, .embedding = 5, .hidden = 19};
constexpr char kTextFolder[] = "/usr/share/common-licenses";

std::vector<float> Initialized(const ModelShape& shape) {
  std::vector<float> parameters(ParameterCount(shape));
  Initialize(shape, 1, parameters);
  return parameters;
}

TokenBatch RandomBatch(const ModelShape& shape, int tokens) {
  std::mt19937 generator(5);
  TokenBatch batch;
  for (int i = 0; i < tokens * shape.context; ++i) batch.contexts.push_back(generator() & 255);
  for (int i = 0; i < tokens; ++i) batch.targets.push_back(generator() & 255);
  return batch;
}

TEST(MultiplyAdd, EqualsTheSumOfProductsForRaggedSizes) {
  const int rows = 13, columns = 21, inner = 7;  // no multiple of any tile
  std::vector<float> a(rows * inner), b(inner * columns), c(rows * columns, 1.0f), scratch;
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 5);
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % 7);

  MultiplyAdd(rows, columns, inner, {a.data(), 1, rows}, b.data(), c.data(),
              scratch);  // a read as its transpose

  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      float sum = 1;
      for (int k = 0; k < inner; ++k)
        sum += a[static_cast<size_t>(k * rows + i)] * b[static_cast<size_t>(k * columns + j)];
      EXPECT_EQ(c[static_cast<size_t>(i * columns + j)],
                sum);  // small whole numbers: exact in any order
    }
  }
}

TEST(TensorTable, CoversTheFlatArrayWithoutHoles) {
  size_t end = 0;
  for (const TensorInfo& tensor : TensorTable({})) {
    EXPECT_EQ(tensor.offset, end) << tensor.name;
    EXPECT_EQ(
        std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>()),
        static_cast<int64_t>(tensor.size));
    end += tensor.size;
  }
  // 256*32 + 512*704 + 704 + 704*704 + 704 + 704*256 + 256
  EXPECT_EQ(end, 1'046'144u);
  EXPECT_EQ(ParameterCount({}), end);
}

TEST(TrainingFlopsPerByte, IsSixTimesTheWeightsOfTheProducts) {
  EXPECT_EQ(TrainingFlopsPerByte({}), 6 * (512 * 704 + 704 * 704 + 704 * 256));
}

TEST(Model, OfZeroWeightsPredictsAllBytesAlike) {
  const std::vector<float> zeros(ParameterCount(kSmall), 0.0f);
  EXPECT_NEAR(Model(kSmall).Loss(zeros, RandomBatch(kSmall, 4)), 4 * std::log(256.0), 1e-5);
}

// Central differences, every element of every tensor. In float32 the loss of 7 bytes carries an
// error of some 1e-5, which the division by 2 * kStep makes 5e-4.
TEST(Model, GradientEqualsTheFiniteDifferencesOfEachTensor) {
  constexpr float kStep = 1e-2f;
  std::vector<float> parameters = Initialized(kSmall);
  const TokenBatch batch = RandomBatch(kSmall, 7);
  Model model(kSmall);
  std::vector<float> gradients(parameters.size());
  model.ForwardBackward(parameters, batch, 1.0f, gradients);

  for (const TensorInfo& tensor : TensorTable(kSmall)) {
    double largest = 0;
    for (size_t i = tensor.offset; i < tensor.offset + tensor.size; ++i) {
      const float saved = parameters[i];
      parameters[i] = saved + kStep;
      const double above = model.Loss(parameters, batch);
      parameters[i] = saved - kStep;
      const double below = model.Loss(parameters, batch);
      parameters[i] = saved;
      EXPECT_NEAR(gradients[i], (above - below) / (2 * kStep), 2e-3)
          << tensor.name << " element " << i - tensor.offset;
      largest = std::max(largest, std::abs(static_cast<double>(gradients[i])));
    }
    EXPECT_GT(largest, 0.1) << tensor.name;  // the tolerance is small against what is compared
  }
}

TEST(Model, GivesTheSameBitsWhateverItComputedBefore) {
  const std::vector<float> parameters = Initialized(kSmall);
  const TokenBatch batch = RandomBatch(kSmall, 9);
  std::vector<float> first(parameters.size()), second(parameters.size(), 3.0f);
  Model fresh(kSmall), used(kSmall);
  used.ForwardBackward(parameters, RandomBatch(kSmall, 31), 0.5f, second);

  EXPECT_EQ(fresh.ForwardBackward(parameters, batch, 0.1f, first),
            used.ForwardBackward(parameters, batch, 0.1f, second));
  EXPECT_EQ(first, second);
}

TEST(Model, OfAnEmptyBatchHasNoLossAndNoGradient) {
  const std::vector<float> parameters = Initialized(kSmall);
  std::vector<float> gradients(parameters.size(), 3.0f);
  EXPECT_EQ(Model(kSmall).ForwardBackward(parameters, {}, 1.0f, gradients), 0);
  EXPECT_EQ(gradients, std::vector<float>(parameters.size(), 0.0f));
}

TEST(AdamUpdate, MovesByTheLearningRateAgainstTheGradientsSignAtFirst) {
  const std::vector<float> gradients{0.5f, -20.0f, 0.0f};
  std::vector<float> parameters{1, 1, 1}, first(3), second(3);
  AdamUpdate({}, 0.01f, 0, gradients, parameters, first, second);
  EXPECT_NEAR(parameters[0], 0.99f,
              1e-6);  // both moments are corrected to g and g^2: the quotient is the sign
  EXPECT_NEAR(parameters[1], 1.01f, 1e-6);
  EXPECT_EQ(parameters[2], 1.0f);
}

TEST(LearningRate, WarmsUpThenFallsToATenth) {
  const AdamOptions options{.learning_rate = 1.0f, .warmup_steps = 20};
  EXPECT_FLOAT_EQ(LearningRate(options, 0, 300), 0.05f);
  EXPECT_FLOAT_EQ(LearningRate(options, 19, 300), 1.0f);
  EXPECT_FLOAT_EQ(LearningRate(options, 160, 300), 0.55f);  // halfway down
  EXPECT_FLOAT_EQ(LearningRate(options, 300, 300), 0.1f);
}

TEST(ReadTexts, TakesEachContentOnceInOrderOfName) {
  std::string pattern = (std::filesystem::temp_directory_path() / "corpus_XXXXXX").string();
  const std::filesystem::path folder = mkdtemp(pattern.data());
  std::ofstream(folder / "b") << "second ";
  std::ofstream(folder / "a") << "first ";
  std::ofstream(folder / "c") << "first ";
  std::filesystem::create_symlink("b", folder / "d");
  std::filesystem::create_directory(folder / "e");

  EXPECT_EQ(ReadTexts(folder), "first second ");
  EXPECT_EQ(ReadTexts(folder / "none"), "");
  std::filesystem::remove_all(folder);
}

TEST(UnigramEntropy, IsInNats) {
  EXPECT_NEAR(UnigramEntropy("abab"), std::log(2.0), 1e-12);
  EXPECT_EQ(UnigramEntropy("aaaa"), 0);
  EXPECT_EQ(UnigramEntropy(""), 0);
}

TEST(Window, PredictsEachByteBehindTheFirstContextOnce) {
  const Window window{.context = 3, .targets = 2};
  EXPECT_EQ(SampleCount(2, window), 0);
  EXPECT_EQ(SampleCount(8, window), 2);  // 3 of context, 2 * 2 targets, 1 left over

  const std::vector<int64_t> ids{1, -1, 0};  // with padding
  const TokenBatch batch = MakeBatch("abcdefgh", window, ids);
  EXPECT_EQ(std::string(batch.targets.begin(), batch.targets.end()), "fgde");
  EXPECT_EQ(std::string(batch.contexts.begin(), batch.contexts.end()), "cdedefabcbcd");
}

TEST(Training, BringsTheLossBelowTheTextsUnigramEntropy) {
  const std::string text = ReadTexts(kTextFolder);
  const ModelShape shape;
  const Window window{.context = shape.context};
  const int64_t samples = SampleCount(static_cast<int64_t>(text.size()), window);
  if (samples == 0) GTEST_SKIP() << kTextFolder << " has no text";
  std::vector<float> parameters = Initialized(shape);
  std::vector<float> gradients(parameters.size()), first(parameters.size()),
      second(parameters.size());
  Model model(shape);
  std::mt19937_64 generator(1);
  constexpr int kSteps = 80;
  constexpr int kSamples = 8;

  double last_loss = 0;  // mean a byte over the last quarter
  for (int step = 0; step < kSteps; ++step) {
    std::vector<int64_t> ids(kSamples);
    for (int64_t& id : ids) id = static_cast<int64_t>(generator() % static_cast<uint64_t>(samples));
    const float scale = 1.0f / static_cast<float>(kSamples * window.targets);
    const double loss =
        model.ForwardBackward(parameters, MakeBatch(text, window, ids), scale, gradients) * scale;
    const AdamOptions adam;
    AdamUpdate(adam, LearningRate(adam, step, kSteps), step, gradients, parameters, first, second);
    if (step >= kSteps * 3 / 4) last_loss += loss / (kSteps / 4);
  }

  EXPECT_LT(last_loss, UnigramEntropy(text) - 0.2);
  RecordProperty("loss", std::to_string(last_loss));
}

}  // namespace
