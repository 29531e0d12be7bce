#include "outlast/testing/time_factor.h"

#include <cstdlib>

namespace outlast::testing {

double TimeFactor() {
  const char* text = std::getenv("OUTLAST_TEST_TIME_FACTOR");
  const double factor = text == nullptr ? 1 : std::strtod(text, nullptr);
  return factor > 0 ? factor : 1;
}

}  // namespace outlast::testing
