#include "base/prompt_thread.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace outlast {
namespace {

// The kernel's struct sched_attr, first version (sched_setattr(2)). glibc 2.36 has none.
struct SchedulingAttributes {
  uint32_t size = sizeof(SchedulingAttributes);
  uint32_t policy = SCHED_OTHER;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0;  // ns; of SCHED_OTHER: the slice, from Linux 6.12 on
  uint64_t deadline = 0;
  uint64_t period = 0;
};
static_assert(sizeof(SchedulingAttributes) == 48);

constexpr uint64_t kResetOnFork = 1;  // SCHED_FLAG_RESET_ON_FORK
constexpr uint64_t kSlice = 100'000;  // the kernel's shortest
constexpr int32_t kUrgentNice = -10;

bool Set(const SchedulingAttributes& attributes) {
  return syscall(SYS_sched_setattr, 0, &attributes, 0) == 0;
}

}  // namespace

void BecomePrompt() {
  errno = 0;
  if (sched_getscheduler(0) != SCHED_OTHER || getpriority(PRIO_PROCESS, 0) != 0 || errno != 0)
    return;
  SchedulingAttributes wanted;
  wanted.flags = kResetOnFork;
  wanted.nice = kUrgentNice;
  wanted.runtime = kSlice;
  if (Set(wanted)) return;
  wanted.nice = 0;
  Set(wanted);
}

}  // namespace outlast
