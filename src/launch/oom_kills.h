// Which deaths by SIGKILL are the kernel's own, of a machine or control group without memory. It
// counts them and does not say whom it killed, so a death that comes with a new count is one.
#pragma once

#include <cstdint>
#include <string>

namespace outlast {

class OomKills {
 public:
  // Counts those of this process' control group, of either version, or of the whole machine where
  // it has none of its own.
  OomKills();
  // Reads "oom_kill N" from the file.
  explicit OomKills(std::string path);

  // Of a process that SIGKILL ended, and nobody here had sent it. True uses one count up.
  bool Take();
  // Every few seconds: counts that nobody took from one call to the next were of other processes.
  void ForgetOld();

 private:
  uint64_t Count() const;

  std::string path_;
  uint64_t used_;   // counts that are explained
  uint64_t known_;  // at the last ForgetOld
};

}  // namespace outlast
