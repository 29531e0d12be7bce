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

}  // namespace
}  // namespace outlast::testing
