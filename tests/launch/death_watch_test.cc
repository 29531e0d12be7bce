#include "launch/death_watch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "outlast/blackbox/segment.h"

namespace outlast {
namespace {

// A process that holds the death notice of a black box, as a joined worker does.
class Holder {
 public:
  explicit Holder(const std::function<void()>& life) {
    int ready[2];
    if (pipe(ready) != 0) ADD_FAILURE() << "no pipe";
    pid_ = fork();
    if (pid_ == 0) {
      Segment own = Segment::Open(Duplicate(box_.fd()).value()).value();
      own.Adopt({.pid = getpid(), .pid_start_time = 1});
      if (!own.HoldDeathNotice().ok() || write(ready[1], "x", 1) != 1) _exit(99);
      life();
      _exit(0);
    }
    close(ready[1]);
    char byte;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
  }
  ~Holder() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  DeathWatch::Life life(int slot) const { return {slot, 7, pid_, box_.death_notice_word()}; }
  pid_t pid() const { return pid_; }

 private:
  Segment box_ = Segment::Create({}).value();
  pid_t pid_ = 0;
};

struct Death {
  int slot;
  uint64_t incarnation;
  int signal;
  bool operator==(const Death&) const = default;
};

class DeathWatchTest : public ::testing::Test {
 protected:
  // Runs the loop until `count` deaths were told, or for `limit`. Once a test.
  void RunFor(size_t count, absl::Duration limit) {
    wanted_ = count;
    loop_->RunAfter(limit, [this] { loop_->Stop(); });
    loop_->Run();
  }

  // Outlives the watch, as the words that it reads must.
  Holder& Hold(const std::function<void()>& life) {
    return *holders_.emplace_back(std::make_unique<Holder>(life));
  }

  std::unique_ptr<EventLoop> loop_ = EventLoop::Make().value();
  std::vector<std::unique_ptr<Holder>> holders_;
  std::vector<Death> told_;
  size_t wanted_ = 0;
  std::function<void()> on_told_ = [] {};
  DeathWatch watch_{*loop_, [this](int slot, uint64_t incarnation, int signal) {
                      told_.push_back({slot, incarnation, signal});
                      on_told_();
                      if (told_.size() >= wanted_) loop_->Stop();
                    }};
};

TEST_F(DeathWatchTest, TellsTheSignalOfEachThatIsKilled) {
  Holder& first = Hold([] { pause(); });
  Holder& second = Hold([] { pause(); });
  watch_.Watch(first.life(0));
  watch_.Watch(second.life(3));

  on_told_ = [&] { kill(first.pid(), SIGTERM); };
  kill(second.pid(), SIGKILL);
  RunFor(2, absl::Seconds(20));

  EXPECT_EQ(told_, (std::vector<Death>{{3, 7, SIGKILL}, {0, 7, SIGTERM}}));
}

TEST_F(DeathWatchTest, TellsOfADeathBeforeTheWatch) {
  Holder& holder = Hold([] { pause(); });
  kill(holder.pid(), SIGKILL);
  siginfo_t ended{};
  waitid(P_PID, static_cast<id_t>(holder.pid()), &ended, WEXITED | WNOWAIT);

  watch_.Watch(holder.life(1));
  RunFor(1, absl::Seconds(20));

  EXPECT_EQ(told_, (std::vector<Death>{{1, 7, SIGKILL}}));
}

// Its exit code decides what it means, and comes with its end.
TEST_F(DeathWatchTest, SaysNothingOfAProcessThatExitsByItself) {
  Holder& clean = Hold([] {});
  Holder& failed = Hold([] { _exit(3); });
  Holder& killed = Hold([] { pause(); });
  watch_.Watch(clean.life(0));
  watch_.Watch(failed.life(1));
  watch_.Watch(killed.life(2));
  for (const pid_t pid : {clean.pid(), failed.pid()}) {
    siginfo_t ended{};
    waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT);
  }

  kill(killed.pid(), SIGKILL);
  RunFor(1, absl::Seconds(20));

  EXPECT_EQ(told_, (std::vector<Death>{{2, 7, SIGKILL}}));
}

// Told while it looks at another's end, which takes a while.
TEST_F(DeathWatchTest, MissesNoneOfManyThatDieTogether) {
  for (int slot = 0; slot < 16; ++slot) watch_.Watch(Hold([] { pause(); }).life(slot));
  for (const auto& holder : holders_) kill(holder->pid(), SIGKILL);
  RunFor(16, absl::Seconds(20));
  EXPECT_EQ(told_.size(), 16u);
}

TEST_F(DeathWatchTest, EndsWhileAllItWatchesLives) {
  Holder& holder = Hold([] { pause(); });
  watch_.Watch(holder.life(0));
  RunFor(1, absl::Milliseconds(1));
  EXPECT_TRUE(told_.empty());
}

}  // namespace
}  // namespace outlast
