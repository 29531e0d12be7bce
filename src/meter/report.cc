#include "meter/report.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/printable.h"
#include "outlast/meter/histogram.h"

namespace outlast {
namespace {

constexpr int kRefusedExit = 85;

struct LedgerOfDir {
  std::string dir;
  ClockDomainEntry domain;
  RunEntries entries;

  // Of a run of several nodes; else null.
  const JoinedEntry* joined() const {
    for (const LedgerEntry& entry : entries) {
      if (const auto* joined = std::get_if<JoinedEntry>(&entry)) return joined;
    }
    return nullptr;
  }
};

absl::StatusOr<LedgerOfDir> ReadDir(const std::string& dir, RunReport& report) {
  struct stat info {};
  if (stat(dir.c_str(), &info) != 0) return ErrnoStatus(errno, fmt::format("RUN_DIR {}", dir));
  if (!S_ISDIR(info.st_mode))
    return Error(absl::StatusCode::kInvalidArgument, "RUN_DIR {} is not a folder", dir);
  const std::string path = dir + "/ledger.bin";
  absl::StatusOr<LedgerRead> read = ReadLedger(path);
  if (absl::IsNotFound(read.status())) {
    return Error(absl::StatusCode::kNotFound, "RUN_DIR {} has no ledger.bin: no run wrote here",
                 dir);
  }
  if (!read.ok()) return read.status();
  if (read->cut_bytes > 0) {
    report.notes.push_back(fmt::format(
        "{}: the last {} bytes are no whole record and were left out", path, read->cut_bytes));
  }
  if (read->skipped > 0) {
    report.notes.push_back(fmt::format("{}: {} records of kinds that this version does not know",
                                       path, read->skipped));
  }
  LedgerOfDir ledger{.dir = dir, .domain = {}, .entries = std::move(read->entries)};
  if (!ledger.entries.empty()) ledger.domain = std::get<ClockDomainEntry>(ledger.entries.front());
  return ledger;
}

absl::Status CheckSameJob(const LedgerOfDir& a, const LedgerOfDir& b) {
  const bool known = !a.domain.job_id.is_zero() && !b.domain.job_id.is_zero();
  const bool differ =
      known ? a.domain.job_id != b.domain.job_id
            : !a.domain.job.empty() && !b.domain.job.empty() && a.domain.job != b.domain.job;
  if (!differ) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "{} is of job {} and {} of job {}: one report is about one job", a.dir,
               known ? a.domain.job_id.hex() : a.domain.job, b.dir,
               known ? b.domain.job_id.hex() : b.domain.job);
}

// A time line has one invocation after the other; nodes of one run are side by side.
absl::Status CheckNotBesides(const LedgerOfDir& a, const LedgerOfDir& b) {
  const JoinedEntry* const one = a.joined();
  const JoinedEntry* const two = b.joined();
  if (one == nullptr || two == nullptr || one->run_id != two->run_id || one->node == two->node)
    return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "{} (node {}) and {} (node {}) are of one run, side by side and not after each "
               "other: give one folder of each run",
               a.dir, Printable(one->node), b.dir, Printable(two->node));
}

// Different texts of the ranks side by side; usually it is one.
std::string TextsOf(const std::set<std::string>& texts, std::string_view none) {
  if (texts.empty()) return std::string(none);
  return fmt::format("{}", fmt::join(texts, " | "));
}

void AddMeterTexts(std::span<const RunEntries> runs, RunReport& report) {
  std::set<std::string> flops, peaks;
  for (const RunEntries& run : runs) {
    for (const LedgerEntry& entry : run) {
      const auto* meter = std::get_if<MeterEntry>(&entry);
      if (!meter) continue;
      flops.insert(meter->flops_text);
      peaks.insert(meter->peak_text);
    }
  }
  report.flops_text = TextsOf(flops, "unknown FLOPs (no meter was started)");
  report.peak_text = TextsOf(peaks, "unknown peak (no meter was started)");
}

std::optional<double> Ratio(double above, double below) {
  if (below <= 0) return std::nullopt;
  return above / below;
}

void AddSteps(RunReport& report) {
  std::vector<int64_t> lengths;
  double seconds = 0, flops = 0, flops_seconds = 0, mfu_flops = 0, possible_flops = 0;
  for (const JobStep& step : report.timeline.steps) {
    if (step.is_lost) {
      ++((step.flags & kStepAborted) == 0 ? report.steps_lost : report.steps_cut);
      continue;
    }
    ++report.steps_finished;
    report.tokens += step.tokens_real;
    report.samples += step.samples;
    if (step.flags & kStepEval) continue;
    lengths.push_back(step.end_ns - step.start_ns);
    const double time = static_cast<double>(step.rate_ns()) / 1e9;
    seconds += time;
    if (step.model_flops <= 0) continue;
    flops += step.model_flops;
    flops_seconds += time;
    if (step.peak_flops_per_second <= 0) continue;
    mfu_flops += step.model_flops;
    possible_flops += step.peak_flops_per_second * time;
  }
  report.step_p50_ns = ExactPercentile(lengths, 0.5);
  report.step_p99_ns = ExactPercentile(lengths, 0.99);
  report.flops_per_second = flops > 0 ? Ratio(flops, flops_seconds) : std::nullopt;
  report.mfu = Ratio(mfu_flops, possible_flops);
  // Evaluation steps train on nothing: their tokens are 0, so the counters are those of the timed
  // steps.
  if (report.tokens > 0)
    report.tokens_per_second = Ratio(static_cast<double>(report.tokens), seconds);
  if (report.samples > 0)
    report.samples_per_second = Ratio(static_cast<double>(report.samples), seconds);
}

void AddEnd(std::span<const LedgerOfDir> ledgers, RunReport& report) {
  const auto last = std::max_element(
      ledgers.begin(), ledgers.end(),
      [](const auto& a, const auto& b) { return a.domain.realtime_ns < b.domain.realtime_ns; });
  report.job = last->domain.job;
  report.command = last->domain.command;
  for (const LedgerEntry& entry : last->entries) {
    if (const auto* end = std::get_if<EndEntry>(&entry)) {
      report.exit_code = end->exit_code;
      report.end_reason = end->reason;
    }
  }
}

}  // namespace

absl::StatusOr<RunReport> BuildReport(std::span<const std::string> run_dirs) {
  if (run_dirs.empty())
    return Error(absl::StatusCode::kInvalidArgument, "no RUN_DIR was given, wanted at least one");
  RunReport report;
  std::vector<LedgerOfDir> ledgers;
  for (const std::string& dir : run_dirs) {
    OUTLAST_ASSIGN_OR_RETURN(LedgerOfDir ledger, ReadDir(dir, report));
    const bool is_repeat =
        std::any_of(ledgers.begin(), ledgers.end(), [&](const LedgerOfDir& other) {
          return !ledger.domain.run_id.is_zero() && other.domain.run_id == ledger.domain.run_id;
        });
    if (is_repeat) continue;  // `latest` beside the folder that it links to
    if (!ledgers.empty()) OUTLAST_RETURN_IF_ERROR(CheckSameJob(ledgers.front(), ledger));
    for (const LedgerOfDir& other : ledgers)
      OUTLAST_RETURN_IF_ERROR(CheckNotBesides(other, ledger));
    report.run_dirs.push_back(dir);
    ledgers.push_back(std::move(ledger));
  }
  const bool all_damaged = !report.notes.empty() &&
                           std::all_of(ledgers.begin(), ledgers.end(),
                                       [](const auto& ledger) { return ledger.entries.empty(); });
  if (all_damaged) return Error(absl::StatusCode::kDataLoss, "{}", report.notes.front());
  AddEnd(ledgers, report);

  std::vector<RunEntries> runs;
  for (LedgerOfDir& ledger : ledgers) runs.push_back(std::move(ledger.entries));
  report.timeline = BuildTimeline(runs);
  if (report.timeline.is_estimated) {
    report.notes.push_back(
        "the time between two invocations was bridged by wall time: an estimate, counted as "
        "unknown");
  }
  AddMeterTexts(runs, report);
  AddSteps(report);
  report.ratios = RatiosOf(report.timeline, report.mfu);
  return report;
}

int RunReportTool(std::span<const std::string> args, std::ostream& out, std::ostream& err) {
  std::vector<std::string> dirs;
  bool json = false;
  for (const std::string& arg : args) {
    if (arg == "--json") {
      json = true;
    } else if (arg == "--help" || arg == "-h") {
      out << "outlast report RUN_DIR... [--json]\n\n"
             "Shows where the time of a run went: each interruption and the way back from it, "
             "goodput with its parts,\n"
             "step time, tokens/s and MFU. Several folders of one job make one time line; of a run "
             "of several nodes give\n"
             "one node's folder.\n\n"
             "  outlast report outlast-runs/latest\n";
      return 0;
    } else if (arg.starts_with("-")) {
      err << "outlast report: unknown flag " << arg << ", wanted RUN_DIR... [--json]\n";
      return kRefusedExit;
    } else {
      dirs.push_back(arg);
    }
  }
  const absl::StatusOr<RunReport> report = BuildReport(dirs);
  if (!report.ok()) {
    err << "outlast report: " << MessageOf(report.status()) << "\n";
    return kRefusedExit;
  }
  out << (json ? ReportJson(*report) : ReportText(*report));
  return 0;
}

}  // namespace outlast
