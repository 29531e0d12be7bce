// Bytes of records: each struct names its fields once, for writing, reading and comparing sizes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace outlast {

// Appends in the machine's order, which is little-endian on all that we build for.
class FieldWriter {
 public:
  template <typename... Values>
  void operator()(Values&... values) {
    (Put(values), ...);
  }
  std::string Take() { return std::move(bytes_); }

 private:
  template <typename Value>
  void Put(const Value& value) {
    if constexpr (std::is_arithmetic_v<Value> || std::is_enum_v<Value>) {
      bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    } else if constexpr (std::is_same_v<Value, std::string>) {
      PutCount(value.size());
      bytes_ += value;
    } else if constexpr (std::is_same_v<Value, absl::Duration>) {
      Put(absl::ToInt64Nanoseconds(value));
    } else {
      Fields(*this, const_cast<Value&>(value));  // writing leaves it as it is
    }
  }
  template <typename Element>
  void Put(const std::vector<Element>& list) {
    PutCount(list.size());
    for (const Element& element : list) Put(element);
  }
  template <size_t kSize>
  void Put(const std::array<std::byte, kSize>& block) {
    bytes_.append(reinterpret_cast<const char*>(block.data()), kSize);
  }
  void PutCount(size_t count) { Put(static_cast<uint32_t>(count)); }

  std::string bytes_;
};

// The first field that does not fit makes all later ones empty, and ok() false.
class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : rest_(bytes) {}

  template <typename... Values>
  void operator()(Values&... values) {
    (Get(values), ...);
  }
  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && rest_.empty(); }

 private:
  template <typename Value>
  void Get(Value& value) {
    if constexpr (std::is_same_v<Value, bool>) {
      uint8_t byte = 0;
      Get(byte);
      ok_ = ok_ && byte <= 1;
      value = byte == 1;
    } else if constexpr (std::is_arithmetic_v<Value> || std::is_enum_v<Value>) {
      if (!Has(sizeof(value))) return;
      std::memcpy(&value, rest_.data(), sizeof(value));
      rest_.remove_prefix(sizeof(value));
    } else if constexpr (std::is_same_v<Value, std::string>) {
      const uint32_t size = GetCount();
      if (!Has(size)) return;
      value.assign(rest_.substr(0, size));
      rest_.remove_prefix(size);
    } else if constexpr (std::is_same_v<Value, absl::Duration>) {
      int64_t nanoseconds = 0;
      Get(nanoseconds);
      value = absl::Nanoseconds(nanoseconds);
    } else {
      Fields(*this, value);
    }
  }
  template <typename Element>
  void Get(std::vector<Element>& list) {
    const uint32_t count = GetCount();
    if (!Has(count)) return;  // an element has a byte at least
    // As they come: a count that is too large takes no more memory than the bytes that are there.
    list.clear();
    for (uint32_t i = 0; i < count && ok_; ++i) Get(list.emplace_back());
  }
  template <size_t kSize>
  void Get(std::array<std::byte, kSize>& block) {
    if (!Has(kSize)) return;
    std::memcpy(block.data(), rest_.data(), kSize);
    rest_.remove_prefix(kSize);
  }
  uint32_t GetCount() {
    uint32_t count = 0;
    Get(count);
    return count;
  }
  bool Has(size_t bytes) {
    ok_ = ok_ && rest_.size() >= bytes;
    return ok_;
  }

  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace outlast
