// Keeps forked children from writing into shared records: see outlast/blackbox/segment.h.
#pragma once

#include <cstddef>

namespace outlast::blackbox {

// From now on a forked child has private zero pages in place of this mapping.
void GuardAgainstFork(void* data, size_t bytes);
// Before it is unmapped.
void ForgetGuarded(void* data);
// In the child.
void DropGuarded();

}  // namespace outlast::blackbox
