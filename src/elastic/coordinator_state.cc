#include "outlast/elastic/coordinator_state.h"

#include <algorithm>

#include "base/error.h"
#include "outlast/elastic/exit_code.h"

namespace outlast {
namespace {

class Folder {
 public:
  explicit Folder(CoordinatorState& state) : state_(state) {}

  void operator()(const StartedRecord& record) {
    state_.run_id = record.run_id;
    state_.incarnation = record.incarnation;
  }
  void operator()(const FormingRecord& record) { state_.target = record.target; }
  void operator()(const CommittedRecord& record) {
    state_.commit = record.commit;
    state_.target = record.commit.generation;
    state_.finished = state_.plain_done = record.commit.finished;
    state_.late_failure.reset();  // whose it was is to end once more
    state_.faulted.clear();
    state_.cause.reset();
  }
  void operator()(const NextRecord& record) { state_.commit.candidate = record.candidate; }
  void operator()(const FaultedRecord& record) {
    state_.faulted.emplace_back(record.agent, record.process);
    ++state_.faults;
    state_.job_time = record.at;
    if (record.replaces) state_.history.TakeBackNewest();
    if (record.charged) {
      state_.history.Add(record.fault);
      state_.cause = record.evidence;
    } else if (!record.fault.victim && !record.restarts && !state_.late_failure) {
      state_.late_failure = WorkerExitCode(record.fault.fault_class, record.fault.end);
    }
    if (record.restarts) state_.history.AddRestart(record.at);
  }
  void operator()(const RefundedRecord& record) {
    state_.step_committed = record.step_committed;
    state_.progress_base = record.progress_base;
    state_.history.Refund();
  }
  void operator()(const ExcludedRecord& record) {
    std::erase_if(state_.excluded, [&](const auto& former) { return former.node == record.node; });
    state_.excluded.push_back(record);
  }
  void operator()(const FinishedRecord& record) { Insert(record.ranks, state_.finished); }
  void operator()(const PlainDoneRecord& record) { Insert(record.ranks, state_.plain_done); }
  void operator()(const StopBegunRecord& record) { state_.stop = record; }
  void operator()(const StopWentRecord& record) { state_.stop_went = record.step; }
  void operator()(const StopGaveUpRecord& record) {
    state_.stop_gave_up = true;
    state_.stop_hurries = record.hurry;
    state_.stop_failure = record.reason;
  }
  void operator()(const SaveFailedRecord& record) {
    state_.root_lost = record.root_lost;
    state_.final_save_failed = record.final_save_failed;
  }
  void operator()(const EndingRecord& record) { state_.ending = record; }
  void operator()(const EndedRecord& record) { state_.ended = record; }
  void operator()(const TermsRecord& record) { state_.terms = record; }

 private:
  static void Insert(const std::vector<int>& ranks, std::vector<int>& into) {
    for (const int rank : ranks) {
      const auto at = std::lower_bound(into.begin(), into.end(), rank);
      if (at == into.end() || *at != rank) into.insert(at, rank);
    }
  }

  CoordinatorState& state_;
};

}  // namespace

bool CoordinatorState::is_finished(int rank) const {
  return std::binary_search(finished.begin(), finished.end(), rank);
}

bool CoordinatorState::was_faulted(uint64_t agent, uint64_t process) const {
  return std::find(faulted.begin(), faulted.end(), std::make_pair(agent, process)) != faulted.end();
}

void CoordinatorState::Apply(const JournalPayload& record) {
  ++records;
  std::visit(Folder(*this), record);
}

std::string WhyUnlike(const CoordinatorState& state, const Terms& terms) {
  if (state.generation() == 0 || state.ended) return {};
  const std::string differ = TermsThatDiffer(terms, state.terms.terms);
  if (differ.empty()) return {};
  return fmt::format("this coordinator is not started as the job's agents were: {}", differ);
}

}  // namespace outlast
