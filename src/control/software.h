// What the ends of a stream call themselves.
#pragma once

namespace outlast::control {

inline constexpr char kSoftware[] = "outlast 0.1.0";

}  // namespace outlast::control
