// What this machine has for workers.
#pragma once

#include <string>

namespace outlast {

// CPUs that this process may run on; at least 1.
int CountCpus();
// NVIDIA devices that a worker would see: those of CUDA_VISIBLE_DEVICES where it is set, else all
// of /dev/nvidia<n>.
int CountGpus();
// For people; never empty.
std::string HostName();

}  // namespace outlast
