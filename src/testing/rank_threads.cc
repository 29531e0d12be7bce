#include "testing/rank_threads.h"

#include <pthread.h>

#include <csignal>
#include <utility>

#include "base/error.h"
#include "outlast/testing/time_factor.h"
#include "run/run_state.h"

namespace outlast::testing {
namespace {

constexpr absl::Duration kUnwindTime = absl::Milliseconds(100);

}  // namespace

void RankThreads::Spawn(int slot, const WorkerEnvironment& environment, const Body& body) {
  MutexLock lock(mutex_);
  Rank& rank = ranks_.emplace_back();
  rank.slot = slot;
  rank.incarnation = environment.incarnation;
  rank.thread = std::thread([this, &rank, environment, &body] { Main(rank, environment, body); });
}

void RankThreads::Main(Rank& rank, const WorkerEnvironment& environment, const Body& body) {
  pthread_setname_np(pthread_self(), fmt::format("rank{}", environment.rank).c_str());
  const absl::Status left = RunBody(rank, environment, body);
  {
    MutexLock lock(rank.mutex);
    if (!rank.killed) rank.end = {.code = left.ok() ? 0 : 1};
  }
  Report(rank);
}

absl::Status RankThreads::RunBody(Rank& rank, const WorkerEnvironment& environment,
                                  const Body& body) {
  OUTLAST_ASSIGN_OR_RETURN(const auto run, outlast::Run::Join({.environment = environment}));
  {
    MutexLock lock(rank.mutex);
    if (rank.killed) return absl::CancelledError("killed");
    rank.state = RunAccess::State(*run);
  }
  absl::Status left = body(*run);
  std::shared_ptr<RunState> state;  // let go of outside the lock
  MutexLock lock(rank.mutex);
  state.swap(rank.state);
  return left;
}

void RankThreads::End(Rank& rank, const ProcessEnd& end) {
  std::shared_ptr<RunState> state;
  {
    MutexLock lock(rank.mutex);
    if (rank.killed || rank.reported) return;
    rank.killed = true;
    rank.end = end;
    state = rank.state;
  }
  if (state != nullptr) state->Kill();
  loop_.RunAfter(kUnwindTime * TimeFactor(), [this, &rank] { Report(rank); });
}

void RankThreads::Report(Rank& rank) {
  MutexLock lock(rank.mutex);
  if (std::exchange(rank.reported, true)) return;
  loop_.Post([this, slot = rank.slot, incarnation = rank.incarnation, end = rank.end] {
    on_end_(slot, incarnation, end);
  });
}

void RankThreads::Kill(int slot, const ProcessEnd& end) {
  if (Rank* rank = Present(slot); rank != nullptr) End(*rank, end);
}

void RankThreads::Kill(int slot, uint64_t incarnation, const ProcessEnd& end) {
  Rank* rank = Present(slot);
  if (rank != nullptr && rank->incarnation == incarnation) End(*rank, end);
}

void RankThreads::KillAll() {
  for (Rank* rank : All()) End(*rank, {.signal = SIGKILL, .by_us = true});
}

void RankThreads::Join() {
  for (Rank* rank : All()) {
    if (rank->thread.joinable()) rank->thread.join();
  }
}

RankThreads::Rank* RankThreads::Present(int slot) {
  MutexLock lock(mutex_);
  for (auto rank = ranks_.rbegin(); rank != ranks_.rend(); ++rank) {
    if (rank->slot == slot) return &*rank;
  }
  return nullptr;
}

std::vector<RankThreads::Rank*> RankThreads::All() {
  MutexLock lock(mutex_);
  std::vector<Rank*> all;
  for (Rank& rank : ranks_) all.push_back(&rank);
  return all;
}

}  // namespace outlast::testing
