#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/json.h"
#include "checkpoint/plan.h"
#include "checkpoint/shard_stream.h"
#include "checkpoint/writer.h"
#include "outlast/base/fd.h"
#include "outlast/base/memory.h"
#include "store/folder.h"

namespace outlast {
namespace {

constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::string_view kExtension = ".safetensors";
constexpr std::string_view kShardingKey = "DCP_SHARDING_INFO";
constexpr uint64_t kMaxIndexBytes = uint64_t{64} << 20;
constexpr size_t kReadBlock = size_t{8} << 20;

template <typename... Args>
absl::Status Refuse(fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

// The hub's cache is made of links to the files proper, which the readers do not follow.
std::string Resolved(const std::string& path) {
  std::error_code error;
  const auto real = std::filesystem::canonical(path, error);
  return error ? path : real.string();
}

using WeightMap = std::map<std::string, std::string>;  // tensor, file

absl::Status CheckFileName(const std::string& index, const std::string& name) {
  const bool stays = name.find_first_of(std::string_view("/\\:\0", 4)) == std::string::npos &&
                     !name.starts_with(".") && name.ends_with(kExtension);
  if (stays) return absl::OkStatus();
  return Refuse("{}: names the file '{}'; a .safetensors file of the same folder wanted", index,
                name.substr(0, 200));
}

absl::StatusOr<WeightMap> ReadIndex(const std::string& path) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ReadSmall(Resolved(path), kMaxIndexBytes));
  if (HasHiddenBytes(text) || NestingOf(text) > 32) return Refuse("{}: not an index", path);
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object())
    return Refuse("{}: no JSON object with a weight_map", path);
  WeightMap map;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string())
      return Refuse("{}: the file of '{}' is no string", path, tensor.substr(0, 200));
    map[tensor] = file.get<std::string>();
    OUTLAST_RETURN_IF_ERROR(CheckFileName(path, map[tensor]));
  }
  return map;
}

// Distributed checkpoints keep parts of tensors under the tensors' names: taking one for the whole
// would be wrong without a word.
absl::Status CheckWholeTensors(const std::string& path, const SafetensorsFile& file) {
  const auto sharding = file.metadata.find(std::string(kShardingKey));
  if (sharding == file.metadata.end()) return absl::OkStatus();
  const std::string& text = sharding->second;
  const auto json = HasHiddenBytes(text) || NestingOf(text) > 32
                        ? nlohmann::json()
                        : nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return Refuse("{}: {} is no JSON object", path, kShardingKey);
  for (const auto& [name, info] : json.items()) {
    if (!info.is_object() || !info.contains("saved_offsets") || !info["saved_offsets"].is_array())
      return Refuse("{}: {} of '{}' has no saved_offsets", path, kShardingKey, name.substr(0, 200));
    for (const auto& offset : info["saved_offsets"]) {
      if (offset == 0) continue;
      return Refuse(
          "{}: holds a part of tensor '{}' (a shard of a distributed checkpoint); whole tensors "
          "wanted",
          path, name.substr(0, 200));
    }
  }
  return absl::OkStatus();
}

// What is said of the file that was opened, which may lie behind a link, under the name that people
// know.
absl::Status OfFile(const absl::Status& status, const std::string& resolved,
                    const std::string& path) {
  std::string text(MessageOf(status));
  const size_t at = text.find(resolved);
  if (at == std::string::npos) return Annotate(status, path);
  return MakeStatus(status.code(), text.replace(at, resolved.size(), path));
}

// Adds the file's tensors and aliases.
absl::Status AddFile(const std::string& path, HuggingFaceFiles& files,
                     std::map<std::string, std::string>& aliases) {
  auto file = ReadSafetensors(Resolved(path));
  if (!file.ok()) return OfFile(file.status(), Resolved(path), path);
  OUTLAST_RETURN_IF_ERROR(CheckWholeTensors(path, *file));
  std::set<std::string_view> names;
  for (const SafetensorsTensor& tensor : file->tensors) names.insert(tensor.key);
  for (const auto& [name, of] : file->metadata) {
    if (name != "format" && names.contains(of) && !names.contains(name)) aliases.emplace(name, of);
  }
  const size_t index = files.files.size();
  files.files.push_back({Resolved(path), file->data_begin});
  for (SafetensorsTensor& tensor : file->tensors)
    files.tensors.push_back({std::move(tensor), index});
  files.bytes += file->data_bytes;
  return absl::OkStatus();
}

absl::Status CheckNames(const std::string& place, HuggingFaceFiles& files,
                        const std::optional<WeightMap>& index) {
  const auto key = [](const HuggingFaceFiles::Tensor& t) -> const std::string& {
    return t.tensor.key;
  };
  const auto file_of = [&](const HuggingFaceFiles::Tensor& t) {
    return std::filesystem::path(files.files[t.file].path).filename().string();
  };
  std::ranges::sort(files.tensors, {}, key);
  const auto twice = std::ranges::adjacent_find(files.tensors, {}, key);
  if (twice != files.tensors.end()) {
    return Refuse("{}: tensor '{}' is in {} and in {}", place, key(*twice).substr(0, 200),
                  file_of(*twice), file_of(*(twice + 1)));
  }
  if (files.tensors.empty()) return Refuse("{}: no tensors", place);
  if (!index.has_value()) return absl::OkStatus();
  for (const HuggingFaceFiles::Tensor& tensor : files.tensors) {
    if (!index->contains(key(tensor))) {
      return Refuse("{}: tensor '{}' is in {}, but not in the index", place,
                    key(tensor).substr(0, 200), file_of(tensor));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> SafetensorsIn(const std::string& folder,
                                                       std::string_view suffix) {
  OUTLAST_ASSIGN_OR_RETURN(const auto entries, ListFolder(folder));
  std::vector<std::string> names;
  for (const FolderEntry& entry : entries) {
    if (entry.name.ends_with(suffix) && entry.kind != EntryKind::kFolder)
      names.push_back(entry.name);
  }
  return names;
}

// Each tensor that the index has must be in the file that it says.
absl::Status CheckMapped(const std::string& place, const HuggingFaceFiles& files,
                         std::span<const std::string> names, const WeightMap& index) {
  std::map<std::string_view, size_t> found;
  for (const auto& tensor : files.tensors) found.emplace(tensor.tensor.key, tensor.file);
  for (const auto& [tensor, file] : index) {
    const auto at = found.find(tensor);
    if (at != found.end() && names[at->second] == file) continue;
    return Refuse("{}: tensor '{}' is not in {}, where the index has it", place,
                  tensor.substr(0, 200), file);
  }
  return absl::OkStatus();
}

absl::StatusOr<HuggingFaceFiles> ReadFolder(const std::string& folder) {
  OUTLAST_ASSIGN_OR_RETURN(const auto indices, SafetensorsIn(folder, kIndexSuffix));
  if (indices.size() > 1)
    return Refuse("{}: {} indices ({}); one wanted", folder, indices.size(),
                  fmt::join(indices, ", "));
  std::optional<WeightMap> index;
  std::vector<std::string> names;
  if (indices.empty()) {
    OUTLAST_ASSIGN_OR_RETURN(names, SafetensorsIn(folder, kExtension));
  } else {
    OUTLAST_ASSIGN_OR_RETURN(index, ReadIndex(folder + "/" + indices[0]));
    std::set<std::string> distinct;
    for (const auto& [tensor, file] : *index) distinct.insert(file);
    names.assign(distinct.begin(), distinct.end());
  }
  if (names.empty()) {
    return Error(absl::StatusCode::kNotFound,
                 "{}: neither a .safetensors file nor an index of some", folder);
  }
  HuggingFaceFiles files;
  std::map<std::string, std::string> aliases;
  for (const std::string& name : names)
    OUTLAST_RETURN_IF_ERROR(AddFile(fmt::format("{}/{}", folder, name), files, aliases));
  OUTLAST_RETURN_IF_ERROR(CheckNames(folder, files, index));
  if (index.has_value()) OUTLAST_RETURN_IF_ERROR(CheckMapped(folder, files, names, *index));
  for (const auto& alias : aliases) {
    const bool taken = std::ranges::any_of(
        files.tensors, [&](const auto& tensor) { return tensor.tensor.key == alias.first; });
    if (!taken) files.aliases.push_back(alias);
  }
  return files;
}

// Copies the file's bytes [begin, begin + count) into the stream.
absl::Status Append(int fd, const std::string& path, uint64_t begin, uint64_t count,
                    std::span<std::byte> block, FileStream& stream, const OnBytes& on_bytes) {
  while (count > 0) {
    const ssize_t got =
        pread(fd, block.data(), std::min<uint64_t>(block.size(), count), static_cast<off_t>(begin));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(errno, "read", path);
    if (got == 0) {
      return Error(absl::StatusCode::kDataLoss, "{}: ends at byte {}, while it is read", path,
                   begin);
    }
    const auto bytes = static_cast<uint64_t>(got);
    OUTLAST_RETURN_IF_ERROR(stream.Append(block.first(bytes)));
    if (on_bytes) on_bytes(bytes);
    begin += bytes;
    count -= bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<Plan> PlanOf(const HuggingFaceFiles& files) {
  TensorTable table;
  for (const auto& [tensor, file] : files.tensors)
    table.rows.push_back({tensor.key, tensor.dtype, tensor.shape, {}});
  return MakePlan(std::move(table));
}

absl::StatusOr<ShardFile> WriteShardFrom(const HuggingFaceFiles& files,
                                         const Assignment& assignment, const std::string& folder,
                                         const OnBytes& on_bytes) {
  std::map<std::string_view, const HuggingFaceFiles::Tensor*> by_name;
  for (const auto& tensor : files.tensors) by_name.emplace(tensor.tensor.key, &tensor);
  std::vector<UniqueFd> open_files;
  for (const HuggingFaceFiles::File& file : files.files) {
    open_files.emplace_back(open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    if (!open_files.back().is_open()) return FileError(errno, "open", file.path);
  }
  OUTLAST_ASSIGN_OR_RETURN(const Mapping block, Mapping::Anonymous(kReadBlock));
  OUTLAST_ASSIGN_OR_RETURN(
      FileStream stream, FileStream::Create(folder + "/" + ShardName(0), assignment.image_bytes()));
  OUTLAST_RETURN_IF_ERROR(stream.Append(std::as_bytes(std::span(assignment.header))));
  for (const PlannedItem& item : assignment.image) {
    const HuggingFaceFiles::Tensor& source = *by_name.at(item.box.name);
    const uint64_t bytes = source.tensor.end - source.tensor.begin;
    if (item.box.end - item.box.begin != bytes) {
      return Error(absl::StatusCode::kInternal, "tensor '{}': a world of one has cut it",
                   item.box.name);
    }
    const HuggingFaceFiles::File& file = files.files[source.file];
    OUTLAST_RETURN_IF_ERROR(Append(open_files[source.file].get(), file.path,
                                   file.data_begin + source.tensor.begin, bytes, block.bytes(),
                                   stream, on_bytes));
  }
  return stream.Finish();
}

absl::Status WriteAndCommit(const HuggingFaceFiles& files, Root& root, const std::string& name,
                            const ImportRequest& request) {
  OUTLAST_ASSIGN_OR_RETURN(const Plan plan, PlanOf(files));
  OUTLAST_ASSIGN_OR_RETURN(const Assignment assignment, AssignmentOf(plan, 0));
  const std::string folder = root.PathOf(name);
  Receipt receipt;
  receipt.job = root.job();
  receipt.run = root.run();
  receipt.claim = root.claim();
  receipt.checkpoint = name;
  receipt.parent = request.parent;
  receipt.step = request.step;
  receipt.generation = 1;
  receipt.plan = ToHex(plan.digest);
  receipt.boot_id = BootId();
  receipt.tensors = SavedBoxesOf(assignment);
  receipt.aliases = files.aliases;
  OUTLAST_ASSIGN_OR_RETURN(receipt.file,
                           WriteShardFrom(files, assignment, folder, request.on_bytes));
  OUTLAST_RETURN_IF_ERROR(WriteReceipt(folder, receipt).status());
  OUTLAST_ASSIGN_OR_RETURN(Manifest manifest, root.ComposeManifest(name, 1));
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, root.List());
  manifest.ancestors = root.AncestorsOf(request.parent, listing);
  manifest.committed_by = {"import", root.claim(), 1};
  return root.Commit(manifest);
}

}  // namespace

absl::StatusOr<HuggingFaceFiles> ReadHuggingFace(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return ReadFolder(path);
  HuggingFaceFiles files;
  std::map<std::string, std::string> aliases;
  OUTLAST_RETURN_IF_ERROR(AddFile(path, files, aliases));
  OUTLAST_RETURN_IF_ERROR(CheckNames(path, files, std::nullopt));
  files.aliases.assign(aliases.begin(), aliases.end());
  return files;
}

absl::StatusOr<std::string> ImportHuggingFace(const HuggingFaceFiles& files, Root& root,
                                              const ImportRequest& request) {
  OUTLAST_ASSIGN_OR_RETURN(std::string name, root.NewCheckpoint(request.step));
  const absl::Status status = WriteAndCommit(files, root, name, request);
  if (status.ok()) return name;
  root.Delete(name).IgnoreError();
  return Annotate(status, fmt::format("import into {}", root.path()));
}

}  // namespace outlast
