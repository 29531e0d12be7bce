// A journal that takes its time.
#include <atomic>

#include "outlast/elastic/journal.h"
#include "tests/control/control_fixture.h"

namespace outlast::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

class SlowJournal final : public CoordinatorJournal {
 public:
  SlowJournal(absl::Duration time, std::function<void()> on_record)
      : time_(time), on_record_(std::move(on_record)) {}
  const CoordinatorState& state() const override { return state_; }
  const std::string& torn() const override { return none_; }
  uint64_t least_incarnation() const override { return 70; }
  absl::Status Append(std::string_view) override {
    if (is_slow.exchange(false)) Clock::Real().SleepFor(time_);
    on_record_();
    return absl::OkStatus();
  }

  absl::Status Compact(std::string_view) override { return absl::OkStatus(); }

  std::atomic<bool> is_slow = false;  // the next one

 private:
  const absl::Duration time_;
  const std::function<void()> on_record_;
  const CoordinatorState state_;
  const std::string none_;
};

TEST_F(ControlTest, NobodyIsLostWhileTheJournalIsWritten) {
  beat_ = absl::Milliseconds(500) * TimeFactor();
  CoordinatorHostOptions options = HostOptions(2);
  options.elastic.beat = beat_;
  options.elastic.beat_loss = 3 * beat_;
  options.elastic.prepare += 2 * beat_;           // the sanitizers' beats are long
  const auto records = std::make_shared<int>(0);  // the host outlives this scope
  auto owned = std::make_unique<SlowJournal>(5 * beat_,
                                             [this, records] { loop_.Note([&] { ++*records; }); });
  SlowJournal& journal = *owned;
  const absl::Status started = StartHost(options, std::move(owned));
  ASSERT_TRUE(started.ok()) << started;
  for (const int node : {0, 1}) StartNode(node);
  ASSERT_TRUE(AllOpen(2, 1));

  int before = 0;
  loop_.Note([&] { before = *records; });
  journal.is_slow = true;
  for (const int64_t step : {5, 6}) {
    loop_.Do([&] { nodes_[0]->Give(SaveReported{{control::SaveOutcome::kCommitted, step, ""}}); });
  }

  ASSERT_TRUE(loop_.WaitFor([&] { return *records >= before + 2; }));
  EXPECT_FALSE(journal.is_slow);
  loop_.Do([&] {
    for (auto& [index, node] : nodes_) node->Give(WorkerFinished{0, 1});
    for (auto& [index, node] : nodes_) node->Give(WorkerEnded{0, 1, {}});
  });
  ASSERT_TRUE(loop_.WaitFor([&] { return ended_.size() == 2; }));
  loop_.Note([&] {
    for (const int node : {0, 1}) EXPECT_THAT(downs_[node], Each(Not(HasSubstr("no beat"))));
  });
}

TEST_F(ControlTest, AJobOfManyRecordsHasAShortJournalAndGoesOnFromIt) {
  CoordinatorHostOptions options = HostOptions(1);
  options.compact_after = 8;
  ASSERT_TRUE(StartHost(options).ok());
  options.listen = host_->address();
  StartNode(0);
  ASSERT_TRUE(AllOpen(1, 1));
  const auto read = [&] {
    std::ifstream file(options.journal + "/coordinator.journal", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  for (int64_t step = 1; step <= 100; ++step) {
    loop_.Do([&] { nodes_[0]->Give(SaveReported{{control::SaveOutcome::kCommitted, step, ""}}); });
  }
  // The file is another one meanwhile, and may be read while a record is written to it.
  const auto has_all = [&] {
    const auto content = ReadJournal(read());
    return content.ok() && content->state.step_committed == 100;
  };
  const absl::Duration deadline = Clock::Real().Uptime() + absl::Seconds(20) * TimeFactor();
  while (!has_all() && Clock::Real().Uptime() < deadline)
    Clock::Real().SleepFor(absl::Milliseconds(5));
  ASSERT_TRUE(has_all());

  loop_.Do([this] { host_.reset(); });

  const std::string bytes = read();
  const auto content = ReadJournal(bytes);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_GT(content->state.records, 100u);
  EXPECT_EQ(content->state.generation(), 1u);
  EXPECT_LT(bytes.size(), EncodeJournalBase(content->state).size() + 8 * 64);
  ASSERT_TRUE(StartHost(options).ok());
  loop_.Do([&] {
    nodes_[0]->Give(WorkerFinished{0, 1});
    nodes_[0]->Give(WorkerEnded{0, 1, {}});
  });
  ASSERT_TRUE(loop_.WaitFor([&] { return ended_.size() == 1; }));
  EXPECT_EQ(ended_[0].exit_code, 0);
  EXPECT_EQ(opened_[0], 1u) << "the same generation";
}

}  // namespace
}  // namespace outlast::testing
