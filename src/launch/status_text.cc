#include "launch/status_text.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/printable.h"
#include "checkpoint/progress_bar.h"

namespace outlast {
namespace {

constexpr int kBarWidth = 20;
// A state of less than this share of the time is left to `outlast report`.
constexpr double kSmallShare = 0.0005;

// How many characters stand there: bytes of UTF-8 that continue one are not counted.
size_t Columns(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string Cut(std::string text, int width) {
  if (width <= 0) return text;
  size_t columns = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((text[i] & 0xc0) == 0x80) continue;
    if (columns == static_cast<size_t>(width)) {
      text.resize(i);
      break;
    }
    ++columns;
  }
  return text;
}

// SGR codes: 31 red, 32 green, 33 yellow, 1 bold, 2 faint.
std::string Painted(const std::string& text, int code, const StatusStyle& style) {
  if (style.colour == Colour::kNo || code == 0 || text.empty()) return text;
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

// Lines of one colour each: so that cutting one never cuts an escape.
class Page {
 public:
  explicit Page(const StatusStyle& style) : style_(style) {}
  void Add(std::string text, int colour = 0) {
    out_ += Painted(Cut(std::move(text), style_.width), colour, style_) + "\n";
  }
  // "name     text", where there is text.
  void Field(std::string_view name, const std::string& text, int colour = 0) {
    if (!text.empty()) Add(fmt::format("{:<11}{}", name, text), colour);
  }
  std::string Take() { return std::move(out_); }

 private:
  const StatusStyle& style_;
  std::string out_;
};

int ColourOfPhase(const std::string& phase) {
  if (phase == "running") return 32;
  if (phase == "re-forming" || phase == "stopping" || phase == "ending" || phase == "waiting")
    return 33;
  return phase == "killed" ? 31 : 0;
}

std::string HeadLine(const JobStatus& status) {
  std::string line = fmt::format("job {}: {}", status.job.empty() ? "run" : Printable(status.job),
                                 Printable(status.phase));
  if (status.exit_code) line += fmt::format(" with exit code {}", *status.exit_code);
  if (status.generation > 0)
    line += fmt::format(", generation {} of {} ranks", status.generation, status.world);
  if (status.generation == 0) line += fmt::format(", {} ranks wanted", status.world);
  return fmt::format("{}, {} {}", line, status.is_over() ? "after" : "for",
                     DurationText(status.seconds));
}

std::string AgentText(const JobStatus& status) {
  const std::string where = status.host.empty() ? "" : " on " + Printable(status.host);
  const std::string& state = status.agent_state;
  std::string meaning = state;
  if (state == "silent") meaning = "lives, but does not answer; this is from its files";
  if (state == "denied")
    meaning = fmt::format(
        "lives, but permission to ask it is missing, it is user {}'s; this is from its files",
        Printable(status.agent_owner));
  if (state == "awaited")
    meaning = "was killed; its workers are kept, and wait for the same command to adopt them";
  if (state == "gone") meaning = "gone without a report: it was killed, or the machine went down";
  if (state == "elsewhere") meaning = "on another machine, or boot; this is from its files";
  return fmt::format("process {}{}: {}", status.agent_pid, where, Printable(meaning));
}

std::string FaultText(const JobStatus& status, absl::Time now) {
  if (!status.last_fault) return "none";
  const FaultStatus& fault = *status.last_fault;
  std::string text = fmt::format("{}; ", status.faults);
  if (status.budget_is_known) {
    text += fmt::format("{} of {} restarts used; ", std::min(status.budget_used, status.budget),
                        status.budget);
  }
  text += fmt::format("last: {} ({}) in generation {}", Printable(fault.detail),
                      Printable(fault.fault_class), fault.generation);
  const auto age = AgeOf(fault.at, now);
  if (age && !status.is_over()) text += fmt::format(", {} ago", DurationText(*age));
  return text;
}

std::string SaveText(const JobStatus& status, absl::Time now) {
  if (!status.checkpoint) return status.failed_saves == 0 ? "" : "nothing yet";
  const CheckpointStatus& saved = *status.checkpoint;
  std::string text = fmt::format("step {}, {} in {}", saved.step, BytesText(saved.bytes),
                                 DurationText(saved.seconds));
  const auto age = AgeOf(saved.at, now);
  if (age && !status.is_over()) text += fmt::format(", {} ago", DurationText(*age));
  return text + ": " + Printable(saved.name);
}

std::string GoodputText(const GoodputStatus& goodput) {
  std::string text = goodput.ratio ? fmt::format("{:.2f} %", *goodput.ratio * 100) : "unknown";
  text += fmt::format(" of {}:", DurationText(goodput.wall_seconds));
  const char* separator = " ";
  for (const auto& [name, seconds] : goodput.states) {
    if (seconds < goodput.wall_seconds * kSmallShare) continue;
    text += fmt::format("{}{} {}", separator, Printable(name), DurationText(seconds));
    separator = ", ";
  }
  return text;
}

std::string Signals(const std::vector<int>& signals) {
  std::string text;
  for (const int signal : signals) text += fmt::format("{}{}", text.empty() ? "" : ", ", signal);
  return text.empty() ? "" : "signal " + text;
}

// --- Ranks ---

int64_t NewestStep(const std::vector<RankStatus>& ranks) {
  int64_t newest = 0;
  for (const RankStatus& rank : ranks) newest = std::max(newest, rank.step.value_or(0));
  return newest;
}

std::string Bar(double filled) {
  const int full = static_cast<int>(std::lround(std::clamp(filled, 0.0, 1.0) * kBarWidth));
  return std::string(static_cast<size_t>(full), '#') +
         std::string(static_cast<size_t>(kBarWidth - full), '.');
}

// How much of its time is used up: of the limit, where one is watched over; else of ten seconds.
double Used(const RankStatus& rank) {
  if (!rank.age_seconds) return 0;
  const double limit = rank.limit_seconds.value_or(10);
  return limit <= 0 ? 1 : *rank.age_seconds / limit;
}

int ColourOf(const RankStatus& rank) {
  if (rank.state == "stopped" || rank.state == "traced" || rank.end.starts_with("signal"))
    return rank.pid != 0 || rank.state == "ended" ? 31 : 33;
  if (rank.state == "starting" || rank.state == "uninterruptible") return 33;
  if (rank.state == "running" && Used(rank) > 0.5) return 33;
  return rank.state == "finished" || rank.state == "ended" ? 2 : 0;
}

std::vector<std::string> CellsOf(const RankStatus& rank, int64_t newest_step, bool with_bars,
                                 bool with_nodes) {
  std::vector<std::string> cells;
  cells.push_back(rank.rank < 0 ? "-" : std::to_string(rank.rank));
  if (with_nodes) cells.push_back(Printable(rank.node));
  cells.push_back(rank.pid == 0 ? "-" : std::to_string(rank.pid));
  cells.push_back(Printable(rank.state));
  cells.push_back(rank.step ? std::to_string(*rank.step) : "-");
  if (with_bars) {
    const auto newest = static_cast<double>(std::max<int64_t>(newest_step, 1));
    cells.push_back(Bar(static_cast<double>(rank.step.value_or(0)) / newest));
  }
  cells.push_back(rank.section.empty() ? "-" : Printable(rank.section));
  cells.push_back(rank.age_seconds ? DurationText(*rank.age_seconds) : "-");
  if (with_bars) cells.push_back(Bar(Used(rank)));
  std::string limit = rank.limit_seconds ? DurationText(*rank.limit_seconds) : "-";
  if (!rank.limit_source.empty()) limit += " " + Printable(rank.limit_source);
  cells.push_back(limit);
  cells.push_back(Printable(rank.end));
  return cells;
}

// All of them in order, or those that stand still longest.
std::vector<const RankStatus*> Shown(const JobStatus& status, int most) {
  std::vector<const RankStatus*> ranks;
  for (const RankStatus& rank : status.ranks) ranks.push_back(&rank);
  if (static_cast<int>(ranks.size()) <= most) return ranks;
  std::stable_sort(ranks.begin(), ranks.end(), [](const RankStatus* a, const RankStatus* b) {
    return a->age_seconds.value_or(-1) > b->age_seconds.value_or(-1);
  });
  ranks.resize(static_cast<size_t>(std::max(most, 0)));
  std::sort(ranks.begin(), ranks.end(), [](const RankStatus* a, const RankStatus* b) {
    return std::pair(a->rank, a->slot) < std::pair(b->rank, b->slot);
  });
  return ranks;
}

void AddRanks(const JobStatus& status, const StatusStyle& style, Page& page) {
  if (status.ranks.empty()) return;
  const bool with_bars = style.width >= 110;
  const bool with_nodes = !status.node.empty();
  const std::vector<const RankStatus*> shown = Shown(status, style.max_ranks);
  std::vector<std::vector<std::string>> rows = {{"rank"}};
  if (with_nodes) rows[0].emplace_back("node");
  for (const char* name : {"pid", "state", "step"}) rows[0].emplace_back(name);
  if (with_bars) rows[0].emplace_back("of the newest");
  for (const char* name : {"in", "for"}) rows[0].emplace_back(name);
  if (with_bars) rows[0].emplace_back("of the limit");
  for (const char* name : {"limit", "last end"}) rows[0].emplace_back(name);
  const int64_t newest = NewestStep(status.ranks);
  for (const RankStatus* rank : shown)
    rows.push_back(CellsOf(*rank, newest, with_bars, with_nodes));
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Columns(row[i]));
  for (size_t at = 0; at < rows.size(); ++at) {
    std::string line;
    for (size_t i = 0; i < rows[at].size(); ++i) {
      line += rows[at][i] + std::string(widths[i] - Columns(rows[at][i]) + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    page.Add(std::move(line), at == 0 ? 1 : ColourOf(*shown[at - 1]));
  }
  if (const size_t more = status.ranks.size() - shown.size(); more > 0)
    page.Add(fmt::format("... and {} more, which moved more lately", more));
}

}  // namespace

std::string DurationText(double seconds) {
  if (!(seconds >= 0)) return "0 s";
  if (seconds < 0.9995) return fmt::format("{:.3g} ms", seconds * 1e3);
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<int64_t>(std::llround(std::min(seconds, 9e15)));
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  const int64_t minutes = (whole + 30) / 60;
  if (minutes < 2880) return fmt::format("{} h {} min", minutes / 60, minutes % 60);
  return fmt::format("{} d {} h", minutes / 1440, minutes % 1440 / 60);
}

std::optional<double> AgeOf(const std::string& utc, absl::Time now) {
  absl::Time time;
  if (!absl::ParseTime(absl::RFC3339_full, utc, &time, nullptr)) return std::nullopt;
  return std::max(0.0, absl::ToDoubleSeconds(now - time));
}

std::string StatusText(const JobStatus& status, const StatusStyle& style, absl::Time now) {
  Page page(style);
  page.Add(HeadLine(status), ColourOfPhase(status.phase));
  page.Field("reason", Printable(status.reason), status.exit_code.value_or(0) == 0 ? 0 : 31);
  page.Field("RUN_DIR", Printable(status.run_dir));
  page.Field("run id", Printable(status.run_id));
  const bool is_well = status.agent_state == "answers" || status.agent_state == "ended";
  page.Field("agent", AgentText(status), is_well ? 0 : 31);
  if (!status.metrics.empty() && !status.is_over())
    page.Field("metrics", fmt::format("http://{}/metrics", Printable(status.metrics)));
  page.Field("faults", FaultText(status, now), status.faults > 0 && !status.is_over() ? 33 : 0);
  page.Field("watch", Printable(status.verdict), 33);
  page.Field("stopping", Signals(status.stop_signals));
  page.Field("saved", SaveText(status, now));
  page.Field("not saved", Printable(status.save_error), 31);
  if (status.goodput) page.Field("goodput", GoodputText(*status.goodput));
  page.Field("MFU", status.mfu ? fmt::format("{:.1f} %", *status.mfu * 100) : "");
  AddRanks(status, style, page);
  return page.Take();
}

}  // namespace outlast
