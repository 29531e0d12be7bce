#include "launch/metrics_text.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/error.h"
#include "outlast/elastic/fault.h"

namespace outlast {
namespace {

constexpr std::array kStates = {"starting",        "running",  "stopped", "traced",
                                "uninterruptible", "finished", "ended",   "unknown"};
constexpr std::array kFaultClasses = {
    FaultClass::kPreempt,   FaultClass::kCrash,    FaultClass::kHang,     FaultClass::kResource,
    FaultClass::kEarlyExit, FaultClass::kHardware, FaultClass::kNodeLost, FaultClass::kLinkCut};

std::string Escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    if (c == '\\' || c == '"') out += '\\';
    out += c;
  }
  return out;
}

using Labels = std::vector<std::pair<std::string_view, std::string>>;

class Page {
 public:
  Page(MetricsFormat format, std::string_view job)
      : is_open_(format == MetricsFormat::kOpenMetrics),
        job_(fmt::format("job=\"{}\"", Escaped(job.empty() ? "run" : job))) {}

  // `family` without _total or _info; `unit` is its last word, or empty.
  void Family(std::string_view family, std::string_view type, std::string_view unit,
              std::string_view help) {
    family_ = family;
    suffix_ = type == "counter" ? "_total" : type == "info" ? "_info" : "";
    const std::string name = is_open_ ? std::string(family) : fmt::format("{}{}", family, suffix_);
    const std::string_view known = !is_open_ && type == "info" ? "gauge" : type;
    out_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, known);
    if (is_open_ && !unit.empty()) out_ += fmt::format("# UNIT {} {}\n", name, unit);
  }
  template <typename Number>
  void Sample(Number value, const Labels& labels = {}) {
    Line(suffix_, fmt::format("{}", value), labels);
  }
  void Histogram(const StepTotals& totals) {
    uint64_t below = 0;
    for (size_t i = 0; i < StepTotals::kBounds.size(); ++i) {
      below += totals.buckets[i];
      // OpenMetrics wants floats in `le`, one spelling of each in both formats.
      std::string bound = fmt::format("{}", StepTotals::kBounds[i]);
      if (bound.find('.') == std::string::npos) bound += ".0";
      Line("_bucket", fmt::format("{}", below), {{"le", bound}});
    }
    Line("_bucket", fmt::format("{}", totals.steps), {{"le", "+Inf"}});
    Line("_sum", fmt::format("{}", static_cast<double>(totals.time_ns) / 1e9), {});
    Line("_count", fmt::format("{}", totals.steps), {});
  }
  std::string Take() {
    if (is_open_) out_ += "# EOF\n";
    return std::move(out_);
  }

 private:
  void Line(std::string_view suffix, const std::string& value, const Labels& labels) {
    out_ += fmt::format("{}{}{{{}", family_, suffix, job_);
    for (const auto& [name, text] : labels) out_ += fmt::format(",{}=\"{}\"", name, Escaped(text));
    out_ += fmt::format("}} {}\n", value);
  }

  const bool is_open_;
  const std::string job_;
  std::string_view family_;
  std::string_view suffix_;
  std::string out_;
};

void AddRun(const JobStatus& status, Page& page) {
  page.Family("outlast_run", "info", "", "The invocation that this agent belongs to.");
  page.Sample(1, {{"run_id", status.run_id}});
  page.Family("outlast_run_seconds", "gauge", "seconds", "Time since the start of the run.");
  page.Sample(status.seconds);
  page.Family("outlast_generation", "gauge", "", "Number of the present membership.");
  page.Sample(status.generation);
  page.Family("outlast_world_size", "gauge", "", "Ranks of the job.");
  page.Sample(status.world);
  page.Family("outlast_ranks", "gauge", "", "Places for ranks on this node, by state.");
  for (const char* state : kStates) {
    page.Sample(std::count_if(status.ranks.begin(), status.ranks.end(),
                              [&](const RankStatus& rank) { return rank.state == state; }),
                {{"state", state}});
  }
}

void AddProgress(const JobStatus& status, Page& page) {
  int64_t step = 0;
  double age = 0;
  for (const RankStatus& rank : status.ranks) {
    step = std::max(step, rank.step.value_or(0));
    if (rank.state != "finished" && rank.state != "ended")
      age = std::max(age, rank.age_seconds.value_or(0));
  }
  page.Family("outlast_step", "gauge", "", "The newest step that a rank on this node is in.");
  page.Sample(step);
  page.Family("outlast_progress_age_seconds", "gauge", "seconds",
              "How long the rank on this node that stands still longest has not moved.");
  page.Sample(age);
}

void AddSteps(const RunTotals& totals, Page& page) {
  page.Family("outlast_steps", "counter", "", "Steps that the lowest slot on this node finished.");
  page.Sample(totals.job.steps);
  page.Family("outlast_step_duration_seconds", "histogram", "seconds", "Their duration.");
  page.Histogram(totals.job);
  page.Family("outlast_step_part_seconds", "counter", "seconds", "Where their time went.");
  for (size_t i = 0; i < kStepParts.size(); ++i)
    page.Sample(static_cast<double>(totals.job.part_ns[i]) / 1e9, {{"part", kStepParts[i]}});
  page.Family("outlast_collective_wait_seconds", "counter", "seconds",
              "Time inside forward, backward and optimizer that waited for other ranks.");
  page.Sample(static_cast<double>(totals.job.collective_wait_ns) / 1e9);
  page.Family("outlast_tokens", "counter", "", "Tokens, padding left out, of all ranks here.");
  page.Sample(totals.tokens);
  page.Family("outlast_samples", "counter", "", "Samples of all ranks here.");
  page.Sample(totals.samples);
  page.Family("outlast_model_flops", "counter", "",
              "FLOPs of the model by its formula, of all ranks here.");
  page.Sample(totals.model_flops);
  if (!totals.mfu) return;
  page.Family("outlast_mfu_ratio", "gauge", "ratio",
              "Model FLOPs of the last 64 steps over what the devices could do in their time.");
  page.Sample(*totals.mfu);
}

void AddFaults(const JobStatus& status, Page& page) {
  page.Family("outlast_faults", "counter", "", "Faults that count, by class.");
  for (const FaultClass fault_class : kFaultClasses) {
    const std::string name(FaultClassName(fault_class));
    const auto found = status.faults_by_class.find(name);
    page.Sample(found == status.faults_by_class.end() ? 0 : found->second, {{"class", name}});
  }
  page.Family("outlast_workers_started", "counter", "", "Worker processes that were started.");
  page.Sample(status.workers_started);
  if (status.budget_is_known) {
    page.Family("outlast_restarts_used", "gauge", "", "Restarts since the last committed step.");
    page.Sample(std::min(status.budget_used, status.budget));
  }
  page.Family("outlast_restarts_allowed", "gauge", "", "The budget of restarts.");
  page.Sample(status.budget);
}

void AddSaves(const JobStatus& status, Page& page) {
  page.Family("outlast_saves", "counter", "", "Checkpoints by how their save ended.");
  page.Sample(status.saves, {{"result", "durable"}});
  page.Sample(status.failed_saves, {{"result", "failed"}});
  page.Family("outlast_saved_bytes", "counter", "bytes", "Bytes of durable checkpoints.");
  page.Sample(status.saved_bytes);
  if (!status.checkpoint) return;
  page.Family("outlast_checkpoint_step", "gauge", "", "Step of the newest durable checkpoint.");
  page.Sample(status.checkpoint->step);
  absl::Time at;
  if (!absl::ParseTime(absl::RFC3339_full, status.checkpoint->at, &at, nullptr)) return;
  page.Family("outlast_checkpoint_timestamp_seconds", "gauge", "seconds",
              "When it became durable, since the epoch.");
  page.Sample(static_cast<double>(absl::ToUnixMillis(at)) / 1e3);
}

void AddStop(const JobStatus& status, Page& page) {
  page.Family("outlast_stop_requested", "gauge", "", "1 once this agent was asked to stop.");
  page.Sample(status.stop ? 1 : 0);
  if (!status.stop || !status.stop->service_seconds) return;
  page.Family("outlast_stop_service_seconds", "gauge", "seconds",
              "From the request to stop until a checkpoint of it was durable.");
  page.Sample(*status.stop->service_seconds);
}

}  // namespace

MetricsFormat FormatFor(std::string_view accept) {
  return accept.find("application/openmetrics-text") != std::string_view::npos
             ? MetricsFormat::kOpenMetrics
             : MetricsFormat::kPrometheus;
}

std::string_view ContentTypeOf(MetricsFormat format) {
  return format == MetricsFormat::kOpenMetrics
             ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
             : "text/plain; version=0.0.4; charset=utf-8";
}

std::string MetricsText(const JobStatus& status, const RunTotals& totals, MetricsFormat format) {
  Page page(format, status.job);
  AddRun(status, page);
  AddProgress(status, page);
  AddSteps(totals, page);
  AddFaults(status, page);
  AddSaves(status, page);
  AddStop(status, page);
  return page.Take();
}

}  // namespace outlast
