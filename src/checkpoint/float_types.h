// Which element types are floats.
#pragma once

#include "outlast/checkpoint/dtype.h"

namespace outlast {

// A float of whole bytes: its values can be compared, and may be infinite or NaN. F4 and F6 are
// none: they are packed, and have neither.
inline bool IsFloat(DType dtype) {
  switch (dtype) {
    case DType::kF8E5M2:
    case DType::kF8E4M3:
    case DType::kF8E8M0:
    case DType::kF8E4M3Fnuz:
    case DType::kF8E5M2Fnuz:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
    case DType::kC64:
      return true;
    default:
      return false;
  }
}

}  // namespace outlast
