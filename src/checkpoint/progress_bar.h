// One line on a terminal that says how far a long piece of work is.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

namespace outlast {

// "1.5 GB" (10^9 bytes), "12 kB", "7 bytes".
std::string BytesText(uint64_t bytes);

// For one thread. Draws at most ten times a second, over its own line, and takes it away at the
// end. Without a stream it does nothing: whoever has no terminal gets no bar.
class ProgressBar {
 public:
  // `out` is borrowed, or null. `total` bytes; 0: unknown, so no share is shown.
  ProgressBar(std::ostream* out, std::string label, uint64_t total);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Add(uint64_t bytes);

 private:
  void Draw(int64_t now);

  std::ostream* out_;
  std::string label_;
  uint64_t total_, done_ = 0;
  int64_t began_, drawn_ = 0;  // CLOCK_MONOTONIC, ns; 0: nothing is drawn
};

}  // namespace outlast
