// A byte-level language model: the last `context` bytes, each embedded, side by side, through two
// hidden layers (tanh), to a softmax over the next byte. Bengio et al. 2003, "A Neural
// Probabilistic Language Model", on bytes. Forward and backward by hand, float32, one thread.
//
// The model owns no parameters: these, their gradients and the optimizer's moments are flat arrays
// of the caller, who registers them with the checkpointer, one region a row of TensorTable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

struct ModelShape {
  static constexpr int kBytes = 256;  // what is read and predicted

  int context = 16;    // bytes that a prediction sees
  int embedding = 32;  // floats a byte
  int hidden = 704;    // floats a hidden layer

  int input() const { return context * embedding; }
};

// One named tensor, a dense row-major slice [offset, offset + size) of each flat array.
struct TensorInfo {
  std::string name;  // "hidden1.weight"
  std::vector<int64_t> shape;
  size_t offset;
  size_t size;
};

// In order of offset, without holes: embedding.weight [256, E], hidden1.weight [C * E, H],
// hidden1.bias [H], hidden2.weight [H, H], hidden2.bias [H], output.weight [H, 256], output.bias
// [256]. Weights are [inputs, outputs].
std::vector<TensorInfo> TensorTable(const ModelShape& shape);

// Floats in each flat array; 1,046,144 for the default shape.
size_t ParameterCount(const ModelShape& shape);

// FLOPs to train on one predicted byte, forward and backward: 6 * weights of the three matrix
// products; 2 a multiply-add, backward twice the forward. The embedding's gather, biases, tanh and
// softmax are not counted. A sample of T predicted bytes costs T times this; 6,217,728 for the
// default shape. FLOPs, not FLOP/s. Source: Kaplan et al. 2020, "Scaling Laws for Neural Language
// Models", section 2.1, without its embedding weights.
int64_t TrainingFlopsPerByte(const ModelShape& shape);

// Fills `parameters` from `seed`: uniform, with the variance that keeps a tanh layer's outputs at
// their scale (Glorot and Bengio 2010); biases 0. The same seed gives the same bits everywhere.
void Initialize(const ModelShape& shape, uint64_t seed, std::span<float> parameters);

// What one pass reads: `context` bytes for each target, one after the other.
struct TokenBatch {
  std::vector<uint8_t> contexts;  // targets.size() * context
  std::vector<uint8_t> targets;
};

// The workspace of forward and backward passes. Results depend on the arguments alone, bit for bit.
// Not for concurrent use.
class Model {
 public:
  explicit Model(const ModelShape& shape) : shape_(shape) {}

  // Overwrites `gradients` with `scale` times the gradient of the batch's summed loss, and returns
  // that sum, unscaled, in nats. scale = 1 / (bytes predicted by all ranks) makes the ranks' sum
  // the gradient of the global mean. An empty batch (all padding) gives 0 and zero gradients.
  double ForwardBackward(std::span<const float> parameters, const TokenBatch& batch, float scale,
                         std::span<float> gradients);

  // The summed loss alone, in nats.
  double Loss(std::span<const float> parameters, const TokenBatch& batch);

 private:
  // The parts of a flat array, or of the array of gradients.
  template <typename Float>
  struct Parts {
    Float* embedding;
    Float* hidden1_weight;
    Float* hidden1_bias;
    Float* hidden2_weight;
    Float* hidden2_bias;
    Float* output_weight;
    Float* output_bias;
  };
  template <typename Float>
  Parts<Float> Split(Float* flat) const;

  double Forward(const Parts<const float>& parameters, const TokenBatch& batch);
  void Dense(int tokens, int inputs, int outputs, const float* input, const float* weight,
             const float* bias, std::vector<float>& output);
  void DenseBackward(int tokens, int inputs, int outputs, const std::vector<float>& input,
                     const float* weight, const std::vector<float>& output_gradient,
                     float* weight_gradient, float* bias_gradient,
                     std::vector<float>& input_gradient);

  ModelShape shape_;
  std::vector<float> input_, hidden1_, hidden2_,
      probability_;  // [tokens, ...]: activations, kept for the backward pass
  std::vector<float> gradient_, next_gradient_;  // [tokens, ...]
  std::vector<float> transposed_, transposed_result_, scratch_;
};
