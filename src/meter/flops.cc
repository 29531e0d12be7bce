#include "outlast/meter/flops.h"

#include <string_view>

#include "base/error.h"

namespace outlast {
namespace {

// int64 arithmetic that remembers an overflow instead of wrapping.
class Checked {
 public:
  Checked(int64_t value)
      : value_(value) {}  // NOLINT(google-explicit-constructor): reads as arithmetic

  friend Checked operator*(Checked a, Checked b) {
    Checked out(0);
    out.overflowed_ =
        __builtin_mul_overflow(a.value_, b.value_, &out.value_) || a.overflowed_ || b.overflowed_;
    return out;
  }
  friend Checked operator+(Checked a, Checked b) {
    Checked out(0);
    out.overflowed_ =
        __builtin_add_overflow(a.value_, b.value_, &out.value_) || a.overflowed_ || b.overflowed_;
    return out;
  }

  bool overflowed() const { return overflowed_; }
  int64_t value() const { return value_; }

 private:
  int64_t value_;
  bool overflowed_ = false;
};

absl::Status CheckPositive(std::string_view name, int64_t value) {
  if (value >= 1) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "{} is {}, wanted at least 1", name, value);
}

absl::Status CheckShape(const DenseTransformerShape& shape) {
  OUTLAST_RETURN_IF_ERROR(CheckPositive("DenseTransformerShape.layers", shape.layers));
  OUTLAST_RETURN_IF_ERROR(CheckPositive("DenseTransformerShape.hidden", shape.hidden));
  OUTLAST_RETURN_IF_ERROR(CheckPositive("DenseTransformerShape.ffn", shape.ffn));
  OUTLAST_RETURN_IF_ERROR(CheckPositive("DenseTransformerShape.heads", shape.heads));
  OUTLAST_RETURN_IF_ERROR(CheckPositive("DenseTransformerShape.kv_heads", shape.kv_heads));
  OUTLAST_RETURN_IF_ERROR(CheckPositive("DenseTransformerShape.head_dim", shape.head_dim));
  OUTLAST_RETURN_IF_ERROR(CheckPositive("DenseTransformerShape.vocab", shape.vocab));
  if (shape.heads % shape.kv_heads != 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "DenseTransformerShape.kv_heads is {}, wanted a divisor of heads ({})",
                 shape.kv_heads, shape.heads);
  }
  return absl::OkStatus();
}

// Weights of the GEMMs in all layers, without the head.
Checked LayerWeights(const DenseTransformerShape& shape) {
  const Checked attention = Checked(shape.hidden) * shape.head_dim *
                            (Checked(shape.heads) + Checked(2) * shape.kv_heads + shape.heads);
  const Checked mlp = Checked(shape.gated ? 3 : 2) * shape.hidden * shape.ffn;
  return Checked(shape.layers) * (attention + mlp);
}

Checked HeadWeights(const DenseTransformerShape& shape) {
  return Checked(shape.hidden) * shape.vocab;
}

// 6 * L * heads * d, doubled with full attention: times the keys a token counts, it is the core of
// training.
Checked CorePerKey(const DenseTransformerShape& shape, AttentionCount attention) {
  return Checked(attention == AttentionCount::kFull ? 12 : 6) * shape.layers * shape.heads *
         shape.head_dim;
}

Checked CountedWeights(const DenseTransformerShape& shape, const FlopOptions& options) {
  return LayerWeights(shape) + HeadWeights(shape) * (options.embedding ? 2 : 1);
}

FlopConvention ConventionOf(const FlopOptions& options) {
  return {.attention = options.attention,
          .embedding = options.embedding,
          .recompute = options.recompute};
}

absl::Status TooLarge(std::string_view what) {
  return Error(absl::StatusCode::kOutOfRange, "the FLOPs of {} pass 2^63", what);
}

std::string_view RecomputeText(Recompute recompute) {
  switch (recompute) {
    case Recompute::kNone:
      return "out";
    case Recompute::kSelective:
      return "selective in hardware FLOPs";
    case Recompute::kFull:
      return "full in hardware FLOPs";
  }
  return "out";
}

}  // namespace

std::string ToString(const FlopConvention& convention) {
  return fmt::format("{} attention, embedding {}, router {}, recompute {}",
                     convention.attention == AttentionCount::kFull ? "full" : "causal",
                     convention.embedding ? "in" : "out", convention.router ? "in" : "out",
                     RecomputeText(convention.recompute));
}

absl::StatusOr<FlopCount> FlopsOf(const DenseTransformerShape& shape, const FlopOptions& options) {
  OUTLAST_RETURN_IF_ERROR(CheckShape(shape));
  OUTLAST_RETURN_IF_ERROR(CheckPositive("DenseTransformerShape.sequence", shape.sequence));

  // A third of the core of training, exactly: the factor is 6 or 12.
  const Checked core_per_key = CorePerKey(shape, options.attention);
  const Checked forward_core = Checked(core_per_key.value() / 3) * shape.sequence;
  const Checked model = Checked(6) * CountedWeights(shape, options) + core_per_key * shape.sequence;
  Checked again = 0;
  if (options.recompute == Recompute::kSelective) again = forward_core;
  if (options.recompute == Recompute::kFull)
    again = Checked(2) * LayerWeights(shape) + forward_core;
  const Checked hardware = model + again;
  if (hardware.overflowed()) return TooLarge("a dense transformer");

  return FlopCount{
      .model = model.value(),
      .hardware = hardware.value(),
      .unit = FlopUnit::kToken,
      .convention = ConventionOf(options),
      .source = fmt::format("formula: dense transformer, sequence {}", shape.sequence)};
}

absl::StatusOr<FlopCount> FlopsOf(const MlpShape& shape) {
  if (shape.widths.size() < 2) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "MlpShape.widths has {} entries, wanted at least 2", shape.widths.size());
  }
  for (const int64_t width : shape.widths) {
    OUTLAST_RETURN_IF_ERROR(CheckPositive("a width in MlpShape.widths", width));
  }
  Checked flops = 0;
  for (size_t i = 0; i + 1 < shape.widths.size(); ++i) {
    const int64_t units = i == 0 && !shape.input_has_gradient ? 2 : 3;
    flops = flops + Checked(2 * units) * shape.widths[i] * shape.widths[i + 1];
  }
  if (flops.overflowed()) return TooLarge("a multi-layer perceptron");
  return FlopCount{.model = flops.value(),
                   .hardware = flops.value(),
                   .unit = FlopUnit::kSample,
                   .convention = {},
                   .source = "formula: multi-layer perceptron"};
}

absl::StatusOr<FlopCount> FlopsOfParameters(const ParameterCount& count, AttentionCount attention) {
  OUTLAST_RETURN_IF_ERROR(CheckPositive("ParameterCount.parameters", count.parameters));
  OUTLAST_RETURN_IF_ERROR(CheckPositive("ParameterCount.layers", count.layers));
  OUTLAST_RETURN_IF_ERROR(CheckPositive("ParameterCount.attention_width", count.attention_width));
  OUTLAST_RETURN_IF_ERROR(CheckPositive("ParameterCount.sequence", count.sequence));
  const int64_t factor = attention == AttentionCount::kFull ? 12 : 6;
  const Checked model = Checked(6) * count.parameters +
                        Checked(factor) * count.layers * count.attention_width * count.sequence;
  if (model.overflowed()) return TooLarge("6 N + the core");
  return FlopCount{.model = model.value(),
                   .hardware = model.value(),
                   .unit = FlopUnit::kToken,
                   .convention = {.attention = attention, .embedding = true},
                   .source = fmt::format("declared: 6 N + {} L h S", factor)};
}

absl::StatusOr<double> PackedFlops(const DenseTransformerShape& shape,
                                   std::span<const int64_t> lengths, const FlopOptions& options) {
  OUTLAST_RETURN_IF_ERROR(CheckShape(shape));
  const Checked per_token = Checked(6) * CountedWeights(shape, options);
  const Checked per_key = CorePerKey(shape, options.attention);
  if (per_token.overflowed() || per_key.overflowed()) return TooLarge("a dense transformer");
  double tokens = 0;
  double squares = 0;
  for (const int64_t length : lengths) {
    OUTLAST_RETURN_IF_ERROR(CheckPositive("a document's length", length));
    tokens += static_cast<double>(length);
    squares += static_cast<double>(length) * static_cast<double>(length);
  }
  return static_cast<double>(per_token.value()) * tokens +
         static_cast<double>(per_key.value()) * squares;
}

}  // namespace outlast
