#include "outlast/meter/meter.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace outlast {
namespace {

// The agent learns of them from the strings of the black box: the worker needs no message for it.
constexpr std::string_view kFlopsMark = "outlast.meter.flops=";
constexpr std::string_view kPeakMark = "outlast.meter.peak=";
constexpr std::string_view kStepName = "step";  // the section of a step until its first phase

std::string FlopsText(const FlopCount& flops) {
  if (!flops.is_known()) return "unknown FLOPs (none were given)";
  return fmt::format("{} FLOPs a {}; {}; {}", flops.model,
                     flops.unit == FlopUnit::kToken ? "token" : "sample",
                     ToString(flops.convention), flops.source);
}

uint32_t AddSaturated(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<uint32_t>::max() : sum;
}

// A phase of the step is named as such; until its first phase the step has a name of its own.
bool IsOfStep(const OpenSection& section) {
  const bool is_between_steps = section.phase == Phase::kInit || section.phase == Phase::kRebuild ||
                                section.phase == Phase::kRestore;
  return section.name == kStepName ||
         (section.name == PhaseName(section.phase) && !is_between_steps);
}

std::optional<double> PerSecond(double amount, int64_t time_ns) {
  if (time_ns <= 0) return std::nullopt;
  return amount * 1e9 / static_cast<double>(time_ns);
}

// "<mark><number> <text>" into its two parts.
template <typename Number>
void ParseDeclaration(std::string_view line, std::string_view mark, Number& number,
                      std::string& text) {
  line.remove_prefix(mark.size());
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), number);
  if (error != std::errc()) number = 0;
  const auto space = line.find(' ');
  text = space == std::string_view::npos ? "" : std::string(line.substr(space + 1));
}

}  // namespace

// --- StepScope ---

StepScope::StepScope(Meter& meter, int64_t step) : meter_(meter) {
  entered_ns_ = meter.Now();
  record_.step = static_cast<uint64_t>(step);
  record_.start_ns = static_cast<uint64_t>(entered_ns_);
  record_.generation = meter.black_box_.header().generation;
  record_.loss = record_.gradient_norm = std::numeric_limits<float>::quiet_NaN();
  meter.progress_.SetStep(record_.step);
  section_ = meter.progress_.OpenSection(meter.step_name_, Phase::kUser, 0, record_.start_ns);
}

StepScope::~StepScope() {
  const int64_t now = meter_.Now();
  CloseShare(now);
  meter_.progress_.CloseSection(section_);
  record_.end_ns = static_cast<uint64_t>(now);
  meter_.Finish(record_);
}

void StepScope::Enter(Phase phase) {
  const int64_t now = meter_.Now();
  CloseShare(now);
  entered_ns_ = now;
  phase_ = phase;
  if (phase == Phase::kForward || phase == Phase::kBackward || phase == Phase::kOptimizer)
    compute_phase_ = phase;
  if (phase == Phase::kEval) record_.flags |= kStepEval;
  if (phase == Phase::kCompile) record_.flags |= kStepWarmUp;
  const size_t index = std::min(static_cast<size_t>(phase), kPhaseCount - 1);
  meter_.progress_.CloseSection(section_);
  section_ = meter_.progress_.OpenSection(meter_.phase_names_[index], phase, 0,
                                          static_cast<uint64_t>(now));
}

void StepScope::CloseShare(int64_t now) {
  const auto spent = static_cast<uint64_t>(std::max<int64_t>(0, now - entered_ns_));
  Phase phase = phase_;
  if (phase == Phase::kCommWait) {
    record_.collective_wait_ns += spent;
    phase = compute_phase_;
  }
  switch (phase) {
    case Phase::kData:
      record_.data_ns += spent;
      break;
    case Phase::kNone:
    case Phase::kUser:
    case Phase::kForward:
      record_.forward_ns += spent;
      break;
    case Phase::kBackward:
      record_.backward_ns += spent;
      break;
    case Phase::kOptimizer:
      record_.optimizer_ns += spent;
      break;
    case Phase::kCheckpointSnapshot:
    case Phase::kCheckpointWrite:
      record_.checkpoint_stall_ns += spent;
      break;
    default:
      break;
  }
}

void StepScope::Count(const StepCounts& counts) {
  record_.tokens_real = AddSaturated(record_.tokens_real, counts.real);
  record_.tokens_padded = AddSaturated(record_.tokens_padded, counts.padded);
  record_.tokens_loss = AddSaturated(record_.tokens_loss, counts.loss);
  record_.samples = AddSaturated(record_.samples, counts.samples);
}

void StepScope::SetLoss(float loss, float gradient_norm) {
  record_.loss = loss;
  record_.gradient_norm = gradient_norm;
}

// --- Meter ---

absl::StatusOr<std::unique_ptr<Meter>> Meter::Start(Segment& black_box, ProgressWriter& progress,
                                                    MeterOptions options) {
  if (!options.flops.ok()) return Annotate(options.flops.status(), "MeterOptions.flops");
  if (options.flops->model < 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "MeterOptions.flops: model is {}, wanted 0 (unknown) or more",
                 options.flops->model);
  }
  FlopCount flops = *options.flops;
  return std::unique_ptr<Meter>(
      new Meter(black_box, progress, std::move(flops), std::move(options)));
}

Meter::Meter(Segment& black_box, ProgressWriter& progress, FlopCount flops, MeterOptions options)
    : black_box_(black_box),
      progress_(progress),
      step_log_(black_box),
      agent_(black_box),
      flops_(std::move(flops)),
      peak_(std::move(options.peak)),
      clock_(options.clock) {
  step_name_ = progress.Intern(kStepName);
  for (size_t i = 0; i < kPhaseCount; ++i)
    phase_names_[i] = progress.Intern(PhaseName(static_cast<Phase>(i)));
  black_box.Intern(fmt::format("{}{} {}", kFlopsMark, flops_.model, FlopsText(flops_)));
  black_box.Intern(
      fmt::format("{}{} {}", kPeakMark, peak_.flops_per_second().value_or(0), peak_.text()));
}

int64_t Meter::Now() const {
  return clock_ ? absl::ToInt64Nanoseconds(clock_->Uptime()) : MonotonicNanos();
}

void Meter::Finish(StepRecord& record) {
  // The trainer left its loop body early, or does so at its next check. Whether the step was sealed
  // before that shows only in where the next generation goes on.
  if (record.generation != 0 && agent_.abort_generation() >= record.generation)
    record.flags |= kStepAborted;
  const uint32_t units = flops_.unit == FlopUnit::kToken ? record.tokens_real : record.samples;
  record.model_flops = static_cast<double>(flops_.model) * units;
  step_log_.Append(record);
  AddToWindow(record);
}

void Meter::AddToWindow(const StepRecord& record) {
  if (record.generation != window_generation_) RestartWindow();
  window_generation_ = record.generation;
  if (record.flags & (kStepAborted | kStepEval | kStepWarmUp)) {
    if (!(record.flags & kStepAborted)) RestartWindow();
    return;
  }
  ++window_.steps;
  window_.time_ns +=
      static_cast<int64_t>(record.end_ns - record.start_ns - record.checkpoint_stall_ns);
  window_.tokens_real += record.tokens_real;
  window_.samples += record.samples;
  window_.model_flops += record.model_flops;
}

std::optional<double> Meter::mfu() const {
  const std::optional<double> rate = window_.flops_per_second();
  if (!rate || window_.model_flops <= 0 || !peak_.flops_per_second()) return std::nullopt;
  return *rate / *peak_.flops_per_second();
}

std::optional<double> MeterWindow::tokens_per_second() const {
  return PerSecond(static_cast<double>(tokens_real), time_ns);
}
std::optional<double> MeterWindow::samples_per_second() const {
  return PerSecond(static_cast<double>(samples), time_ns);
}
std::optional<double> MeterWindow::flops_per_second() const {
  return PerSecond(model_flops, time_ns);
}

std::optional<StepRecord> ReadOpenStep(const SegmentView& black_box, const StepRecord* last,
                                       int64_t now_ns) {
  const ProgressSnapshot progress = ReadProgress(black_box, static_cast<uint64_t>(now_ns));
  const auto step_section =
      std::find_if(progress.sections.begin(), progress.sections.end(), IsOfStep);
  if (step_section == progress.sections.end()) return std::nullopt;
  if (last != nullptr && last->generation == progress.generation && last->step == progress.step)
    return std::nullopt;
  StepRecord open{};
  open.step = progress.step;
  open.generation = progress.generation;
  open.start_ns = std::min(step_section->start_ns, static_cast<uint64_t>(now_ns));
  open.end_ns = static_cast<uint64_t>(now_ns);
  open.loss = open.gradient_norm = std::numeric_limits<float>::quiet_NaN();
  open.flags = kStepAborted;
  return open;
}

std::optional<MeterEntry> ReadMeterEntry(const SegmentView& black_box) {
  std::optional<MeterEntry> entry;
  const auto bytes =
      static_cast<uint32_t>(std::min<uint64_t>(black_box.rows(AreaKind::kStrings), kStringsBytes));
  // An offset where no entry starts reads as empty; the last declaration is the one that holds.
  for (uint32_t at = 8; at < bytes; at += 8) {
    const std::string text = black_box.String(at);
    const bool is_flops = text.starts_with(kFlopsMark);
    if (!is_flops && !text.starts_with(kPeakMark)) continue;
    if (!entry) entry = MeterEntry{.slot = static_cast<int32_t>(black_box.header().slot)};
    if (is_flops) {
      ParseDeclaration(text, kFlopsMark, entry->flops_per_unit, entry->flops_text);
    } else {
      ParseDeclaration(text, kPeakMark, entry->peak_flops_per_second, entry->peak_text);
    }
  }
  return entry;
}

}  // namespace outlast
