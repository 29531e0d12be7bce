// `outlast submit`.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace outlast {

// 0: submitted, or there already, or shown; 1: Slurm gave no answer, or an earlier one is just
// ending; 85: refused, by us or by Slurm.
int RunSubmitTool(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err);

}  // namespace outlast
