// Reader.RefusesHostileHeaders of design/checkpoint.md, section 9.
#include <cstring>

#include "checkpoint/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace {

using outlast::fuzz::Require;

void Check(std::span<const std::byte> head, uint64_t file_bytes) {
  const auto file = outlast::ParseSafetensors(head, file_bytes);
  if (!file.ok()) return;
  uint64_t position = 0;
  for (const outlast::SafetensorsTensor& tensor : file->tensors) {
    Require(tensor.begin == position && tensor.end >= tensor.begin, "no hole, no overlap");
    const auto bytes = outlast::BytesOf(tensor.dtype, tensor.shape);
    Require(bytes.ok() && *bytes == tensor.end - tensor.begin, "the bytes of dtype and shape");
    position = tensor.end;
  }
  Require(position == file->data_bytes, "the data ends with the last tensor");
  Require(file->data_begin + file->data_bytes == file_bytes, "and the file with the data");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  Check(bytes, size);
  if (size < 16) return 0;
  // A mutation that changes the header's bytes seldom mends its length, and the last eight bytes
  // say how large the whole file is.
  uint64_t file_bytes = 0;
  std::memcpy(&file_bytes, data + size - 8, 8);
  std::string text(outlast::fuzz::TextOf(data, size - 8));
  const uint64_t length = text.size() - 8;
  std::memcpy(text.data(), &length, 8);
  Check(std::as_bytes(std::span(text)), file_bytes);
  Check(std::as_bytes(std::span(text)), text.size());
  return 0;
}
