// How a report looks: as text for people, as JSON for programs.
#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/printable.h"
#include "meter/report.h"

namespace outlast {
namespace {

// A duration with three digits in the unit that fits.
std::string Duration(int64_t nanos) {
  const auto value = static_cast<double>(nanos);
  if (nanos < 1'000'000) return fmt::format("{:.3g} us", value / 1e3);
  if (nanos < 1'000'000'000) return fmt::format("{:.3g} ms", value / 1e6);
  if (nanos < 1'000'000'000'000) return fmt::format("{:.2f} s", value / 1e9);
  return fmt::format("{:.0f} s", value / 1e9);
}

std::string Duration(std::optional<int64_t> nanos) { return nanos ? Duration(*nanos) : "-"; }

// To the nanosecond: the column sums to the last digit.
std::string ExactSeconds(int64_t nanos) {
  return fmt::format("{}.{:09} s", nanos / 1'000'000'000, nanos % 1'000'000'000);
}

std::string Percent(std::optional<double> ratio) {
  return ratio ? fmt::format("{:.2f} %", *ratio * 100) : "unknown";
}

std::string FlopRate(double flops_per_second) {
  constexpr std::array<std::string_view, 6> kUnits = {"", "k", "M", "G", "T", "P"};
  size_t unit = 0;
  for (; flops_per_second >= 1000 && unit + 1 < kUnits.size(); ++unit) flops_per_second /= 1000;
  return fmt::format("{:.4g} {}FLOP/s", flops_per_second, kUnits[unit]);
}

using Cells = std::vector<std::string>;

std::string Table(const std::vector<Cells>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Cells& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const Cells& row : rows) {
    std::string line = " ";
    for (size_t i = 0; i < row.size(); ++i) line += fmt::format(" {:<{}} ", row[i], widths[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::optional<int64_t> TimeBack(const Interruption& it) {
  if (!it.first_step_ns) return std::nullopt;
  return *it.first_step_ns - it.detected_ns;
}

std::string InterruptionTable(const Timeline& timeline) {
  if (timeline.interruptions.empty()) return "Interruptions: none\n";
  std::vector<Cells> rows = {{"#", "what", "rank", "step", "how found", "to detect",
                              "to the next step", "steps lost", "state from"}};
  for (const Interruption& it : timeline.interruptions) {
    rows.push_back({std::to_string(rows.size()), Printable(it.fault_class),
                    it.rank < 0 ? "all" : std::to_string(it.rank),
                    it.step < 0 ? "-" : std::to_string(it.step), Printable(it.found),
                    Duration(it.detected_ns - it.failed_ns),
                    it.is_recovered() ? Duration(TimeBack(it)) : "did not come back",
                    std::to_string(it.steps_lost), it.source.empty() ? "-" : it.source});
  }
  return "Interruptions\n" + Table(rows);
}

std::string StateTable(const Timeline& timeline) {
  std::vector<Cells> rows = {{"state", "time", "of wall"}};
  const auto share = [&](int64_t nanos) {
    return fmt::format("{:6.2f} %", timeline.wall_ns > 0 ? 100.0 * static_cast<double>(nanos) /
                                                               static_cast<double>(timeline.wall_ns)
                                                         : 0.0);
  };
  int64_t sum = 0;
  for (size_t i = 0; i < kJobStates; ++i) {
    const auto state = static_cast<JobState>(i);
    sum += timeline.in(state);
    if (timeline.in(state) > 0) {
      rows.push_back({std::string(StateName(state)), ExactSeconds(timeline.in(state)),
                      share(timeline.in(state))});
    }
  }
  rows.push_back({"sum", ExactSeconds(sum), share(sum)});
  return fmt::format("Where the time went (wall {})\n{}", ExactSeconds(timeline.wall_ns),
                     Table(rows));
}

std::string MfuText(const RunReport& report) {
  const std::string rate = report.flops_per_second
                               ? FlopRate(*report.flops_per_second) + " of model FLOPs"
                               : "model FLOP/s unknown";
  if (!report.mfu) {
    return fmt::format("MFU n/a, {}\n  {}\n  {}\n", rate, Printable(report.flops_text),
                       Printable(report.peak_text));
  }
  const std::string_view warning = *report.mfu > 1
                                       ? "\n  above 100 %: an input is wrong (the peak, the FLOP "
                                         "convention, or gradient accumulation)"
                                       : "";
  return fmt::format("MFU {}, {}{}\n  {}\n  {}\n", Percent(report.mfu), rate, warning,
                     Printable(report.flops_text), Printable(report.peak_text));
}

std::string RatioText(const RunReport& report) {
  const GoodputRatios& ratios = report.ratios;
  std::string out;
  out += fmt::format(
      "goodput {} (productive / (wall - queue)), occupancy_goodput {} (productive / wall)\n",
      Percent(ratios.goodput), Percent(ratios.occupancy_goodput));
  out += fmt::format("effective_flops_ratio {} (goodput x MFU)\n",
                     Percent(ratios.effective_flops_ratio));
  if (ratios.mtbi_ns) {
    out += fmt::format("mtbi {}, restore_time {}, unattended_recovery_rate {}\n",
                       Duration(ratios.mtbi_ns), Duration(ratios.restore_time_ns),
                       Percent(ratios.unattended_recovery_rate));
  }
  return out;
}

std::string RateText(const RunReport& report) {
  std::string out = fmt::format(
      "{} steps; after interruptions {} finished ones and {} unfinished ones were run again\n",
      report.steps_finished, report.steps_lost, report.steps_cut);
  out += fmt::format("step time p50 {}, p99 {}\n", Duration(report.step_p50_ns),
                     Duration(report.step_p99_ns));
  if (report.tokens_per_second) {
    out += fmt::format("{:.6g} tokens/s, {} tokens\n", *report.tokens_per_second, report.tokens);
  }
  if (report.samples_per_second) {
    out +=
        fmt::format("{:.6g} samples/s, {} samples\n", *report.samples_per_second, report.samples);
  }
  return out;
}

std::string EndText(const RunReport& report) {
  if (report.exit_code)
    return fmt::format("ended with exit code {} ({})\n", *report.exit_code,
                       Printable(report.end_reason));
  return "no end record: it still runs, or its agent was killed\n";
}

nlohmann::json OrNull(const auto& value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

nlohmann::json ToJson(const Interruption& it) {
  return {{"class", it.fault_class},
          {"found", it.found},
          {"invocation", it.run},
          {"generation", it.generation},
          {"rank", it.rank < 0 ? nlohmann::json(nullptr) : nlohmann::json(it.rank)},
          {"slot", it.slot < 0 ? nlohmann::json(nullptr) : nlohmann::json(it.slot)},
          {"step", it.step < 0 ? nlohmann::json(nullptr) : nlohmann::json(it.step)},
          {"planned", it.is_planned},
          {"detect_ns", it.detected_ns - it.failed_ns},
          {"to_next_step_ns", OrNull(TimeBack(it))},
          {"recovered", it.is_recovered()},
          {"unattended", it.is_unattended()},
          {"steps_lost", it.steps_lost},
          {"state_from", it.source.empty() ? nlohmann::json(nullptr) : nlohmann::json(it.source)}};
}

}  // namespace

std::string ReportText(const RunReport& report) {
  std::string out = fmt::format(
      "{}{}\n", report.job.empty() ? "run " : fmt::format("job {}, ", Printable(report.job)),
      Printable(fmt::format("{}", fmt::join(report.run_dirs, ", "))));
  if (!report.command.empty()) out += fmt::format("command {}\n", Printable(report.command));
  out += EndText(report) + "\n" + InterruptionTable(report.timeline) + "\n" +
         StateTable(report.timeline) + "\n";
  out += RatioText(report) + "\n" + RateText(report) + MfuText(report);
  for (const std::string& note : report.notes) out += fmt::format("note: {}\n", Printable(note));
  return out;
}

std::string ReportJson(const RunReport& report) {
  nlohmann::json states;
  for (size_t i = 0; i < kJobStates; ++i) {
    states[std::string(StateName(static_cast<JobState>(i)))] = report.timeline.state_ns[i];
  }
  nlohmann::json interruptions = nlohmann::json::array();
  for (const Interruption& it : report.timeline.interruptions) interruptions.push_back(ToJson(it));
  const GoodputRatios& ratios = report.ratios;
  const nlohmann::json out = {{"version", 1},
                              {"job", report.job},
                              {"command", report.command},
                              {"run_dirs", report.run_dirs},
                              {"invocations", report.timeline.runs},
                              {"exit_code", OrNull(report.exit_code)},
                              {"end_reason", report.end_reason},
                              {"wall_ns", report.timeline.wall_ns},
                              {"wall_is_estimated", report.timeline.is_estimated},
                              {"states_ns", states},
                              {"interruptions", interruptions},
                              {"goodput", OrNull(ratios.goodput)},
                              {"occupancy_goodput", OrNull(ratios.occupancy_goodput)},
                              {"effective_flops_ratio", OrNull(ratios.effective_flops_ratio)},
                              {"mtbi_ns", OrNull(ratios.mtbi_ns)},
                              {"restore_time_ns", OrNull(ratios.restore_time_ns)},
                              {"unattended_recovery_rate", OrNull(ratios.unattended_recovery_rate)},
                              {"steps_finished", report.steps_finished},
                              {"steps_lost", report.steps_lost},
                              {"steps_cut", report.steps_cut},
                              {"steps_run_again", report.steps_lost + report.steps_cut},
                              {"step_p50_ns", OrNull(report.step_p50_ns)},
                              {"step_p99_ns", OrNull(report.step_p99_ns)},
                              {"tokens", report.tokens},
                              {"samples", report.samples},
                              {"tokens_per_second", OrNull(report.tokens_per_second)},
                              {"samples_per_second", OrNull(report.samples_per_second)},
                              {"flops_per_second", OrNull(report.flops_per_second)},
                              {"mfu", OrNull(report.mfu)},
                              {"mfu_is_impossible", report.mfu.value_or(0) > 1},
                              {"flops", report.flops_text},
                              {"peak", report.peak_text},
                              {"notes", report.notes}};
  // Names may hold any bytes: what is no UTF-8 is replaced, since dump would throw.
  return out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace outlast
