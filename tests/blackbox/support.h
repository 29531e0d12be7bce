// What the tests of the black box share.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "outlast/base/digest.h"
#include "outlast/base/memory.h"
#include "outlast/blackbox/flight_log.h"
#include "outlast/blackbox/progress.h"
#include "outlast/blackbox/segment.h"
#include "outlast/blackbox/step_log.h"

namespace outlast::testing {

// How often a test repeats: `full`, a twentieth under sanitizers, or what OUTLAST_TEST_REPEATS
// says.
inline int Repeats(int full) {
  if (const char* wanted = std::getenv("OUTLAST_TEST_REPEATS"))
    return std::max(1, std::atoi(wanted));
#ifdef OUTLAST_SANITIZED
  return std::max(1, full / 20);
#else
  return full;
#endif
}

// A generator whose seed is printed; OUTLAST_TEST_SEED repeats a run.
inline std::mt19937_64 SeededRandom() {
  const char* wanted = std::getenv("OUTLAST_TEST_SEED");
  const uint64_t seed =
      wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return std::mt19937_64(seed);
}

// A forked process that runs `body` and then exits with 0; killed and reaped at the end.
class Child {
 public:
  explicit Child(const std::function<void()>& body) : pid_(fork()) {
    if (pid_ != 0) return;
    body();
    _exit(0);
  }
  ~Child() {
    if (pid_ > 0) Kill();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void Kill() {
    kill(pid_, SIGKILL);
    Wait();
  }
  // The wait status.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

// A page of words that forked children share with us.
class SharedWords {
 public:
  uint64_t& operator[](size_t index) { return words_[index]; }

 private:
  UniqueFd fd_ = MakeSealedMemory("shared-words", 4096).value();
  Mapping mapping_ = Mapping::Shared(fd_.get(), 4096).value();
  uint64_t* words_ = reinterpret_cast<uint64_t*>(mapping_.data());
};

// What a child opens and its parent waits for, without burning the core that the child needs.
class Gate {
 public:
  void Open() { eventfd_write(fd_.get(), 1); }
  void Wait() {
    eventfd_t count = 0;
    eventfd_read(fd_.get(), &count);
  }

 private:
  UniqueFd fd_{eventfd(0, EFD_CLOEXEC)};
};

inline void SpinUntil(const std::function<bool()>& done) {
  while (!done()) std::this_thread::yield();
}

template <typename T>
std::string HexOf(const T& value) {
  return ToHex(std::as_bytes(std::span(&value, 1)));
}

// Reads all that a view offers; the sum keeps the optimizer from dropping it.
inline uint64_t ReadEverything(const SegmentView& view) {
  uint64_t sum = ReadProgress(view, 1000).sections.size() + ReadPairs(view).size();
  for (const CommSnapshot& comm : ReadComms(view)) {
    sum += ReadOperations(view, comm.index).size() + view.Members(comm.members_digest).size() +
           comm.name.size();
  }
  for (uint32_t ring = 0; ring < FlightRingCount(view); ++ring)
    sum += ReadFlightRing(view, ring).records.size();
  sum += ReadStepLog(view, 1).records.size();
  for (uint32_t index = 0; index < 2048; ++index) sum += view.String(index).size();
  return sum;
}

}  // namespace outlast::testing
