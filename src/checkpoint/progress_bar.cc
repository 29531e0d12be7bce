#include "checkpoint/progress_bar.h"

#include <algorithm>
#include <ostream>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr int64_t kRedrawNanos = 100'000'000;
constexpr uint64_t kWidth = 24;

}  // namespace

std::string BytesText(uint64_t bytes) {
  constexpr std::pair<uint64_t, const char*> kUnits[] = {
      {1'000'000'000'000, "TB"}, {1'000'000'000, "GB"}, {1'000'000, "MB"}, {1'000, "kB"}};
  for (const auto& [unit, name] : kUnits) {
    if (bytes >= unit)
      return fmt::format("{:.{}f} {}", static_cast<double>(bytes) / static_cast<double>(unit),
                         bytes < 10 * unit ? 1 : 0, name);
  }
  return fmt::format("{} bytes", bytes);
}

ProgressBar::ProgressBar(std::ostream* out, std::string label, uint64_t total)
    : out_(out), label_(std::move(label)), total_(total), began_(MonotonicNanos()) {}

ProgressBar::~ProgressBar() {
  if (out_ != nullptr && drawn_ != 0) *out_ << "\r\033[K" << std::flush;
}

void ProgressBar::Add(uint64_t bytes) {
  done_ += bytes;
  if (out_ == nullptr) return;
  const int64_t now = MonotonicNanos();
  if (drawn_ == 0 || now - drawn_ >= kRedrawNanos) Draw(now);
}

void ProgressBar::Draw(int64_t now) {
  drawn_ = now;
  std::string line = label_;
  if (total_ > 0) {
    const double share = std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_));
    const auto full = static_cast<uint64_t>(share * kWidth);
    line += fmt::format(" [{}{}] {:3.0f} %", std::string(full, '#'),
                        std::string(kWidth - full, '.'), share * 100);
  }
  line += "  " + BytesText(done_);
  const double seconds = static_cast<double>(now - began_) / 1e9;
  if (seconds > 0.5)
    line += fmt::format("  {}/s",
                        BytesText(static_cast<uint64_t>(static_cast<double>(done_) / seconds)));
  *out_ << '\r' << line << "\033[K" << std::flush;
}

}  // namespace outlast
