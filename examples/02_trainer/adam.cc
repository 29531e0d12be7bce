#include "adam.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>

float LearningRate(const AdamOptions& options, int64_t step, int64_t steps) {
  if (step < options.warmup_steps) {
    return options.learning_rate * static_cast<float>(step + 1) /
           static_cast<float>(options.warmup_steps);
  }
  const auto falling = static_cast<double>(std::max<int64_t>(1, steps - options.warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(step - options.warmup_steps) / falling);
  return options.learning_rate *
         static_cast<float>(0.1 + 0.45 * (1 + std::cos(std::numbers::pi * progress)));
}

void AdamUpdate(const AdamOptions& options, float learning_rate, int64_t step,
                std::span<const float> gradients, std::span<float> parameters,
                std::span<float> first_moment, std::span<float> second_moment) {
  const auto count = static_cast<double>(step + 1);
  const float correction1 =
      static_cast<float>(1 / (1 - std::pow(static_cast<double>(options.beta1), count)));
  const float correction2 =
      static_cast<float>(1 / (1 - std::pow(static_cast<double>(options.beta2), count)));
  const float beta1 = options.beta1;
  const float beta2 = options.beta2;
  const float epsilon = options.epsilon;
  // Raw pointers that do not overlap: with them the loop vectorises.
  const float* __restrict gradient = gradients.data();
  float* __restrict parameter = parameters.data();
  float* __restrict first = first_moment.data();
  float* __restrict second = second_moment.data();
  for (size_t i = 0; i < gradients.size(); ++i) {
    first[i] = beta1 * first[i] + (1 - beta1) * gradient[i];
    second[i] = beta2 * second[i] + (1 - beta2) * gradient[i] * gradient[i];
    parameter[i] -=
        learning_rate * (first[i] * correction1) / (std::sqrt(second[i] * correction2) + epsilon);
  }
}
