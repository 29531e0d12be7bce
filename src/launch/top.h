// The live view of `outlast top`.
#pragma once

#include <iosfwd>
#include <string>

namespace outlast {

// Redraws the run in `folder` in place, once a second, on the terminal that is standard output;
// until `q`, Ctrl-C, SIGTERM, or the run's end, which it shows. The terminal is left as it was,
// with the last picture on it. The exit code: 0, or 85 with one line on `err`.
int WatchOnTerminal(const std::string& folder, std::ostream& err);

}  // namespace outlast
