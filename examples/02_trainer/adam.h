// Adam (Kingma and Ba 2015, algorithm 1) over flat arrays, with a learning rate that warms up and
// then falls.
#pragma once

#include <cstdint>
#include <span>

struct AdamOptions {
  float learning_rate = 4e-3f;  // the highest
  int64_t warmup_steps = 20;    // rises linearly until then
  float beta1 = 0.9f;
  float beta2 = 0.99f;
  float epsilon = 1e-8f;
};

// The learning rate of `step` (the first is 0) of `steps`: up during the warm-up, then along a half
// cosine to a tenth.
float LearningRate(const AdamOptions& options, int64_t step, int64_t steps);

// One update of `parameters` and of both moments (which start at 0), in place. `step` counts from
// 0. All spans have one size. Elementwise: the same inputs give the same bits.
void AdamUpdate(const AdamOptions& options, float learning_rate, int64_t step,
                std::span<const float> gradients, std::span<float> parameters,
                std::span<float> first_moment, std::span<float> second_moment);
