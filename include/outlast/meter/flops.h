// How many floating-point operations a training step is worth, and by which convention that was
// counted.
//
// Rule (2 FLOPs a multiply-add, backward = 2 x forward): training FLOPs a token = 6 * weights of
// every GEMM that the token passes + attention's core. Counted: query, key, value and output
// projections, the MLP, the head (also when its weights are tied to the embedding). Not counted:
// the embedding gather, positions, norms, biases, softmax, rope. The core is 12 * layers * heads *
// head_dim * sequence with full attention and half of that with causal attention (the exact causal
// factor is (S+1)/2S; S/2 is what everybody who counts causal uses).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace outlast {

// kCausal counts the keys that a token may see, kFull all of them: 12.5 % apart for an 8B model at
// 8192 tokens.
enum class AttentionCount { kCausal, kFull };

// What the backward pass runs again. Model FLOPs never change by it, hardware FLOPs do.
enum class Recompute { kNone, kSelective, kFull };

// What a number of FLOPs contains. It travels with the number.
struct FlopConvention {
  AttentionCount attention = AttentionCount::kCausal;
  // The embedding look-up counted as a GEMM of hidden x vocab; some peers do that.
  bool embedding = false;
  // A mixture's router. Dense models have none.
  bool router = false;
  // What `hardware` holds beyond `model`.
  Recompute recompute = Recompute::kNone;

  bool operator==(const FlopConvention&) const = default;
};

// "causal attention, embedding out, router out, recompute out".
std::string ToString(const FlopConvention& convention);

enum class FlopUnit { kToken, kSample };

// FLOPs of training (forward and backward) on one token or one sample; unknown while `model` is 0.
struct FlopCount {
  // Counts what the model needs, without recomputation: the numerator of MFU. FLOPs, not FLOP/s.
  int64_t model = 0;
  // Counts what the device runs: `model` and what is computed again, the numerator of HFU.
  int64_t hardware = 0;
  FlopUnit unit = FlopUnit::kToken;
  FlopConvention convention;
  // Where the count comes from, such as "formula: dense transformer".
  std::string source;

  bool is_known() const { return model > 0; }
};

// A decoder (or encoder, with full attention) whose layers are all alike.
struct DenseTransformerShape {
  int64_t layers = 0;
  int64_t hidden = 0;
  // Width of the MLP as it is, never a multiple of hidden by guess.
  int64_t ffn = 0;
  int64_t heads = 0;
  // Fewer than heads with grouped queries: changes the projections, not the core.
  int64_t kv_heads = 0;
  // Given, not hidden / heads: several models differ.
  int64_t head_dim = 0;
  int64_t vocab = 0;
  // Three matrices in the MLP (SwiGLU and the like) instead of two.
  bool gated = true;
  // Tokens of a sequence; attention's core grows with it.
  int64_t sequence = 0;
};

// A plain multi-layer perceptron: `widths` = {input, hidden ..., output}. An embedding that is
// gathered in front of it costs no GEMM and is not counted.
struct MlpShape {
  std::vector<int64_t> widths;
  // False when nothing below the first layer is trained: its GEMM then has no gradient for its
  // input, and costs 2 units (forward, weight gradient) instead of 3.
  bool input_has_gradient = true;
};

// Which convention FlopsOf counts by.
struct FlopOptions {
  AttentionCount attention = AttentionCount::kCausal;
  bool embedding = false;
  Recompute recompute = Recompute::kNone;
};

// FLOPs a token of `shape`, trained at shape.sequence.
// kInvalidArgument: a size below 1, or kv_heads that does not divide heads. kOutOfRange: the count
// passes 2^63.
absl::StatusOr<FlopCount> FlopsOf(const DenseTransformerShape& shape,
                                  const FlopOptions& options = {});

// FLOPs a sample of `shape`. kInvalidArgument: fewer than two widths, or a width below 1.
// kOutOfRange as above.
absl::StatusOr<FlopCount> FlopsOf(const MlpShape& shape);

// What is known of a model whose shape is not: all weights, and the attention.
struct ParameterCount {
  // All weights, embedding included.
  int64_t parameters = 0;
  int64_t layers = 0;
  // heads * head_dim.
  int64_t attention_width = 0;
  int64_t sequence = 0;
};

// 6 N + 12 L h S (full) or 6 N + 6 L h S (causal) FLOPs a token: the form of PaLM (arXiv
// 2204.02311, appendix B), nanoGPT and llm-foundry. The embedding counts, as N holds it. Errors as
// FlopsOf.
absl::StatusOr<FlopCount> FlopsOfParameters(const ParameterCount& count,
                                            AttentionCount attention = AttentionCount::kFull);

// Training FLOPs of documents of `lengths` tokens that share sequences without attending to each
// other: the core grows with the sum of squares, never with the square of the sum. shape.sequence
// is ignored. Model FLOPs, as a double: the total of a large step passes 2^63. Errors as FlopsOf,
// and kInvalidArgument for a length below 1.
absl::StatusOr<double> PackedFlops(const DenseTransformerShape& shape,
                                   std::span<const int64_t> lengths,
                                   const FlopOptions& options = {});

}  // namespace outlast
