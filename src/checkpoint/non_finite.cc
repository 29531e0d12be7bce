#include "checkpoint/non_finite.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "checkpoint/float_types.h"

namespace outlast {
namespace {

// Elements in a stretch that is looked at without a branch.
constexpr size_t kStretchBytes = 16 << 10;
// Between two looks at the deadline.
constexpr size_t kPieceBytes = size_t{32} << 20;

// A type's non-finite values are those whose bits under `mask` are all set; or, for types with one
// NaN, the one value (mask: all bits) or the one but for its sign.
template <typename Word>
std::optional<uint64_t> FirstOf(std::span<const std::byte> bytes, Word mask, Word value) {
  const auto* words = reinterpret_cast<const Word*>(bytes.data());
  const size_t count = bytes.size() / sizeof(Word);
  constexpr size_t kStretch = kStretchBytes / sizeof(Word);
  for (size_t begin = 0; begin < count; begin += kStretch) {
    const size_t end = std::min(count, begin + kStretch);
    // No early exit: the compiler makes vectors of this.
    Word found = 0;
    for (size_t i = begin; i < end; ++i)
      found |= static_cast<Word>((words[i] & mask) == value ? ~Word{0} : Word{0});
    if (found == 0) continue;
    for (size_t i = begin; i < end; ++i)
      if ((words[i] & mask) == value) return i;
  }
  return std::nullopt;
}

template <typename Word>
std::optional<uint64_t> FirstOf(std::span<const std::byte> bytes, Word mask) {
  return FirstOf<Word>(bytes, mask, mask);
}

// The index of element `flat` of a box in its whole tensor: "[3, 17]".
std::string IndexText(const HookTensor& tensor, uint64_t flat) {
  Shape index = Shape::Zeros(tensor.extent.rank());
  for (int i = tensor.extent.rank() - 1; i >= 0; --i) {
    const auto length = static_cast<uint64_t>(tensor.extent[i]);
    const int64_t offset = tensor.offset.rank() == tensor.extent.rank() ? tensor.offset[i] : 0;
    index.set(i, offset + static_cast<int64_t>(flat % length));
    flat /= length;
  }
  return index.text();
}

class NonFiniteHook final : public CommitHook {
 public:
  explicit NonFiniteHook(std::vector<std::string> skip) : skip_(std::move(skip)) {}

  std::string_view name() const override { return kNonFiniteHook; }
  absl::Duration deadline() const override { return absl::Minutes(5); }

  HookVerdict Check(const HookView& view, const std::function<bool()>& is_over) override {
    uint64_t bytes = 0;
    for (const HookShard& shard : view.shards) {
      for (const HookTensor& tensor : shard.tensors) {
        if (!IsFloat(tensor.dtype) || IsSkipped(tensor.name)) continue;
        bytes += tensor.bytes.size();
        for (size_t at = 0; at < tensor.bytes.size(); at += kPieceBytes) {
          if (is_over()) return {HookVerdict::Outcome::kError, "not done by its deadline"};
          const auto piece =
              tensor.bytes.subspan(at, std::min(kPieceBytes, tensor.bytes.size() - at));
          if (const auto found = FirstNonFinite(tensor.dtype, piece))
            return Veto(shard, tensor, *found + at * 8 / static_cast<size_t>(BitsOf(tensor.dtype)));
        }
      }
    }
    return {HookVerdict::Outcome::kOk, fmt::format("{} bytes of floats are finite", bytes)};
  }

 private:
  bool IsSkipped(std::string_view name) const {
    return std::ranges::any_of(
        skip_, [&](const std::string& pattern) { return MatchesPattern(name, pattern); });
  }

  static HookVerdict Veto(const HookShard& shard, const HookTensor& tensor, uint64_t flat) {
    return {HookVerdict::Outcome::kVeto,
            fmt::format("tensor '{}' ({}) of rank {} is not finite at {}", tensor.name,
                        NameOf(tensor.dtype), shard.rank, IndexText(tensor, flat))};
  }

  const std::vector<std::string> skip_;
};

}  // namespace

std::optional<uint64_t> FirstNonFinite(DType dtype, std::span<const std::byte> bytes) {
  switch (dtype) {
    case DType::kF8E5M2:  // exponent all ones: infinity or NaN, as in IEEE 754
      return FirstOf<uint8_t>(bytes, 0x7c);
    case DType::kF8E4M3:  // no infinity; NaN is all ones but for the sign
      return FirstOf<uint8_t>(bytes, 0x7f);
    case DType::kF8E8M0:  // a power of two; NaN is all ones
      return FirstOf<uint8_t>(bytes, 0xff);
    case DType::kF8E4M3Fnuz:
    case DType::kF8E5M2Fnuz:  // NaN is what would be minus zero
      return FirstOf<uint8_t>(bytes, 0xff, 0x80);
    case DType::kF16:
      return FirstOf<uint16_t>(bytes, 0x7c00);
    case DType::kBF16:
      return FirstOf<uint16_t>(bytes, 0x7f80);
    case DType::kF32:
      return FirstOf<uint32_t>(bytes, 0x7f800000);
    case DType::kC64: {
      const auto part = FirstOf<uint32_t>(bytes, 0x7f800000);
      return part.has_value() ? std::optional(*part / 2) : std::nullopt;
    }
    case DType::kF64:
      return FirstOf<uint64_t>(bytes, uint64_t{0x7ff} << 52);
    default:
      return std::nullopt;
  }
}

bool MatchesPattern(std::string_view name, std::string_view pattern) {
  size_t n = 0, p = 0;
  size_t star = std::string_view::npos, resume = 0;  // the latest '*', and what it took so far
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::shared_ptr<CommitHook> MakeNonFiniteHook(std::vector<std::string> skip) {
  return std::make_shared<NonFiniteHook>(std::move(skip));
}

}  // namespace outlast
