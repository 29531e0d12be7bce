#include "launch/run_ledger.h"

#include <time.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/blackbox/step_log.h"
#include "outlast/meter/meter.h"

namespace outlast {
namespace {

constexpr absl::Duration kDrainInterval = absl::Seconds(1);

int64_t NanosOf(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

DownCause CauseOf(const ProcessEnd& end) {
  if (end.by_us) return DownCause::kStopped;
  return end.clean() ? DownCause::kFinished : DownCause::kFault;
}

}  // namespace

RunLedger::RunLedger(EventLoop& loop, LedgerWriter writer)
    : loop_(loop),
      writer_(std::move(writer)),
      boottime_minus_monotonic_ns_(NanosOf(CLOCK_BOOTTIME) - NanosOf(CLOCK_MONOTONIC)) {}

RunLedger::~RunLedger() { loop_.Cancel(timer_); }

absl::StatusOr<std::unique_ptr<RunLedger>> RunLedger::Open(EventLoop& loop,
                                                           const std::string& run_dir,
                                                           const LaunchOptions& options,
                                                           const Id128& run_id) {
  OUTLAST_ASSIGN_OR_RETURN(LedgerWriter writer, LedgerWriter::Open(run_dir + "/ledger.bin"));
  std::unique_ptr<RunLedger> ledger(new RunLedger(loop, std::move(writer)));
  std::string command;
  for (const std::string& word : options.command) command += (command.empty() ? "" : " ") + word;
  ledger->Append(ClockDomainEntry{.run_id = run_id,
                                  .boot_id = BootId(),
                                  .boottime_ns = ledger->Now(),
                                  .realtime_ns = absl::ToUnixNanos(Clock::Real().WallTime()),
                                  .job = options.job_id,
                                  .command = command.substr(0, 4096)});
  ledger->Append(SubmitEntry{ledger->Now()});
  ledger->Append(CardsEntry{ledger->Now(), options.job.world, options.job.world});
  ledger->timer_ = loop.RunAfter(kDrainInterval, [self = ledger.get()] { self->DrainAndRepeat(); });
  return ledger;
}

absl::StatusOr<std::unique_ptr<RunLedger>> RunLedger::GoOn(EventLoop& loop,
                                                           const std::string& run_dir,
                                                           uint64_t generation, int64_t lost_ns) {
  const std::string path = run_dir + "/ledger.bin";
  OUTLAST_ASSIGN_OR_RETURN(const LedgerRead former, ReadLedger(path));
  OUTLAST_ASSIGN_OR_RETURN(LedgerWriter writer, LedgerWriter::Open(path));
  std::unique_ptr<RunLedger> ledger(new RunLedger(loop, std::move(writer)));
  ledger->generation_ = generation;
  for (const LedgerEntry& entry : former.entries) {
    if (const auto* step = std::get_if<StepEntry>(&entry); step != nullptr) {
      int64_t& known = ledger->known_to_ns_.try_emplace(step->slot, -1).first->second;
      known = std::max(known, step->start_ns);
    }
  }
  const int64_t to_boottime_ns = ledger->boottime_minus_monotonic_ns_;
  ledger->Append(DetectedEntry{.time_ns = ledger->Now(),
                               .last_progress_ns = lost_ns > 0 ? lost_ns + to_boottime_ns : 0,
                               .generation = generation,
                               .slot = -1,
                               .rank = -1,
                               .step = -1,
                               .fault_class = kAgentLost,
                               .found = "the next agent: the former one was killed"});
  ledger->timer_ = loop.RunAfter(kDrainInterval, [self = ledger.get()] { self->DrainAndRepeat(); });
  return ledger;
}

void RunLedger::Adopted(int slot, int rank, int black_box_fd) {
  auto view = SegmentView::Open(black_box_fd);
  if (!view.ok()) return;
  Box box{std::move(*view), rank};
  if (const auto known = known_to_ns_.find(slot); known != known_to_ns_.end())
    box.known_to_ns = known->second;
  boxes_.insert_or_assign(slot, std::move(box));
}

int64_t RunLedger::Now() const { return MonotonicNanos() + boottime_minus_monotonic_ns_; }

void RunLedger::Append(const LedgerEntry& entry) {
  const absl::Status written = writer_.Append(entry);
  if (error_.ok()) error_ = written;
}

void RunLedger::Started(const SpawnWorker& worker, int rank, int pid, int black_box_fd) {
  if (!boxes_.contains(worker.slot)) {
    Adopted(worker.slot, rank, black_box_fd);  // its box may be a former agent's
  }
  Append(UpEntry{Now(), worker.generation, worker.slot, rank, pid});
}

void RunLedger::Ended(int slot, int pid, uint64_t born, const ProcessEnd& end) {
  int rank = slot;
  if (const auto box = boxes_.find(slot); box != boxes_.end()) {
    rank = box->second.rank;
    Drain(slot, box->second);
    AppendOpenStep(slot, box->second);
  }
  const std::string how = end.signal != 0 ? fmt::format("signal {}", end.signal)
                                          : fmt::format("exit code {}", end.code);
  Append(DownEntry{Now(), std::max(born, generation_), slot, rank, pid, CauseOf(end), how});
}

void RunLedger::Joined(const Id128& run_id, const std::string& node) {
  if (run_id.is_zero() || run_id == joined_) return;
  joined_ = run_id;
  Append(JoinedEntry{Now(), run_id, node});
}

void RunLedger::Committed(const CommitGeneration& commit) {
  generation_ = commit.generation;
  for (auto& [slot, box] : boxes_) {
    if (commit.RankOf(slot) == box.rank) continue;
    Drain(slot, box);
    box.rank = commit.RankOf(slot);
  }
  Append(CommitEntry{Now(), commit.generation, static_cast<int32_t>(commit.members.size())});
}

void RunLedger::Faulted(const FaultRecord& fault, int slot, int64_t last_progress_ns) {
  if (fault.victim) return;
  const bool is_death = fault.end.signal != 0 || fault.end.code != 0;
  Append(DetectedEntry{
      .time_ns = Now(),
      .last_progress_ns = last_progress_ns == 0 && is_death ? Now() : last_progress_ns,
      .generation = fault.generation,
      .slot = slot,
      .rank = fault.rank,
      .step = fault.step_reached,
      .fault_class = std::string(FaultClassName(fault.fault_class)),
      .found = fault.found_by + ": " + fault.detail});
}

void RunLedger::Finished(int exit_code, const std::string& reason) {
  for (auto& [slot, box] : boxes_) Drain(slot, box);
  Append(EndEntry{Now(), exit_code, reason});
}

RunTotals RunLedger::Totals() {
  RunTotals all;
  double flops = 0, possible = 0;
  bool is_known = !boxes_.empty();
  for (auto& [slot, box] : boxes_) {
    Drain(slot, box);
    if (slot == boxes_.begin()->first) all.job = box.totals;
    all.tokens += box.totals.tokens;
    all.samples += box.totals.samples;
    all.model_flops += box.totals.model_flops;
    flops += box.totals.window_flops();
    possible += box.totals.window_seconds() * box.peak_flops_per_second;
    is_known = is_known && box.totals.window_flops() > 0 && box.peak_flops_per_second > 0;
  }
  if (is_known && possible > 0) all.mfu = flops / possible;
  return all;
}

int64_t RunLedger::LastStepEnd(int slot) const {
  const auto box = boxes_.find(slot);
  return box == boxes_.end() ? 0 : box->second.totals.last_end_ns;
}

void RunLedger::DrainAndRepeat() {
  for (auto& [slot, box] : boxes_) Drain(slot, box);
  timer_ = loop_.RunAfter(kDrainInterval, [this] { DrainAndRepeat(); });
}

void RunLedger::Drain(int slot, Box& box) {
  StepLogRead read = ReadStepLog(box.view, box.next_seq);
  box.next_seq = read.next_seq;
  std::vector<LedgerEntry> entries;
  if (!box.has_meter && !read.records.empty()) {
    if (std::optional<MeterEntry> meter = ReadMeterEntry(box.view); meter.has_value()) {
      meter->time_ns = Now();
      box.peak_flops_per_second = meter->peak_flops_per_second;
      entries.emplace_back(std::move(*meter));
      box.has_meter = true;
    }
  }
  for (const StepRecord& record : read.records) {
    box.totals.Add(record);
    const StepEntry entry = ToStepEntry(record, slot, box.rank, boottime_minus_monotonic_ns_);
    if (entry.start_ns > box.known_to_ns) entries.emplace_back(entry);
  }
  if (!read.records.empty()) box.last = read.records.back();
  if (entries.empty()) return;
  const absl::Status written = writer_.Append(entries);
  if (error_.ok()) error_ = written;
}

void RunLedger::AppendOpenStep(int slot, const Box& box) {
  const StepRecord* last = box.last ? &*box.last : nullptr;
  if (const auto open = ReadOpenStep(box.view, last, MonotonicNanos()))
    Append(ToStepEntry(*open, slot, box.rank, boottime_minus_monotonic_ns_));
}

absl::Status CompleteLedger(const std::string& run_dir, const std::map<int, int>& black_boxes) {
  const std::string path = run_dir + "/ledger.bin";
  OUTLAST_ASSIGN_OR_RETURN(const LedgerRead ledger, ReadLedger(path));
  std::map<int, int64_t> known_to_ns;  // by slot: the start of the last step that is there
  for (const LedgerEntry& entry : ledger.entries) {
    if (std::holds_alternative<EndEntry>(entry)) return absl::OkStatus();
    const auto* step = std::get_if<StepEntry>(&entry);
    if (step != nullptr)
      known_to_ns[step->slot] = std::max(known_to_ns[step->slot], step->start_ns);
  }
  const int64_t offset_ns = NanosOf(CLOCK_BOOTTIME) - NanosOf(CLOCK_MONOTONIC);
  const int64_t now_ns = MonotonicNanos();
  std::vector<LedgerEntry> entries;
  for (const auto& [slot, fd] : black_boxes) {
    const auto view = SegmentView::Open(fd);
    if (!view.ok()) continue;
    std::vector<StepRecord> steps = ReadStepLog(*view, 1).records;
    const StepRecord* last = steps.empty() ? nullptr : &steps.back();
    if (const auto open = ReadOpenStep(*view, last, now_ns)) steps.push_back(*open);
    for (const StepRecord& step : steps) {
      const StepEntry entry = ToStepEntry(step, slot, slot, offset_ns);
      if (entry.start_ns > known_to_ns[slot]) entries.emplace_back(entry);
    }
  }
  if (entries.empty()) return absl::OkStatus();
  OUTLAST_ASSIGN_OR_RETURN(LedgerWriter writer, LedgerWriter::Open(path));
  return writer.Append(entries);
}

}  // namespace outlast
