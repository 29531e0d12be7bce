// `outlast preflight`: whether this node is fit to train.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace outlast {

// 0: fit, or nobody knows, which is said; 87: unfit; 85: wrong arguments; 128 + signal: stopped.
// Blocks signals and becomes a subreaper: for a process that does nothing else.
int RunPreflightTool(const std::vector<std::string>& arguments, std::ostream& out,
                     std::ostream& err);

}  // namespace outlast
