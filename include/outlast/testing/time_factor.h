// Limits on wall time in tests are multiplied by this.
#pragma once

namespace outlast::testing {

// OUTLAST_TEST_TIME_FACTOR from the environment (sanitizer builds set 5); 1 when unset or not a
// positive number.
double TimeFactor();

}  // namespace outlast::testing
