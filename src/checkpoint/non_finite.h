// Infinities and NaNs among a tensor's elements, and the hook that looks for them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "outlast/checkpoint/commit_hook.h"
#include "outlast/checkpoint/dtype.h"

namespace outlast {

// The index of the first element that is infinite or NaN; of a C64, either part. `bytes` is packed,
// and aligned for the type. Types without any: nullopt.
std::optional<uint64_t> FirstNonFinite(DType dtype, std::span<const std::byte> bytes);

// Whether `name` is as `pattern` says: `*` any characters, `?` one byte, all others themselves.
bool MatchesPattern(std::string_view name, std::string_view pattern);

// Vetoes a checkpoint with an infinity or a NaN, naming tensor, rank and index in the whole tensor,
// the first of them. Tensors whose name matches one of `skip` are left out.
std::shared_ptr<CommitHook> MakeNonFiniteHook(std::vector<std::string> skip);
inline constexpr std::string_view kNonFiniteHook = "non_finite";

}  // namespace outlast
