// Trains the example's model alone, in one process, with the batches of all ranks summed one after
// the other, and prints the loss, the text's unigram entropy and what a step costs.
//   model_check [STEPS [SAMPLES_A_RANK [RANKS [LEARNING_RATE]]]]
// Built with -O3 -march=x86-64-v3 -fno-math-errno -fno-trapping-math (the last two let square roots
// and clamps vectorise).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "adam.h"
#include "corpus.h"
#include "model.h"

namespace {

double Argument(int argc, char** argv, int index, double otherwise) {
  return index < argc ? std::strtod(argv[index], nullptr) : otherwise;
}

double Milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

}  // namespace

int main(int argc, char** argv) {
  const auto steps = static_cast<int64_t>(Argument(argc, argv, 1, 300));
  const auto samples = static_cast<size_t>(Argument(argc, argv, 2, 16));
  const auto ranks = static_cast<size_t>(Argument(argc, argv, 3, 4));
  AdamOptions adam;
  adam.learning_rate = static_cast<float>(Argument(argc, argv, 4, adam.learning_rate));

  const std::string text = ReadTexts("/usr/share/common-licenses");
  const ModelShape shape;
  const Window window{.context = shape.context};
  std::vector<int64_t> order(
      static_cast<size_t>(SampleCount(static_cast<int64_t>(text.size()), window)));
  if (order.empty()) {
    std::fprintf(stderr, "/usr/share/common-licenses: no text found\n");
    return 1;
  }
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));

  const size_t count = ParameterCount(shape);
  std::vector<float> parameters(count), gradients(count), sum(count), first(count), second(count);
  Initialize(shape, 1, parameters);
  Model model(shape);
  std::printf("text %zu bytes, samples %zu, parameters %zu, unigram entropy %.4f nats/byte\n",
              text.size(), order.size(), count, UnigramEntropy(text));
  const double bytes = static_cast<double>(samples * ranks) * window.targets;
  std::chrono::steady_clock::duration passes{}, updates{};
  double last = 0;
  for (int64_t step = 0; step < steps; ++step) {
    double loss = 0;
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (size_t rank = 0; rank < ranks; ++rank) {
      std::vector<int64_t> ids;
      for (size_t i = 0; i < samples; ++i)
        ids.push_back(order[(static_cast<size_t>(step) * ranks * samples + rank * samples + i) %
                            order.size()]);
      const auto begin = std::chrono::steady_clock::now();
      loss += model.ForwardBackward(parameters, MakeBatch(text, window, ids),
                                    static_cast<float>(1 / bytes), gradients);
      passes += std::chrono::steady_clock::now() - begin;
      for (size_t i = 0; i < count; ++i) sum[i] += gradients[i];
    }
    const auto begin = std::chrono::steady_clock::now();
    AdamUpdate(adam, LearningRate(adam, step, steps), step, sum, parameters, first, second);
    updates += std::chrono::steady_clock::now() - begin;
    last += loss / bytes;
    if (step == 0 || (step + 1) % 25 == 0) {
      std::printf("step %4lld  mean loss %.4f\n", static_cast<long long>(step + 1),
                  last / (step == 0   ? 1
                          : step < 25 ? 24
                                      : 25));
      last = 0;
    }
  }
  const double norm =
      std::inner_product(parameters.begin(), parameters.end(), parameters.begin(), 0.0);
  std::printf("parameters' squared norm, to compare runs bit by bit: %a\n", norm);
  std::printf("a rank and step: forward and backward %.2f ms (%.1f GFLOP/s), update %.2f ms\n",
              Milliseconds(passes) / static_cast<double>(steps * static_cast<int64_t>(ranks)),
              bytes * static_cast<double>(steps) *
                  static_cast<double>(TrainingFlopsPerByte(shape)) / Milliseconds(passes) / 1e6,
              Milliseconds(updates) / static_cast<double>(steps));
  return 0;
}
