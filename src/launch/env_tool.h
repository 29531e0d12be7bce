// `outlast env`: which launcher's variables are here, and what they mean.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "run/place.h"

namespace outlast {

// 0; 85: unknown arguments, or variables that contradict each other, which are told on `err`.
int RunEnvTool(const std::vector<std::string>& arguments, const Variables& variables,
               std::ostream& out, std::ostream& err);

}  // namespace outlast
