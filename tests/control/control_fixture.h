// A loop on its own thread, a coordinator and agents on it, over real gRPC on loopback.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "control/coordinator_host.h"
#include "control/load_transport.h"
#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"
#include "outlast/testing/time_factor.h"
#include "tests/support/fake_node.h"
#include "tests/support/temp_folder.h"

namespace outlast::testing {

inline control::Transport& Grpc() {
  auto transport = control::LoadTransport();
  if (!transport.ok()) ADD_FAILURE() << transport.status();
  return **transport;
}

class LoopThread {
 public:
  LoopThread() : loop_(std::move(EventLoop::Make()).value()), thread_([this] { loop_->Run(); }) {}
  ~LoopThread() {
    loop_->Stop();
    thread_.join();
  }
  EventLoop& loop() { return *loop_; }
  // On the loop's thread; returns when it is done.
  void Do(const std::function<void()>& work) {
    bool done = false;
    loop_->Post([&] {
      work();
      MutexLock lock(mutex_);
      done = true;
      changed_.NotifyAll();
    });
    MutexLock lock(mutex_);
    while (!done) changed_.Wait(mutex_);
  }
  // Changes what WaitFor looks at. Any thread.
  void Note(const std::function<void()>& change) {
    MutexLock lock(mutex_);
    change();
    changed_.NotifyAll();
  }
  bool WaitFor(const std::function<bool()>& condition, absl::Duration within = absl::Seconds(10)) {
    const absl::Duration deadline = Clock::Real().Uptime() + within * TimeFactor();
    MutexLock lock(mutex_);
    while (!condition()) {
      const absl::Duration left = deadline - Clock::Real().Uptime();
      if (left <= absl::ZeroDuration()) return false;
      changed_.WaitFor(mutex_, left);
    }
    return true;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::unique_ptr<EventLoop> loop_;
  std::thread thread_;
};

inline ElasticOptions JobOf(int nodes) {
  ElasticOptions options;
  options.job = "job";
  options.membership = {.min_world = nodes, .max_world = nodes};
  return options;
}

class ControlTest : public ::testing::Test {
 protected:
  ~ControlTest() override {
    loop_.Do([this] { nodes_.clear(); });
    loop_.Do([this] { host_.reset(); });
  }

  CoordinatorHostOptions HostOptions(int nodes) {
    return {.elastic = JobOf(nodes), .journal = folder_ + "/journal"};
  }
  // Null: a journal in a file.
  absl::Status StartHost(CoordinatorHostOptions options,
                         std::unique_ptr<CoordinatorJournal> journal = nullptr) {
    absl::Status status;
    loop_.Do([&] {
      CoordinatorHost::Ears ears = {
          .on_line =
              [this](const std::string& line) { loop_.Note([&] { lines_.push_back(line); }); },
          .on_finish =
              [this](const FinishJob& finish) { loop_.Note([&] { code_ = finish.exit_code; }); },
          .on_all_told = [this] { loop_.Note([&] { all_told_ = true; }); },
          .on_over = [this](const absl::Status& why) { loop_.Note([&] { over_ = why; }); }};
      auto host =
          journal == nullptr
              ? CoordinatorHost::Start(loop_.loop(), Grpc(), std::move(options), std::move(ears))
              : CoordinatorHost::Start(loop_.loop(), Grpc(), std::move(options), std::move(ears),
                                       std::move(journal));
      status = host.status();
      if (host.ok()) host_ = *std::move(host);
    });
    return status;
  }
  AgentLinkOptions LinkOptions(int index) const {
    return {.coordinator = host_ != nullptr ? host_->address() : address_,
            .job = "job",
            .node = "n" + std::to_string(index)};
  }
  // What became of it is in opened_, ended_ and downs_, by index.
  void StartNode(int index, AgentLinkOptions options, uint64_t incarnation = 0) {
    loop_.Do([&] {
      auto link = MakeAgentLink(loop_.loop(), Grpc(), options);
      ASSERT_TRUE(link.ok()) << link.status();
      NodeOptions node{.elastic = JobOf(1),
                       .node = options.node,
                       .incarnation = incarnation != 0 ? incarnation : 100u + index,
                       .capacity = 1};
      node.elastic.job = options.job;
      node.elastic.beat = beat_;
      auto fake = std::make_unique<FakeNode>(loop_.loop(), *std::move(link), node);
      fake->on_open = [this, index](uint64_t generation) {
        loop_.Note([&] { opened_[index] = generation; });
      };
      fake->on_over = [this, index](const FinishJob& finish) {
        loop_.Note([&] { ended_[index] = finish; });
      };
      fake->on_down = [this, index](const std::string& why) {
        loop_.Note([&] { downs_[index].push_back(why); });
      };
      fake->Start();
      nodes_[index] = std::move(fake);
    });
  }
  void StartNode(int index) { StartNode(index, LinkOptions(index)); }
  bool AllOpen(int nodes, uint64_t generation, absl::Duration within = absl::Seconds(10)) {
    return loop_.WaitFor(
        [&] {
          for (int i = 0; i < nodes; ++i) {
            if (opened_[i] != generation) return false;
          }
          return true;
        },
        within);
  }
  bool Says(const std::string& part) {
    return loop_.WaitFor([&] {
      for (const std::string& line : lines_) {
        if (line.find(part) != std::string::npos) return true;
      }
      return false;
    });
  }
  std::string WriteToken(const std::string& name, char digit) {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path) << std::string(64, digit) << "\n";
    chmod(path.c_str(), 0600);
    return path;
  }

  const TempFolder temp_;
  const std::string folder_ = temp_.path();
  std::string address_;  // where there is no host_
  absl::Duration beat_ = absl::Seconds(1);
  LoopThread loop_;
  std::unique_ptr<CoordinatorHost> host_;
  std::map<int, std::unique_ptr<FakeNode>> nodes_;
  // Noted.
  std::vector<std::string> lines_;
  std::optional<int> code_;
  bool all_told_ = false;
  std::optional<absl::Status> over_;
  std::map<int, uint64_t> opened_;
  std::map<int, FinishJob> ended_;
  std::map<int, std::vector<std::string>> downs_;
};

}  // namespace outlast::testing
