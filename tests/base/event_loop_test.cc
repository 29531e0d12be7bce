#include "base/event_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "outlast/base/clock.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;

std::unique_ptr<EventLoop> MakeLoop() { return std::move(EventLoop::Make()).value(); }

UniqueFd MakeReady() { return UniqueFd(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)); }

TEST(EventLoop, RunsPostedWorkInOrderAndBeforeItStops) {
  const auto loop = MakeLoop();
  std::vector<int> done;
  std::thread poster([&] {
    for (int i = 0; i < 3; ++i) loop->Post([&done, i] { done.push_back(i); });
    loop->Stop();
    loop->Stop();
  });
  loop->Run();
  poster.join();
  EXPECT_THAT(done, ElementsAre(0, 1, 2));
}

TEST(EventLoop, CallsWhenADescriptorIsReadableAndNotAfterUnwatch) {
  const auto loop = MakeLoop();
  const UniqueFd ready = MakeReady();
  int calls = 0;
  ASSERT_TRUE(loop->Watch(ready.get(),
                          [&] {
                            if (++calls < 3) return;
                            loop->Unwatch(ready.get());  // itself, from within
                            loop->RunAfter(absl::Milliseconds(1), [&] { loop->Stop(); });
                          })
                  .ok());
  loop->Run();
  EXPECT_EQ(calls, 3);
}

TEST(EventLoop, CallsWhenASocketTakesBytesWhileThatIsWanted) {
  const auto loop = MakeLoop();
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd near(ends[0]), far(ends[1]);
  int calls = 0;
  EXPECT_EQ(loop->WatchWrites(near.get(), true).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(loop->Watch(near.get(),
                          [&] {
                            if (++calls < 3) return;
                            EXPECT_TRUE(loop->WatchWrites(near.get(), false).ok());
                            loop->RunAfter(absl::Milliseconds(1), [&] { loop->Stop(); });
                          })
                  .ok());
  loop->RunAfter(absl::Milliseconds(1), [&] {
    EXPECT_EQ(calls, 0);  // nothing to read, and writes are not watched at first
    EXPECT_TRUE(loop->WatchWrites(near.get(), true).ok());
  });
  loop->Run();
  EXPECT_EQ(calls, 3);
}

TEST(EventLoop, DropsAnEventOfADescriptorThatWasRemovedInTheSameBatch) {
  const auto loop = MakeLoop();
  UniqueFd first = MakeReady();
  UniqueFd second = MakeReady();
  int calls = 0;
  const auto only_one = [&] {
    ++calls;
    loop->Unwatch(first.get());
    loop->Unwatch(second.get());
    // The number is used again at once, by something that is not ready.
    const int number = second.get();
    second.Reset();
    second = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    EXPECT_EQ(second.get(), number);
    EXPECT_TRUE(loop->Watch(second.get(), [&] { ADD_FAILURE() << "a stale event"; }).ok());
    loop->RunAfter(absl::Milliseconds(1), [&] { loop->Stop(); });
  };
  ASSERT_TRUE(loop->Watch(first.get(), only_one).ok());
  ASSERT_TRUE(loop->Watch(second.get(), only_one).ok());
  loop->Run();
  EXPECT_EQ(calls, 1);
}

TEST(EventLoop, RunsTimersInTheOrderOfTheirDeadlinesAndCancelledOnesNever) {
  const auto loop = MakeLoop();
  const absl::Duration now = Clock::Real().Uptime();
  std::vector<int> fired;
  loop->RunAt(now + absl::Milliseconds(3), [&] {
    fired.push_back(3);
    loop->Stop();
  });
  loop->RunAt(now + absl::Milliseconds(1), [&] { fired.push_back(1); });
  const auto cancelled = loop->RunAt(now + absl::Milliseconds(2), [&] { fired.push_back(2); });
  loop->Cancel(cancelled);
  loop->Cancel(cancelled);
  loop->Run();
  EXPECT_THAT(fired, ElementsAre(1, 3));
  EXPECT_GE(Clock::Real().Uptime() - now, absl::Milliseconds(3));
}

TEST(EventLoop, ATimerThatArmsItselfDoesNotStarveDescriptors) {
  const auto loop = MakeLoop();
  const UniqueFd ready = MakeReady();
  std::function<void()> again = [&] { loop->RunAt(absl::ZeroDuration(), again); };
  again();
  ASSERT_TRUE(loop->Watch(ready.get(), [&] { loop->Stop(); }).ok());
  loop->Run();
}

TEST(EventLoop, SeesAHangUp) {
  const auto loop = MakeLoop();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  ASSERT_TRUE(loop->Watch(reader.get(), [&] { loop->Stop(); }).ok());
  writer.Reset();
  loop->Run();
}

TEST(EventLoop, RefusesWhatCannotBeWatched) {
  const auto loop = MakeLoop();
  EXPECT_FALSE(loop->Watch(-1, [] {}).ok());
  loop->Unwatch(12345);  // harmless
}

}  // namespace
}  // namespace outlast
