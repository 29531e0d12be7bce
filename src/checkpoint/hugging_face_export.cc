#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/shard_stream.h"
#include "checkpoint/tensor_pieces.h"
#include "outlast/base/id.h"
#include "store/folder.h"

namespace outlast {
namespace {

// One file to be: which tensors, and where.
struct PlannedFile {
  std::string name, temp;
  std::vector<SafetensorsBox> boxes;  // in file order
  std::string header;
  uint64_t data_bytes = 0;
};

// In the order of names, cut where the next tensor would pass the limit.
absl::StatusOr<std::vector<std::vector<SafetensorsBox>>> Group(const CheckpointReader& source,
                                                               uint64_t limit) {
  std::vector<std::vector<SafetensorsBox>> groups(1);
  uint64_t filled = 0;
  for (const SavedTensor& tensor : source.tensors()) {
    OUTLAST_ASSIGN_OR_RETURN(const uint64_t bytes, BytesOf(tensor.dtype, tensor.global));
    if (!groups.back().empty() && filled + bytes > limit) {
      groups.emplace_back();
      filled = 0;
    }
    filled += bytes;
    groups.back().push_back({tensor.name, tensor.name, tensor.dtype, tensor.global,
                             Shape::Zeros(tensor.global.rank()), tensor.global});
  }
  return groups;
}

absl::StatusOr<std::vector<PlannedFile>> PlanFiles(const CheckpointReader& source,
                                                   const std::string& folder, uint64_t limit) {
  OUTLAST_ASSIGN_OR_RETURN(auto groups, Group(source, limit));
  const auto nonce = static_cast<uint32_t>(RandomU64());
  std::vector<PlannedFile> files;
  for (size_t i = 0; i < groups.size(); ++i) {
    PlannedFile file;
    file.name = groups.size() == 1
                    ? "model.safetensors"
                    : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, groups.size());
    file.temp = fmt::format("{}/{}.{:08x}.tmp", folder, file.name, nonce);
    file.boxes = std::move(groups[i]);
    OUTLAST_ASSIGN_OR_RETURN(file.data_bytes, LayOut(file.boxes));
    std::map<std::string, std::string> metadata = {{"format", "pt"}};
    for (const auto& [name, of] : source.aliases()) {
      if (std::ranges::find(file.boxes, of, &SafetensorsBox::name) != file.boxes.end())
        metadata.emplace(name, of);
    }
    OUTLAST_ASSIGN_OR_RETURN(file.header, BuildHeader(file.boxes, metadata));
    files.push_back(std::move(file));
  }
  return files;
}

absl::Status WriteFile(const CheckpointReader& source, const PlannedFile& file,
                       const OnBytes& on_bytes) {
  OUTLAST_ASSIGN_OR_RETURN(FileStream stream,
                           FileStream::Create(file.temp, file.header.size() + file.data_bytes));
  OUTLAST_RETURN_IF_ERROR(stream.Append(std::as_bytes(std::span(file.header))));
  std::vector<const SavedTensor*> tensors;
  for (const SafetensorsBox& box : file.boxes) tensors.push_back(source.Find(box.name));
  const std::vector<TensorPiece> pieces = CutTensors(tensors, kPieceBytes);
  PieceRuns runs(pieces, kPieceBytes);
  PieceMemory memory;
  for (auto run = runs.Next(); !run.empty(); run = runs.Next()) {
    OUTLAST_ASSIGN_OR_RETURN(const auto bytes, memory.Read(source, run));
    OUTLAST_RETURN_IF_ERROR(stream.Append(bytes));
    if (on_bytes) on_bytes(bytes.size());
  }
  return stream.Finish().status();
}

std::string IndexText(std::span<const PlannedFile> files, uint64_t total) {
  std::map<std::string, std::string> map;
  for (const PlannedFile& file : files)
    for (const SafetensorsBox& box : file.boxes) map.emplace(box.name, file.name);
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  return index.dump(2) + "\n";
}

absl::Status WriteAll(const CheckpointReader& source, const std::string& folder,
                      std::span<const PlannedFile> files, const ExportOptions& options,
                      ExportResult& result) {
  for (const PlannedFile& file : files)
    OUTLAST_RETURN_IF_ERROR(WriteFile(source, file, options.on_bytes));
  for (const PlannedFile& file : files) {
    OUTLAST_RETURN_IF_ERROR(PublishByLink(file.temp, folder + "/" + file.name));
    OUTLAST_RETURN_IF_ERROR(RemoveFile(file.temp));
    result.files.push_back(file.name);
    result.tensors += file.boxes.size();
    result.bytes += file.data_bytes;
  }
  OUTLAST_RETURN_IF_ERROR(FsyncFolder(folder));
  if (files.size() == 1) return absl::OkStatus();
  return CreateWhole(folder, "model.safetensors.index.json", IndexText(files, result.bytes));
}

}  // namespace

absl::StatusOr<ExportResult> ExportHuggingFace(const CheckpointReader& source,
                                               const std::string& folder,
                                               const ExportOptions& options) {
  OUTLAST_RETURN_IF_ERROR(MakeFolders(folder));
  OUTLAST_ASSIGN_OR_RETURN(const auto entries, ListFolder(folder));
  if (!entries.empty()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{}: holds '{}' already; an empty or new folder wanted", folder, entries[0].name);
  }
  OUTLAST_ASSIGN_OR_RETURN(const auto files, PlanFiles(source, folder, options.shard_bytes));
  ExportResult result;
  result.aliases = source.aliases().size();
  const absl::Status status = WriteAll(source, folder, files, options, result);
  if (status.ok()) return result;
  for (const PlannedFile& file : files) {
    RemoveFile(file.temp).IgnoreError();
    RemoveFile(folder + "/" + file.name).IgnoreError();  // the folder was empty: it is ours
  }
  return Annotate(status, fmt::format("export of {} to {}", source.manifest().checkpoint, folder));
}

}  // namespace outlast
