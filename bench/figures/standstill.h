// Whether the machine itself stood still: a host that holds a virtual machine to its share stops
// all of its CPUs for tens of milliseconds. What was measured meanwhile says nothing of us.
#pragma once

#include <atomic>
#include <optional>
#include <thread>
#include <vector>

namespace outlast::bench {

// A thread of the highest priority on each of the first CPUs wants to run every other millisecond.
class Standstill {
 public:
  Standstill();
  ~Standstill();
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;

  // Milliseconds that such a thread was late at most, since it was asked last; none: threads of
  // that priority are not allowed here (root, or CAP_SYS_NICE).
  std::optional<double> TakeLongest();

 private:
  void Watch(int cpu);

  std::atomic<bool> ends_{false};
  std::atomic<bool> is_refused_{false};
  std::atomic<int64_t> longest_ns_{0};
  std::vector<std::thread> threads_;
};

}  // namespace outlast::bench
