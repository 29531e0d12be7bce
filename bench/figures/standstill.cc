#include "figures/standstill.h"

#include <sched.h>
#include <time.h>

#include "outlast/base/clock.h"

namespace outlast::bench {
namespace {

constexpr int kMostCpus = 8;
constexpr int64_t kPeriodNanos = 2'000'000;

bool TakeHighestPriorityOn(int cpu) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(cpu, &only);
  const sched_param highest{sched_get_priority_max(SCHED_FIFO)};
  return sched_setaffinity(0, sizeof only, &only) == 0 &&
         sched_setscheduler(0, SCHED_FIFO, &highest) == 0;
}

}  // namespace

Standstill::Standstill() {
  cpu_set_t ours;
  if (sched_getaffinity(0, sizeof ours, &ours) != 0) CPU_ZERO(&ours);
  for (int cpu = 0; cpu < CPU_SETSIZE && threads_.size() < kMostCpus; ++cpu) {
    if (CPU_ISSET(cpu, &ours)) threads_.emplace_back([this, cpu] { Watch(cpu); });
  }
}

Standstill::~Standstill() {
  ends_ = true;
  for (std::thread& thread : threads_) thread.join();
}

void Standstill::Watch(int cpu) {
  if (!TakeHighestPriorityOn(cpu)) {
    is_refused_ = true;
    return;
  }
  while (!ends_) {
    const int64_t due = MonotonicNanos() + kPeriodNanos;
    const timespec at{due / 1'000'000'000, due % 1'000'000'000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr);
    const int64_t late = MonotonicNanos() - due;
    int64_t longest = longest_ns_;
    while (late > longest && !longest_ns_.compare_exchange_weak(longest, late)) {
    }
  }
}

std::optional<double> Standstill::TakeLongest() {
  const int64_t longest = longest_ns_.exchange(0);
  if (is_refused_ || threads_.empty()) return std::nullopt;
  return static_cast<double>(longest) / 1e6;
}

}  // namespace outlast::bench
