#include "trainer.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "outlast/base/crc32c.h"

namespace {

constexpr std::array<std::string_view, 3> kParts = {"model.", "adam.first_moment.",
                                                    "adam.second_moment."};

absl::Status Invalid(const std::string& message) {
  return outlast::MakeStatus(absl::StatusCode::kInvalidArgument, message);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Make(const TrainerOptions& options) {
  std::string text = ReadTexts(options.texts);
  if (text.empty())
    return outlast::MakeStatus(absl::StatusCode::kNotFound,
                               "no text to train on in " + options.texts);
  const int64_t samples = SampleCount(static_cast<int64_t>(text.size()), Window{});
  if (samples < options.batch) {
    return Invalid(options.texts + ": " + std::to_string(samples) +
                   " samples, at least one batch of " + std::to_string(options.batch) + " wanted");
  }
  OUTLAST_ASSIGN_OR_RETURN(
      outlast::Cursor cursor,
      outlast::Cursor::Create({.samples = samples, .batch = options.batch, .seed = options.seed}));
  const size_t bytes = kParts.size() * ParameterCount(ModelShape{}) * sizeof(float);
  OUTLAST_ASSIGN_OR_RETURN(outlast::Mapping memory, outlast::Mapping::Anonymous(bytes));
  return std::unique_ptr<Trainer>(
      new Trainer(options, std::move(text), std::move(cursor), std::move(memory)));
}

Trainer::Trainer(const TrainerOptions& options, std::string text, outlast::Cursor cursor,
                 outlast::Mapping memory)
    : options_(options),
      text_(std::move(text)),
      unigram_entropy_(UnigramEntropy(text_)),
      tensors_(TensorTable(shape_)),
      cursor_(std::move(cursor)),
      memory_(std::move(memory)),
      gradients_(ParameterCount(shape_) + 1),
      model_(shape_) {
  for (const std::string_view part : kParts) {
    for (const TensorInfo& tensor : tensors_) names_.push_back(std::string(part) + tensor.name);
  }
  Initialize();
}

std::span<float> Trainer::Part(size_t index) const {
  const size_t count = ParameterCount(shape_);
  return {reinterpret_cast<float*>(memory_.data()) + index * count, count};
}

void Trainer::Initialize() {
  ::Initialize(shape_, options_.seed, Part(0));
  std::ranges::fill(Part(1), 0.0f);
  std::ranges::fill(Part(2), 0.0f);
  cursor_ =
      *outlast::Cursor::Create({.samples = SampleCount(static_cast<int64_t>(text_.size()), window_),
                                .batch = options_.batch,
                                .seed = options_.seed});
}

absl::Status Trainer::TakeExtras(const outlast::Extras& extras) {
  const auto loss = extras.find("loss");
  if (loss == extras.end() ||
      std::sscanf(loss->second.c_str(), "{\"nats_a_byte\":\"%la\"}", &loss_) != 1) {
    return Invalid("the checkpoint has no 'loss' among its extras");
  }
  const auto cursor = extras.find("cursor");
  if (cursor == extras.end()) return Invalid("the checkpoint has no 'cursor' among its extras");
  OUTLAST_ASSIGN_OR_RETURN(cursor_,
                           outlast::Cursor::FromText(
                               {.samples = SampleCount(static_cast<int64_t>(text_.size()), window_),
                                .batch = options_.batch,
                                .seed = options_.seed},
                               cursor->second));
  return absl::OkStatus();
}

outlast::StateView Trainer::State() const {
  outlast::StateView state;
  size_t name = 0;
  for (size_t part = 0; part < kParts.size(); ++part) {
    for (const TensorInfo& tensor : tensors_) {
      const outlast::Shape shape(tensor.shape);
      const std::span<float> values = Part(part).subspan(tensor.offset, tensor.size);
      state.regions.push_back(
          {names_[name++], outlast::DType::kF32, shape, {}, shape, std::as_writable_bytes(values)});
    }
  }
  state.extras["cursor"] = cursor_.ToText();
  char loss[64];
  std::snprintf(loss, sizeof loss, "{\"nats_a_byte\":\"%a\"}", loss_);
  state.extras["loss"] = loss;
  return state;
}

absl::Status Trainer::ForwardBackward(const std::vector<int64_t>& ids, outlast::Group& group,
                                      outlast::StepScope& scope) {
  const TokenBatch batch = MakeBatch(text_, window_, ids);
  const auto targets = static_cast<uint32_t>(batch.targets.size());
  scope.Count({.real = targets,
               .padded = targets,
               .loss = targets,
               .samples = targets / static_cast<uint32_t>(window_.targets)});
  scope.Enter(outlast::Phase::kForward);  // forward and backward share a call; the larger part is
                                          // the backward pass
  const std::span<float> gradients(gradients_);
  const double sum =
      model_.ForwardBackward(Part(0), batch, 1.0f / static_cast<float>(bytes_per_step()),
                             gradients.first(gradients.size() - 1));
  gradients.back() = static_cast<float>(sum);
  scope.Enter(outlast::Phase::kCommWait);
  OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(gradients));
  loss_ = static_cast<double>(gradients.back()) / static_cast<double>(bytes_per_step());
  scope.SetLoss(static_cast<float>(loss_), 0);
  return absl::OkStatus();
}

absl::Status Trainer::OptimizerStep(int64_t step) {
  const AdamOptions adam;
  AdamUpdate(adam, LearningRate(adam, step, options_.steps), step,
             std::span(gradients_).first(gradients_.size() - 1), Part(0), Part(1), Part(2));
  return cursor_.Advance();
}

uint32_t Trainer::StateDigest() const {
  return outlast::Crc32c(std::span<const std::byte>(memory_.bytes()));
}

outlast::MlpShape Trainer::mlp_shape() const {
  return {{shape_.input(), shape_.hidden, shape_.hidden, ModelShape::kBytes}};
}
