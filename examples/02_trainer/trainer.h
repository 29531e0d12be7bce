// One rank of the data-parallel trainer: its state, and one step's arithmetic.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "adam.h"
#include "corpus.h"
#include "model.h"
#include "options.h"
#include "outlast/data/cursor.h"
#include "outlast/outlast.h"

class Trainer {
 public:
  // kNotFound: no text to train on; kInvalidArgument: fewer samples than a batch.
  static absl::StatusOr<std::unique_ptr<Trainer>> Make(const TrainerOptions& options);

  // Back to step 0.
  void Initialize();
  // Takes the data cursor and the last loss from a restored checkpoint's extras.
  absl::Status TakeExtras(const outlast::Extras& extras);

  // Named views of this trainer's memory: weights and both moments of Adam, one region a tensor,
  // and the cursor.
  outlast::StateView State() const;

  // The samples that `rank` takes in the cursor's next step.
  absl::StatusOr<std::vector<int64_t>> NextIds(int rank, int world) const {
    return cursor_.RankIds(rank, world);
  }
  // Computes this rank's share of the gradient of the global mean loss, sums it over the ranks, and
  // keeps the step's loss. The state is not touched.
  absl::Status ForwardBackward(const std::vector<int64_t>& ids, outlast::Group& group,
                               outlast::StepScope& scope);
  // Adam's update, and the cursor moves on.
  absl::Status OptimizerStep(int64_t step);

  double loss() const { return loss_; }  // of the last step, nats a byte, the mean over all ranks
  double unigram_entropy() const { return unigram_entropy_; }  // nats a byte
  int64_t bytes_per_step() const { return options_.batch * window_.targets; }
  // CRC32C of weights and moments.
  uint32_t StateDigest() const;
  size_t gradient_bytes() const { return gradients_.size() * sizeof(float); }
  outlast::MlpShape mlp_shape() const;
  const Window& window() const { return window_; }

 private:
  Trainer(const TrainerOptions& options, std::string text, outlast::Cursor cursor,
          outlast::Mapping memory);
  std::span<float> Part(size_t index) const;

  const TrainerOptions options_;
  const ModelShape shape_;
  const Window window_;
  const std::string text_;
  const double unigram_entropy_;
  const std::vector<TensorInfo> tensors_;
  std::vector<std::string> names_;  // of the regions
  outlast::Cursor cursor_;
  outlast::Mapping memory_;       // weights, first and second moments, one after the other
  std::vector<float> gradients_;  // the last element is the summed loss
  Model model_;
  double loss_ = 0;
};
