// Conversions of element types that lose nothing.
#pragma once

#include <cstddef>

#include "outlast/checkpoint/dtype.h"

namespace outlast {

// Converts `elements` of one type to a wider one. Neither side need be aligned.
using WidenFunction = void (*)(const std::byte* from, std::byte* to, size_t elements);

// Null unless every value of `from` is one of `to`, with `to` the larger type, and the pair is one
// that Widening names.
WidenFunction WidenerOf(DType from, DType to);

}  // namespace outlast
