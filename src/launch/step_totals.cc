#include "launch/step_totals.h"

#include <algorithm>

namespace outlast {

void StepTotals::Add(const StepRecord& step) {
  last_end_ns = std::max(last_end_ns, static_cast<int64_t>(step.end_ns));
  if ((step.flags & kStepAborted) != 0 || step.end_ns < step.start_ns) return;
  const auto whole_ns = static_cast<int64_t>(step.end_ns - step.start_ns);
  const std::array<uint64_t, kStepParts.size() - 1> named = {
      step.data_ns, step.forward_ns, step.backward_ns, step.optimizer_ns, step.checkpoint_stall_ns};
  int64_t left_ns = whole_ns;
  for (size_t i = 0; i < named.size(); ++i) {
    // A record that a wild store changed must not make a counter fall.
    const int64_t part =
        std::min<int64_t>(left_ns, static_cast<int64_t>(std::min<uint64_t>(named[i], INT64_MAX)));
    part_ns[i] += part;
    left_ns -= part;
  }
  part_ns.back() += left_ns;
  collective_wait_ns += static_cast<int64_t>(
      std::min<uint64_t>(step.collective_wait_ns, static_cast<uint64_t>(whole_ns)));
  ++steps;
  tokens += step.tokens_real;
  samples += step.samples;
  const double flops = step.model_flops > 0 ? step.model_flops : 0;
  model_flops += flops;
  time_ns += whole_ns;
  const double seconds = static_cast<double>(whole_ns) / 1e9;
  ++buckets[static_cast<size_t>(std::lower_bound(kBounds.begin(), kBounds.end(), seconds) -
                                kBounds.begin())];
  Kept& kept = kept_[steps % kWindow];
  const int64_t rate_ns =
      whole_ns - std::min<int64_t>(whole_ns, static_cast<int64_t>(std::min<uint64_t>(
                                                 step.checkpoint_stall_ns, INT64_MAX)));
  window_flops_ += flops - kept.flops;
  window_ns_ += rate_ns - kept.ns;
  kept = {flops, rate_ns};
}

}  // namespace outlast
