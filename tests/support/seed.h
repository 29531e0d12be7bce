// The seed of a test that draws at random: printed, and given again by OUTLAST_SEED=n.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace outlast::testing {

inline uint32_t DrawSeed() {
  const char* wanted = std::getenv("OUTLAST_SEED");
  const uint32_t seed = wanted != nullptr ? static_cast<uint32_t>(std::atoll(wanted))
                                          : std::random_device()() % 1'000'000;
  std::printf("OUTLAST_SEED=%u\n", seed);
  return seed;
}

}  // namespace outlast::testing
