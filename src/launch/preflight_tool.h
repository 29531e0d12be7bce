// `outlast preflight`: whether this node is fit to train.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace outlast {

// 0: fit, or nobody knows, which is said; 87: unfit; 85: unknown arguments.
int RunPreflightTool(const std::vector<std::string>& arguments, std::ostream& out,
                     std::ostream& err);

}  // namespace outlast
