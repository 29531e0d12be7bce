// A thread that sleeps, is woken, decides in microseconds and sleeps again, beside processes that
// keep every CPU busy.
#pragma once

namespace outlast {

// Asks the kernel to let the calling thread run soon after it is woken. By a short slice (0.1 ms;
// Linux 6.12, anyone may) and by nice -10 (root or CAP_SYS_NICE). Threads and processes that it
// makes later get the kernel's defaults again. A thread whose niceness or policy somebody has
// chosen is left as it is, as is one of a kernel that refuses.
void BecomePrompt();

}  // namespace outlast
