#include "outlast/data/consumption_check.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"

namespace outlast {
namespace {

// The order of attempts: of runs by their first line, then of generations.
using Age = std::pair<int64_t, uint64_t>;
using Attempt = std::vector<const ConsumptionLine*>;
using Attempts = std::map<Age, Attempt>;

std::map<int64_t, Attempts> GroupBySteps(std::span<const ConsumptionLine> lines) {
  std::map<Id128, int64_t> runs;
  std::map<int64_t, Attempts> steps;
  for (const ConsumptionLine& line : lines) {
    const int64_t run = runs.try_emplace(line.run, static_cast<int64_t>(runs.size())).first->second;
    steps[line.step][{run, line.generation}].push_back(&line);
  }
  return steps;
}

void CountSuperseded(int64_t step, const Attempts& attempts, ConsumptionReport& report) {
  if (attempts.size() < 2) return;
  report.superseded_attempts[step] = static_cast<int64_t>(attempts.size()) - 1;
  for (auto attempt = attempts.begin(); attempt != std::prev(attempts.end()); ++attempt) {
    report.superseded_lines += static_cast<int64_t>(attempt->second.size());
  }
}

template <typename... Args>
absl::Status Wrong(int64_t step, fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kDataLoss, "step {}: {}", step,
               fmt::format(format, std::forward<Args>(args)...));
}

// Exactly one line of each rank, with the places that `cursor` gives it.
absl::Status CheckAttempt(int64_t step, Attempt attempt, std::optional<int> world,
                          const Cursor& cursor) {
  std::sort(attempt.begin(), attempt.end(),
            [](const auto* a, const auto* b) { return a->rank < b->rank; });
  const int ranks = world.value_or(static_cast<int>(attempt.size()));
  for (int rank = 0; rank < ranks; ++rank) {
    const auto index = static_cast<size_t>(rank);
    if (index >= attempt.size() || attempt[index]->rank > rank)
      return Wrong(step, "no line of rank {} of {}", rank, ranks);
    const ConsumptionLine& line = *attempt[index];
    if (line.rank < rank)
      return Wrong(step, "two lines of rank {} in generation {}", line.rank, line.generation);
    OUTLAST_ASSIGN_OR_RETURN(const std::vector<int64_t> wanted, cursor.RankIds(rank, ranks));
    if (line.ids == wanted) continue;
    ConsumptionLine right = line;
    right.ids = wanted;
    return Wrong(step, "found '{}', wanted '{}'", FormatLine(line), FormatLine(right));
  }
  if (attempt.size() > static_cast<size_t>(ranks)) {
    return Wrong(step, "{} lines, {} ranks wanted; one is of rank {}", attempt.size(), ranks,
                 attempt.back()->rank);
  }
  return absl::OkStatus();
}

absl::StatusOr<Cursor> StartOf(const ConsumptionPlan& plan) {
  if (plan.steps < 0 || plan.world.value_or(1) < 1) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "consumption plan: {} steps of {} ranks, at least 0 and 1 wanted", plan.steps,
                 plan.world.value_or(1));
  }
  return Cursor::Create(plan.data);
}

}  // namespace

int64_t ConsumptionReport::superseded_steps() const {
  int64_t sum = 0;
  for (const auto& [step, attempts] : superseded_attempts) sum += attempts;
  return sum;
}

absl::StatusOr<ConsumptionReport> CheckConsumption(std::span<const ConsumptionLine> lines,
                                                   const ConsumptionPlan& plan) {
  OUTLAST_ASSIGN_OR_RETURN(Cursor cursor, StartOf(plan));
  const std::map<int64_t, Attempts> steps = GroupBySteps(lines);
  ConsumptionReport report;
  Age newest{0, 0};
  for (int64_t step = 0; step < plan.steps; ++step) {
    const auto found = steps.find(step);
    if (found == steps.end()) return Wrong(step, "no line, {} steps wanted", plan.steps);
    const auto& [age, attempt] = *found->second.rbegin();
    if (age < newest) {
      return Wrong(
          step,
          "last run in run {}, generation {}, but the step before it in run {}, generation {}",
          age.first + 1, age.second, newest.first + 1, newest.second);
    }
    newest = age;
    OUTLAST_RETURN_IF_ERROR(CheckAttempt(step, attempt, plan.world, cursor));
    CountSuperseded(step, found->second, report);
    OUTLAST_RETURN_IF_ERROR(cursor.Advance());
  }
  const auto beyond = steps.lower_bound(plan.steps);
  if (beyond != steps.end())
    return Wrong(beyond->first, "found, but the run should have {} steps", plan.steps);
  if (!steps.empty() && steps.begin()->first < 0)
    return Wrong(steps.begin()->first, "steps count from 0");
  report.steps = plan.steps;
  report.consumed = cursor.consumed();
  return report;
}

}  // namespace outlast
