#include "run/link_probes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "outlast/testing/time_factor.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class LinkProbesTest : public ::testing::Test {
 protected:
  SocketAddress Listen(const HostPort& at = {"127.0.0.1", 0}) {
    listener_ = *ListenOn(*NumericAddress(at));
    return *SocketAddress::Local(listener_.get());
  }
  // Until that many words were heard in all.
  void Hear(size_t words) {
    wanted_ = words;
    const auto late =
        loop_->RunAfter(absl::Seconds(20) * testing::TimeFactor(), [this] { loop_->Stop(); });
    if (heard_.size() < wanted_) loop_->Run();
    loop_->Cancel(late);
    ASSERT_EQ(heard_.size(), wanted_);
  }
  void Note(const std::string& word) {
    heard_.push_back(word);
    if (heard_.size() >= wanted_) loop_->Stop();
  }

  std::unique_ptr<EventLoop> loop_ = *EventLoop::Make();
  UniqueFd listener_;
  std::vector<std::string> heard_;
  size_t wanted_ = 0;
  std::optional<LinkProbes> probes_{
      std::in_place, *loop_,
      LinkProbes::Options{.beat = absl::Milliseconds(10), .patience = absl::Milliseconds(300)},
      LinkProbes::Ears{
          .on_reached = [this](const std::string& node) { Note("up " + node); },
          .on_unreached = [this](const std::string& node,
                                 const std::string& why) { Note(node + ": " + why); }}};
};

TEST_F(LinkProbesTest, SayOnceWhenALinkStandsIsRefusedAndStandsAgain) {
  const HostPort at = Listen().host_port();

  probes_->Watch({{"b", at.text()}});
  Hear(1);
  listener_ = UniqueFd();
  Hear(2);
  Listen(at);
  Hear(3);

  EXPECT_EQ(heard_[0], "up b");
  EXPECT_THAT(heard_[1], HasSubstr("b: "));
  EXPECT_EQ(heard_[2], "up b");
}

// A listener whose backlog is full does not answer, as nobody does beyond a filter that drops.
TEST_F(LinkProbesTest, GiveUpAKnockThatNobodyAnswers) {
  const SocketAddress at = Listen();
  ASSERT_EQ(listen(listener_.get(), 0), 0);
  std::vector<UniqueFd> guests;
  for (int i = 0; i < 4; ++i) guests.push_back(*StartConnect(at));

  probes_->Watch({{"b", at.host_port().text()}});
  Hear(1);

  EXPECT_THAT(heard_, ElementsAre("b: it did not answer within 300ms"));
}

TEST_F(LinkProbesTest, LookAtNobodyWhoIsNotWatchedAnyMore) {
  const HostPort at = Listen().host_port();
  probes_->Watch({{"b", at.text()}, {"named", "localhost.invalid:1"}});
  probes_->Watch({{"c", at.text()}});
  Hear(1);
  EXPECT_THAT(heard_, ElementsAre("up c"));
  probes_.reset();
}

}  // namespace
}  // namespace outlast
