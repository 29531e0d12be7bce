#include "checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "base/error.h"
#include "checkpoint/json.h"
#include "outlast/base/fd.h"
#include "outlast/checkpoint/state.h"
#include "store/folder.h"

namespace outlast {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;

template <typename... Args>
absl::Status Refuse(fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

// Reads the header while it is parsed: no tree is built, and duplicate keys, which a tree would
// drop in silence, are seen.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  explicit HeaderReader(SafetensorsFile& file) : file_(file) {}

  std::string why;  // of the first refusal

  bool null() override { return Scalar("null"); }
  bool boolean(bool) override { return Scalar("a boolean"); }
  bool number_integer(int64_t) override { return Scalar("a negative number"); }
  bool number_float(double, const std::string&) override {
    return Scalar("a number that is no integer in range");
  }
  bool binary(binary_t&) override { return Scalar("binary"); }

  bool number_unsigned(uint64_t value) override {
    if (where_ == Where::kShape) return AddDimension(value);
    if (where_ != Where::kOffsets) return Scalar("a number");
    if (offset_count_ == 2) return Fail("tensor '{}': more than two data_offsets", Key());
    (offset_count_++ == 0 ? tensor_.begin : tensor_.end) = value;
    return true;
  }

  bool string(std::string& value) override {
    if (where_ == Where::kMetadata) {
      if (file_.metadata.emplace(member_, value).second) return true;
      return Fail("metadata '{}' is there twice", member_.substr(0, 200));
    }
    if (where_ != Where::kTensor || member_ != "dtype") return Scalar("a string");
    const std::optional<DType> dtype = DTypeFromName(value);
    if (!dtype.has_value())
      return Fail("tensor '{}': unknown dtype '{}'", Key(), value.substr(0, 32));
    tensor_.dtype = *dtype;
    return Once(has_dtype_);
  }

  bool start_object(size_t) override {
    if (where_ == Where::kSkip || IsUnknownMember()) return Skip();
    if (where_ == Where::kTop) {
      where_ = Where::kNames;
    } else if (where_ == Where::kNames && member_ == kMetadataKey) {
      if (has_metadata_) return Fail("__metadata__ is there twice");
      has_metadata_ = true;
      where_ = Where::kMetadata;
    } else if (where_ == Where::kNames) {
      tensor_ = {.key = member_};
      has_dtype_ = has_shape_ = has_offsets_ = false;
      where_ = Where::kTensor;
    } else {
      return Scalar("an object");
    }
    return true;
  }

  bool key(std::string& name) override {
    if (where_ != Where::kSkip) member_ = name;
    if (where_ == Where::kNames && name.size() > kMaxNameBytes)
      return Fail("a name of {} bytes", name.size());
    return true;
  }

  bool end_object() override {
    if (where_ == Where::kSkip) return Unskip();
    if (where_ == Where::kTensor) {
      if (!has_dtype_ || !has_shape_ || !has_offsets_) {
        return Fail("tensor '{}': dtype, shape and data_offsets wanted", Key());
      }
      tensor_.shape = Shape(std::span(dimensions_.data(), dimension_count_));
      file_.tensors.push_back(std::move(tensor_));
      where_ = Where::kNames;
    } else {
      where_ = where_ == Where::kMetadata ? Where::kNames : Where::kTop;
    }
    return true;
  }

  bool start_array(size_t) override {
    if (where_ == Where::kSkip || IsUnknownMember()) return Skip();
    if (where_ == Where::kTensor && member_ == "shape") {
      dimension_count_ = 0;
      where_ = Where::kShape;
      return Once(has_shape_);
    }
    if (where_ == Where::kTensor && member_ == "data_offsets") {
      offset_count_ = 0;
      where_ = Where::kOffsets;
      return Once(has_offsets_);
    }
    return Scalar("an array");
  }

  bool end_array() override {
    if (where_ == Where::kSkip) return Unskip();
    if (where_ == Where::kOffsets && offset_count_ != 2)
      return Fail("tensor '{}': two data_offsets wanted", Key());
    where_ = Where::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    return Fail("the header is not JSON in UTF-8, at byte {}", position);
  }

 private:
  enum class Where { kTop, kNames, kMetadata, kTensor, kShape, kOffsets, kSkip };

  template <typename... Args>
  bool Fail(fmt::format_string<Args...> format, Args&&... args) {
    if (why.empty()) why = fmt::format(format, std::forward<Args>(args)...);
    return false;
  }

  std::string Key() const { return tensor_.key.substr(0, 200); }

  bool IsUnknownMember() const {
    return where_ == Where::kTensor && member_ != "dtype" && member_ != "shape" &&
           member_ != "data_offsets";
  }

  // A value at a place where it does not belong, unless its member is one that we do not know.
  bool Scalar(std::string_view what) {
    if (where_ == Where::kSkip || IsUnknownMember()) return true;
    if (where_ == Where::kMetadata)
      return Fail("metadata '{}' is {}, a string wanted", member_.substr(0, 200), what);
    if (where_ == Where::kTop) return Fail("the header is {}, an object wanted", what);
    if (where_ == Where::kNames)
      return Fail("'{}' is {}, an object wanted", member_.substr(0, 200), what);
    return Fail("tensor '{}': {} in '{}'", Key(), what, member_.substr(0, 200));
  }

  bool Once(bool& seen) {
    if (seen) return Fail("tensor '{}': '{}' is there twice", Key(), member_);
    return seen = true;
  }

  bool AddDimension(uint64_t value) {
    if (dimension_count_ == kMaxDimensions)
      return Fail("tensor '{}': more than {} dimensions", Key(), kMaxDimensions);
    if (value > uint64_t{std::numeric_limits<int64_t>::max()})
      return Fail("tensor '{}': shape overflows", Key());
    dimensions_[dimension_count_++] = static_cast<int64_t>(value);
    return true;
  }

  bool Skip() {
    where_ = Where::kSkip;
    return ++skip_depth_ <= 32 ? true : Fail("nested deeper than 32");
  }
  bool Unskip() {
    if (--skip_depth_ == 0) where_ = Where::kTensor;
    return true;
  }

  SafetensorsFile& file_;
  Where where_ = Where::kTop;
  std::string member_;
  SafetensorsTensor tensor_;
  bool has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::array<int64_t, kMaxDimensions> dimensions_{};
  size_t dimension_count_ = 0;
  int offset_count_ = 0;
  int skip_depth_ = 0;
};

absl::Status CheckNames(std::vector<SafetensorsTensor>& tensors) {
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return a.key < b.key; });
  const auto twice = std::adjacent_find(
      tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.key == b.key; });
  if (twice == tensors.end()) return absl::OkStatus();
  return Refuse("tensor '{}' is there twice", twice->key.substr(0, 200));
}

// The data section is filled from its first byte to its last, without a hole or an overlap.
absl::Status CheckPlaces(std::vector<SafetensorsTensor>& tensors, uint64_t data_bytes) {
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.key) < std::tie(b.begin, b.end, b.key);
  });
  uint64_t position = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    const std::string key = tensor.key.substr(0, 200);
    if (tensor.begin > tensor.end)
      return Refuse("tensor '{}': begins at {}, after its end {}", key, tensor.begin, tensor.end);
    const auto bytes = BytesOf(tensor.dtype, tensor.shape);
    if (!bytes.ok()) return Annotate(bytes.status(), fmt::format("tensor '{}'", key));
    if (tensor.begin != position) {
      return Refuse("tensor '{}': begins at {}, {} wanted (a hole or an overlap)", key,
                    tensor.begin, position);
    }
    if (tensor.end - tensor.begin != *bytes) {
      return Refuse("tensor '{}': {} bytes, {} wanted for {} {}", key, tensor.end - tensor.begin,
                    *bytes, NameOf(tensor.dtype), tensor.shape.text());
    }
    position = tensor.end;
  }
  if (position != data_bytes)
    return Refuse("the tensors end at {}, the data at {}", position, data_bytes);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> HeaderBytes(std::span<const std::byte> head, uint64_t file_bytes) {
  if (head.size() < kLengthBytes || file_bytes < kLengthBytes)
    return Refuse("{} bytes, at least 8 wanted", file_bytes);
  uint64_t length = 0;
  std::memcpy(&length, head.data(), kLengthBytes);
  if (length > kMaxHeaderBytes)
    return Refuse("a header of {} bytes, at most {} wanted", length, kMaxHeaderBytes);
  if (length > file_bytes - kLengthBytes) {
    return Refuse("a header of {} bytes in a file of {}", length, file_bytes);
  }
  return length;
}

absl::Status ReadAt(int fd, std::span<std::byte> target, uint64_t offset, const std::string& path) {
  while (!target.empty()) {
    const ssize_t count = pread(fd, target.data(), target.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, "read", path);
    if (count == 0)
      return Error(absl::StatusCode::kDataLoss, "{}: ends at {}, while it is read", path, offset);
    target = target.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
  return absl::OkStatus();
}

std::string Numbers(const Shape& shape) {
  return fmt::format("[{}]", fmt::join(shape.dimensions(), ","));
}

std::string MetadataText(std::span<const SafetensorsBox> boxes) {
  std::string sharding = "{";
  for (const SafetensorsBox& box : boxes) {
    if (sharding.size() > 1) sharding += ',';
    sharding += fmt::format("{}:{{\"saved_offsets\":{}}}", Quoted(box.key), Numbers(box.offset));
  }
  sharding += '}';
  return fmt::format("{}:{{\"format\":\"pt\",\"DCP_SHARDING_INFO\":{},\"DCP_VERSION\":\"1.0\"}}",
                     Quoted(kMetadataKey), Quoted(sharding));
}

absl::StatusOr<std::string> HeaderOf(std::span<const SafetensorsBox> boxes,
                                     std::string_view metadata_text) {
  std::string text = fmt::format("{{{}", metadata_text);
  for (const SafetensorsBox& box : boxes) {
    if (!IsUtf8(box.key)) return Refuse("a tensor name is not UTF-8");
    text +=
        fmt::format(",{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
                    Quoted(box.key), NameOf(box.dtype), Numbers(box.extent), box.begin, box.end);
  }
  text += '}';
  if (text.size() > kMaxPlannedHeaderBytes) {
    return Refuse("a header of {} bytes for {} tensors, at most {} wanted", text.size(),
                  boxes.size(), kMaxPlannedHeaderBytes);
  }
  const size_t whole =
      (kLengthBytes + text.size() + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  text.resize(whole - kLengthBytes, ' ');
  const uint64_t length = text.size();
  std::string header(kLengthBytes, '\0');
  std::memcpy(header.data(), &length, kLengthBytes);
  return header + text;
}

}  // namespace

absl::StatusOr<SafetensorsFile> ParseSafetensors(std::span<const std::byte> head,
                                                 uint64_t file_bytes) {
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t length, HeaderBytes(head, file_bytes));
  if (head.size() - kLengthBytes < length)
    return Refuse("{} bytes of a header of {}", head.size() - kLengthBytes, length);
  const std::string_view text(reinterpret_cast<const char*>(head.data()) + kLengthBytes, length);
  if (HasHiddenBytes(text)) return Refuse("a byte order mark or a NUL in the header");
  SafetensorsFile file;
  HeaderReader reader(file);
  if (!json::sax_parse(text.begin(), text.end(), &reader)) return Refuse("{}", reader.why);
  file.data_begin = kLengthBytes + length;
  file.data_bytes = file_bytes - file.data_begin;
  OUTLAST_RETURN_IF_ERROR(CheckNames(file.tensors));
  OUTLAST_RETURN_IF_ERROR(CheckPlaces(file.tensors, file.data_bytes));
  return file;
}

absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.is_open()) return FileError(errno, "open", path);
  struct stat facts;
  if (fstat(fd.get(), &facts) != 0) return FileError(errno, "stat", path);
  if (!S_ISREG(facts.st_mode)) return Refuse("{}: not a regular file", path);
  const auto file_bytes = static_cast<uint64_t>(facts.st_size);
  std::vector<std::byte> head(std::min(file_bytes, kLengthBytes));
  OUTLAST_RETURN_IF_ERROR(ReadAt(fd.get(), head, 0, path));
  const auto length = HeaderBytes(head, file_bytes);
  if (!length.ok()) return Annotate(length.status(), path);
  head.resize(kLengthBytes + *length);
  OUTLAST_RETURN_IF_ERROR(ReadAt(fd.get(), head, 0, path));
  auto file = ParseSafetensors(head, file_bytes);
  if (!file.ok()) return Annotate(file.status(), path);
  return file;
}

absl::StatusOr<uint64_t> LayOut(std::vector<SafetensorsBox>& boxes) {
  std::sort(boxes.begin(), boxes.end(), [](const SafetensorsBox& a, const SafetensorsBox& b) {
    if (BitsOf(a.dtype) != BitsOf(b.dtype)) return BitsOf(a.dtype) > BitsOf(b.dtype);
    if (a.name != b.name) return a.name < b.name;
    return std::ranges::lexicographical_compare(a.offset.dimensions(), b.offset.dimensions());
  });
  std::set<std::string_view> names;
  for (const SafetensorsBox& box : boxes) names.insert(box.name);
  uint64_t position = 0;
  int more = 0;  // boxes of this name before
  for (size_t i = 0; i < boxes.size(); ++i) {
    SafetensorsBox& box = boxes[i];
    more = i > 0 && boxes[i - 1].name == box.name ? more + 1 : 0;
    box.key = more == 0 ? box.name : fmt::format("{}#{}", box.name, more);
    if (more > 0 && names.contains(box.key)) {
      return Refuse("tensor '{}': its box {} needs the name of another tensor, '{}'", box.name,
                    more, box.key);
    }
    OUTLAST_ASSIGN_OR_RETURN(const uint64_t bytes, BytesOf(box.dtype, box.extent));
    box.begin = position;
    if (__builtin_add_overflow(position, bytes, &position) || position >> 62 != 0) {
      return Refuse("tensor '{}': more than 2^62 bytes in one file", box.name);
    }
    box.end = position;
  }
  return position;
}

absl::StatusOr<std::string> BuildHeader(std::span<const SafetensorsBox> boxes) {
  return HeaderOf(boxes, MetadataText(boxes));
}

absl::StatusOr<std::string> BuildHeader(std::span<const SafetensorsBox> boxes,
                                        const std::map<std::string, std::string>& metadata) {
  std::string text;
  for (const auto& [key, value] : metadata) {
    if (!IsUtf8(key) || !IsUtf8(value)) return Refuse("metadata that is not UTF-8");
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", Quoted(key), Quoted(value));
  }
  return HeaderOf(boxes, fmt::format("{}:{{{}}}", Quoted(kMetadataKey), text));
}

}  // namespace outlast
