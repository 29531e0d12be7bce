#include "model.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "matmul.h"

namespace {

// tanh by its continued fraction (Lambert 1770), cut after the seventh term: within 1e-4
// everywhere, and unlike std::tanh it vectorises. Beyond the bound, where the fraction leaves [-1,
// 1], it stays at the bound's value.
float FastTanh(float x) {
  constexpr float kBound = 4.97f;
  x = std::clamp(x, -kBound, kBound);
  const float square = x * x;
  const float above = x * (135135.0f + square * (17325.0f + square * (378.0f + square)));
  const float below = 135135.0f + square * (62370.0f + square * (3150.0f + square * 28.0f));
  return above / below;
}

void TanhInPlace(std::vector<float>& values) {
  for (float& value : values) value = FastTanh(value);
}

// gradient *= the derivative of tanh, by its output.
void TanhBackward(const std::vector<float>& output, std::vector<float>& gradient) {
  for (size_t i = 0; i < output.size(); ++i) gradient[i] *= 1.0f - output[i] * output[i];
}

// Turns one row of logits into probabilities and returns the loss of `target`, in nats.
double Softmax(std::span<float> row, int target) {
  const float largest = *std::max_element(row.begin(), row.end());
  const double target_logit = row[static_cast<size_t>(target)] - largest;
  double sum = 0;
  for (float& value : row) {
    value = std::exp(value - largest);
    sum += value;
  }
  const float factor = static_cast<float>(1 / sum);
  for (float& value : row) value *= factor;
  return std::log(sum) - target_logit;
}

void AddTensor(std::vector<TensorInfo>& table, const char* name, std::vector<int64_t> dimensions) {
  const size_t offset = table.empty() ? 0 : table.back().offset + table.back().size;
  size_t size = 1;
  for (const int64_t dimension : dimensions) size *= static_cast<size_t>(dimension);
  table.push_back({name, std::move(dimensions), offset, size});
}

}  // namespace

std::vector<TensorInfo> TensorTable(const ModelShape& shape) {
  std::vector<TensorInfo> table;
  AddTensor(table, "embedding.weight", {ModelShape::kBytes, shape.embedding});
  AddTensor(table, "hidden1.weight", {shape.input(), shape.hidden});
  AddTensor(table, "hidden1.bias", {shape.hidden});
  AddTensor(table, "hidden2.weight", {shape.hidden, shape.hidden});
  AddTensor(table, "hidden2.bias", {shape.hidden});
  AddTensor(table, "output.weight", {shape.hidden, ModelShape::kBytes});
  AddTensor(table, "output.bias", {ModelShape::kBytes});
  return table;
}

size_t ParameterCount(const ModelShape& shape) {
  const TensorInfo last = TensorTable(shape).back();
  return last.offset + last.size;
}

int64_t TrainingFlopsPerByte(const ModelShape& shape) {
  const int64_t hidden = shape.hidden;
  return 6 * (shape.input() * hidden + hidden * hidden + hidden * ModelShape::kBytes);
}

void Initialize(const ModelShape& shape, uint64_t seed, std::span<float> parameters) {
  std::mt19937_64 generator(seed);
  for (const TensorInfo& tensor : TensorTable(shape)) {
    const bool is_embedding = tensor.offset == 0;
    const bool is_bias = tensor.shape.size() == 1;
    const double fans = is_bias ? 1 : static_cast<double>(tensor.shape[0] + tensor.shape[1]);
    // An embedding is looked up, not multiplied: it keeps a variance of 1.
    const double bound = is_bias ? 0 : is_embedding ? std::sqrt(3.0) : std::sqrt(6 / fans);
    for (float& value : parameters.subspan(tensor.offset, tensor.size)) {
      const double unit = static_cast<double>(generator() >> 11) * 0x1p-53;  // [0, 1)
      value = static_cast<float>((2 * unit - 1) * bound);
    }
  }
}

template <typename Float>
Model::Parts<Float> Model::Split(Float* flat) const {
  const std::vector<TensorInfo> table = TensorTable(shape_);
  return {flat + table[0].offset, flat + table[1].offset, flat + table[2].offset,
          flat + table[3].offset, flat + table[4].offset, flat + table[5].offset,
          flat + table[6].offset};
}

// output[tokens, outputs] = input * weight + bias.
void Model::Dense(int tokens, int inputs, int outputs, const float* input, const float* weight,
                  const float* bias, std::vector<float>& output) {
  output.resize(static_cast<size_t>(tokens) * static_cast<size_t>(outputs));
  for (int token = 0; token < tokens; ++token)
    std::copy_n(bias, outputs, &output[static_cast<size_t>(token) * outputs]);
  MultiplyAdd(tokens, outputs, inputs, {input, inputs, 1}, weight, output.data(), scratch_);
}

void Model::DenseBackward(int tokens, int inputs, int outputs, const std::vector<float>& input,
                          const float* weight, const std::vector<float>& output_gradient,
                          float* weight_gradient, float* bias_gradient,
                          std::vector<float>& input_gradient) {
  for (int token = 0; token < tokens; ++token) {
    const float* row = &output_gradient[static_cast<size_t>(token) * outputs];
    for (int i = 0; i < outputs; ++i) bias_gradient[i] += row[i];
  }
  MultiplyAdd(inputs, outputs, tokens, {input.data(), 1, inputs}, output_gradient.data(),
              weight_gradient, scratch_);
  // The gradient of the input is computed transposed, weight * gradient^T: so the small matrices
  // are turned, not the weight.
  transposed_.resize(output_gradient.size());
  Transpose(tokens, outputs, output_gradient.data(), transposed_.data());
  transposed_result_.assign(static_cast<size_t>(tokens) * inputs, 0.0f);
  MultiplyAdd(inputs, tokens, outputs, {weight, outputs, 1}, transposed_.data(),
              transposed_result_.data(), scratch_);
  input_gradient.resize(transposed_result_.size());
  Transpose(inputs, tokens, transposed_result_.data(), input_gradient.data());
}

double Model::Forward(const Parts<const float>& parameters, const TokenBatch& batch) {
  const int tokens = static_cast<int>(batch.targets.size());
  input_.resize(static_cast<size_t>(tokens) * shape_.input());
  for (size_t i = 0; i < batch.contexts.size(); ++i) {
    std::copy_n(parameters.embedding + batch.contexts[i] * shape_.embedding, shape_.embedding,
                &input_[i * shape_.embedding]);
  }
  Dense(tokens, shape_.input(), shape_.hidden, input_.data(), parameters.hidden1_weight,
        parameters.hidden1_bias, hidden1_);
  TanhInPlace(hidden1_);
  Dense(tokens, shape_.hidden, shape_.hidden, hidden1_.data(), parameters.hidden2_weight,
        parameters.hidden2_bias, hidden2_);
  TanhInPlace(hidden2_);
  Dense(tokens, shape_.hidden, ModelShape::kBytes, hidden2_.data(), parameters.output_weight,
        parameters.output_bias, probability_);
  double loss = 0;
  for (size_t token = 0; token < batch.targets.size(); ++token) {
    loss += Softmax(std::span(probability_).subspan(token * ModelShape::kBytes, ModelShape::kBytes),
                    batch.targets[token]);
  }
  return loss;
}

double Model::Loss(std::span<const float> parameters, const TokenBatch& batch) {
  return Forward(Split(parameters.data()), batch);
}

double Model::ForwardBackward(std::span<const float> parameters, const TokenBatch& batch,
                              float scale, std::span<float> gradients) {
  const Parts<const float> parts = Split(parameters.data());
  const Parts<float> out = Split(gradients.data());
  const int tokens = static_cast<int>(batch.targets.size());
  const double loss = Forward(parts, batch);

  std::fill(gradients.begin(), gradients.end(), 0.0f);
  gradient_ = probability_;  // softmax with cross-entropy: probability - (1 at the target)
  for (size_t token = 0; token < batch.targets.size(); ++token) {
    gradient_[token * ModelShape::kBytes + batch.targets[token]] -= 1.0f;
  }
  for (float& value : gradient_) value *= scale;
  DenseBackward(tokens, shape_.hidden, ModelShape::kBytes, hidden2_, parts.output_weight, gradient_,
                out.output_weight, out.output_bias, next_gradient_);
  TanhBackward(hidden2_, next_gradient_);
  DenseBackward(tokens, shape_.hidden, shape_.hidden, hidden1_, parts.hidden2_weight,
                next_gradient_, out.hidden2_weight, out.hidden2_bias, gradient_);
  TanhBackward(hidden1_, gradient_);
  DenseBackward(tokens, shape_.input(), shape_.hidden, input_, parts.hidden1_weight, gradient_,
                out.hidden1_weight, out.hidden1_bias, next_gradient_);
  for (size_t i = 0; i < batch.contexts.size(); ++i) {
    float* target = out.embedding + batch.contexts[i] * shape_.embedding;
    for (int j = 0; j < shape_.embedding; ++j)
      target[j] += next_gradient_[i * shape_.embedding + j];
  }
  return loss;
}
