// Named stretches of work, each with its own limit.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "outlast/blackbox/progress.h"

namespace outlast {

struct SectionOptions {
  Phase phase = Phase::kUser;
  // A declared limit is firm; unset: the watchdog learns one. Zero and negative are refused (the
  // section then has none declared, and a line says so); absl::InfiniteDuration() switches the
  // limit off.
  std::optional<absl::Duration> limit;
};

// Move-only. Ends the section when it goes. Sections nest; they close in the reverse order.
class SectionScope {
 public:
  SectionScope() = default;
  SectionScope(ProgressWriter* progress, SectionDepth depth) : progress_(progress), depth_(depth) {}
  SectionScope(SectionScope&& other) noexcept : progress_(other.progress_), depth_(other.depth_) {
    other.progress_ = nullptr;
  }
  SectionScope& operator=(SectionScope&&) = delete;
  ~SectionScope();

  // Any growing count: re-arms the section's limit.
  void Progress(uint64_t count);

 private:
  ProgressWriter* progress_ = nullptr;
  SectionDepth depth_ = 0;
};

}  // namespace outlast
