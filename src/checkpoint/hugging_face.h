// Whole tensors out of a checkpoint into the layout of the Hugging Face hub, and from there into a
// new checkpoint: model.safetensors, or model-00001-of-0000N.safetensors with
// model.safetensors.index.json ({"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}).
//
// A tied name (an alias) is written once; the file that holds its tensor has {alias: name} in its
// __metadata__, as Python's safetensors.torch.save_model writes it and load_model reads it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/reader.h"
#include "checkpoint/root.h"
#include "checkpoint/safetensors.h"

namespace outlast {

inline constexpr uint64_t kHuggingFaceShardBytes = 5'000'000'000;  // the hub's own default

struct ExportOptions {
  uint64_t shard_bytes = kHuggingFaceShardBytes;  // a larger tensor gets a file of its own
  OnBytes on_bytes;
};
struct ExportResult {
  std::vector<std::string> files;  // without the index
  uint64_t tensors = 0, aliases = 0;
  uint64_t bytes = 0;  // of the tensors
};

// Writes all tensors of `source` into `folder`, which must be empty or not there. Files get their
// names when all are durable, the index last. Extras stay behind: they have no place there.
// kFailedPrecondition: the folder holds something. kDataLoss: the source is damaged. Holds 72 MiB.
absl::StatusOr<ExportResult> ExportHuggingFace(const CheckpointReader& source,
                                               const std::string& folder,
                                               const ExportOptions& options = {});

// What a folder of that layout, or a single .safetensors file, holds.
struct HuggingFaceFiles {
  struct Tensor {
    SafetensorsTensor tensor;
    size_t file = 0;
  };
  struct File {
    std::string path;
    uint64_t data_begin = 0;
  };
  std::vector<File> files;
  std::vector<Tensor> tensors;                               // by name
  std::vector<std::pair<std::string, std::string>> aliases;  // name, of
  uint64_t bytes = 0;
};
// Reads the headers, and the index where there is one; without, every .safetensors file of the
// folder. kNotFound: nothing of that kind there, or a file that the index names is missing.
// kInvalidArgument: a file name that leaves the folder or has another extension; a tensor in two
// files, in a file but not in the index, or the other way round; a part of a tensor (the shards of
// a distributed checkpoint); not safetensors.
absl::StatusOr<HuggingFaceFiles> ReadHuggingFace(const std::string& path);

struct ImportRequest {
  int64_t step = 0;
  std::optional<std::string> parent;  // folder name; none: a chain of its own
  OnBytes on_bytes;
};
// Writes the tensors as a new checkpoint of a world of one into `root`, whose claim is held, by the
// same steps as a save; its name comes back. Errors as those of a save; nothing is left then.
absl::StatusOr<std::string> ImportHuggingFace(const HuggingFaceFiles& files, Root& root,
                                              const ImportRequest& request);

}  // namespace outlast
