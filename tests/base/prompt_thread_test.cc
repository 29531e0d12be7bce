#include "base/prompt_thread.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

namespace outlast {
namespace {

int NiceOfThisThread() { return getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())); }

void InAThread(const std::function<void()>& body) { std::thread(body).join(); }

// Root in a container may lack the capability.
bool may_hurry() {
  bool may = false;
  InAThread([&] { may = setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), -1) == 0; });
  return may;
}

class PromptThread : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NiceOfThisThread() != 0) GTEST_SKIP() << "this test itself is niced";
  }
};

TEST_F(PromptThread, IsPreferredWhereThatIsAllowed) {
  InAThread([] {
    BecomePrompt();
    EXPECT_EQ(NiceOfThisThread(), may_hurry() ? -10 : 0);
  });
}

TEST_F(PromptThread, HasOrdinaryThreadsAndProcesses) {
  InAThread([] {
    BecomePrompt();
    InAThread([] { EXPECT_EQ(NiceOfThisThread(), 0); });
    const pid_t child = fork();
    if (child == 0) _exit(NiceOfThisThread() == 0 ? 0 : 1);
    int end = -1;
    ASSERT_EQ(waitpid(child, &end, 0), child);
    EXPECT_EQ(end, 0);
  });
}

TEST_F(PromptThread, IsLeftAsSomebodyHasSetIt) {
  InAThread([] {
    ASSERT_EQ(setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 3), 0);
    BecomePrompt();
    EXPECT_EQ(NiceOfThisThread(), 3);
    InAThread([] { EXPECT_EQ(NiceOfThisThread(), 3); });
  });
  InAThread([] {
    const sched_param none{};
    ASSERT_EQ(sched_setscheduler(0, SCHED_BATCH, &none), 0);
    BecomePrompt();
    EXPECT_EQ(sched_getscheduler(0), SCHED_BATCH);
    EXPECT_EQ(NiceOfThisThread(), 0);
  });
}

}  // namespace
}  // namespace outlast
