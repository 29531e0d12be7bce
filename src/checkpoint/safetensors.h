// The safetensors file format: u64 little-endian N, N bytes of JSON, then the data section. The
// writer makes our strict form (data begins at a multiple of 4096, tensors by element size and
// name, no hole); the reader accepts what the format allows and refuses the rest, whatever bytes it
// is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/checkpoint/dtype.h"

namespace outlast {

inline constexpr uint64_t kMaxPlannedHeaderBytes = uint64_t{64} << 20;  // what we write at most
inline constexpr uint64_t kMaxHeaderBytes =
    100'000'000;  // what the format allows, and we read at most

// No tensor's name: the member that holds the file's own texts.
inline constexpr std::string_view kMetadataKey = "__metadata__";

struct SafetensorsTensor {
  std::string key;
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t begin = 0, end = 0;  // bytes from the start of the data section
};

struct SafetensorsFile {
  std::vector<SafetensorsTensor> tensors;  // by begin, end, key
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  // of the data section in the file
  uint64_t data_bytes = 0;
};

// Checks and reads the header of a file of `file_bytes`; `head` is at least the header with its
// length, or the whole file. kInvalidArgument: not a safetensors file by the rules, with the rule
// that it breaks.
absl::StatusOr<SafetensorsFile> ParseSafetensors(std::span<const std::byte> head,
                                                 uint64_t file_bytes);

// The same for a file on disk; the errors name `path`. Allocates no more than the header needs.
absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path);

// A tensor box to be laid out in a file. `offset` is its place in the whole tensor.
struct SafetensorsBox {
  std::string name, key;
  DType dtype = DType::kF32;
  Shape global, offset, extent;
  uint64_t begin = 0, end = 0;
};

// Sorts `boxes` into file order, gives each its key (the name; name#1 and so on for more boxes of
// one tensor) and its place in the data section, and returns the section's bytes. kInvalidArgument:
// a shape without whole bytes, or bytes past 2^63 - 1.
absl::StatusOr<uint64_t> LayOut(std::vector<SafetensorsBox>& boxes);

// The first bytes of the file for boxes that LayOut arranged: length, JSON and spaces up to a
// multiple of 4096. Its metadata lets PyTorch's distributed checkpoint readers place the boxes
// (format, DCP_SHARDING_INFO, DCP_VERSION). kInvalidArgument: more than kMaxPlannedHeaderBytes, or
// a name that is not UTF-8.
absl::StatusOr<std::string> BuildHeader(std::span<const SafetensorsBox> boxes);

// The same for whole tensors, with this metadata alone.
absl::StatusOr<std::string> BuildHeader(std::span<const SafetensorsBox> boxes,
                                        const std::map<std::string, std::string>& metadata);

}  // namespace outlast
