#include "launch/link_meter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/event_loop.h"
#include "base/socket.h"
#include "outlast/base/clock.h"
#include "outlast/base/status.h"
#include "outlast/testing/time_factor.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

class LinkMeterTest : public ::testing::Test {
 protected:
  std::unique_ptr<LinkMeter> Start() {
    return std::move(LinkMeter::Start(*loop_, "127.0.0.1")).value();
  }
  // Runs the loop until the measurement has ended.
  absl::StatusOr<LinkRate> Measure(LinkMeter& caller, const std::string& address,
                                   const Id128& ticket) {
    std::optional<absl::StatusOr<LinkRate>> measured;
    caller.Measure(address, ticket, [&](const absl::StatusOr<LinkRate>& rate) {
      measured = rate;
      loop_->Stop();
    });
    loop_->Run();
    return *measured;
  }

  std::unique_ptr<EventLoop> loop_ = std::move(EventLoop::Make()).value();
};

TEST_F(LinkMeterTest, TellsTheRateOfBothWaysWithinASecondOrSo) {
  const auto called = Start(), caller = Start();
  const Id128 ticket = Id128::Random();
  called->Expect(ticket);
  const absl::Duration start = Clock::Real().Uptime();
  const auto rate = Measure(*caller, called->address(), ticket);
  ASSERT_TRUE(rate.ok()) << rate.status();
  // A loopback moves 64 MiB in far less than 0.3 s, or what it moves in 0.3 s.
  EXPECT_GT(rate->there, 20);
  EXPECT_GT(rate->back, 20);
  EXPECT_LT(Clock::Real().Uptime() - start, absl::Seconds(2) * testing::TimeFactor());
}

TEST_F(LinkMeterTest, AStrangersCallIsNotTaken) {
  const auto called = Start(), caller = Start();
  const Id128 ticket = Id128::Random();
  called->Expect(ticket);
  EXPECT_EQ(Measure(*caller, called->address(), Id128::Random()).status().code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(Measure(*caller, called->address(), ticket).ok());
  EXPECT_EQ(Measure(*caller, called->address(), ticket).status().code(),
            absl::StatusCode::kPermissionDenied)
      << "a ticket serves once";
}

TEST_F(LinkMeterTest, WhoTakesNoCallIsToldApartFromWhoDoesNotAnswer) {
  const auto caller = Start();
  std::string gone;
  {
    const auto called = Start();
    gone = called->address();
  }
  EXPECT_EQ(Measure(*caller, gone, Id128::Random()).status().code(),
            absl::StatusCode::kUnavailable);

  const auto mute = ListenOn(NumericAddress({"127.0.0.1", 0}).value());
  ASSERT_TRUE(mute.ok());
  const std::string address = SocketAddress::Local(mute->get()).value().host_port().text();
  const auto none = Measure(*caller, address, Id128::Random());
  EXPECT_EQ(none.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(MessageOf(none.status())), HasSubstr("no answer within 2s"));
}

TEST_F(LinkMeterTest, EndsAtOnceInTheMiddleOfAMeasurement) {
  const auto mute = ListenOn(NumericAddress({"127.0.0.1", 0}).value());
  ASSERT_TRUE(mute.ok());
  auto caller = Start();
  caller->Measure(SocketAddress::Local(mute->get()).value().host_port().text(), Id128::Random(),
                  [](const absl::StatusOr<LinkRate>&) { ADD_FAILURE() << "it is gone"; });
  const absl::Duration start = Clock::Real().Uptime();
  caller.reset();
  EXPECT_LT(Clock::Real().Uptime() - start, absl::Seconds(1) * testing::TimeFactor());
  loop_->Post([this] { loop_->Stop(); });
  loop_->Run();
}

}  // namespace
}  // namespace outlast
