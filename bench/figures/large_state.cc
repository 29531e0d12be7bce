// A rank with 4 GB of state beside a trainer's step: what checkpoints cost it, and the limits that
// the machine sets in the same minutes.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <vector>

#include "figures/figures.h"
#include "figures/saved_state.h"
#include "outlast/base/clock.h"
#include "outlast/base/status.h"
#include "outlast/checkpoint/checkpointer.h"
#include "outlast/run/run.h"

namespace outlast::bench {
namespace {

constexpr size_t kTensors = 64;

size_t StateBytes(const Settings& settings) {
  return settings.smoke ? 32 * kMiB : size_t{4'000'000'000};
}

double SecondsSince(int64_t started) {
  return static_cast<double>(MonotonicNanos() - started) / 1e9;
}

// Snapshots in eager mode and restores from the buffer, beside memcpy. What this thread does stays
// on one processor; the rank's copier, which was started before, may take another and shares the
// work of a snapshot: memcpy has one thread there, the snapshot two.
absl::Status MeasureMemory(Rank& rank, const Settings& settings, Report& report) {
  const OneProcessor one;
  const size_t bytes = rank.bytes().size();
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  OUTLAST_ASSIGN_OR_RETURN(const Mapping copy, Mapping::Anonymous(bytes));
  Figure eager{.name = "checkpoint.snapshot_eager", .unit = "GB/s", .sense = Goal::kAtLeast};
  Figure back{.name = "checkpoint.restore_buffer", .unit = "GB/s", .sense = Goal::kAtLeast};
  std::vector<double> bare;
  for (int64_t i = 1; i <= (settings.smoke ? 3 : 13); ++i) {
    const int64_t started = MonotonicNanos();
    std::memcpy(copy.data(), rank.bytes().data(), bytes);
    const double copied = SecondsSince(started);
    OUTLAST_ASSIGN_OR_RETURN(const double sealed, rank.Seal());
    OUTLAST_ASSIGN_OR_RETURN(const double restored, rank.RestoreFromBuffer());
    if (i <= 2) continue;  // each buffer's first fill maps its pages
    bare.push_back(gigabytes / copied);
    eager.samples.push_back(gigabytes / sealed);
    back.samples.push_back(gigabytes / restored);
  }
  for (Figure* figure : {&eager, &back}) {
    figure->limit = Reference{"memcpy into touched memory", Quantile(bare, 0.5)};
    figure->goal = 0.75 * figure->limit->value;
  }
  back.peer = settings.PeerOf("dcp.load.warm");
  report.Add(eager);
  report.Add(back);
  return absl::OkStatus();
}

// Saves and restores from disk, each beside fio in the same minute; who goes first alternates.
class DiskRates {
 public:
  DiskRates(Rank& rank, Root& root, const Settings& settings)
      : rank_(rank), root_(root), settings_(settings) {}

  absl::Status Measure(Report& report) {
    for (int64_t i = 1; i <= (settings_.smoke ? 1 : 5); ++i) {
      OUTLAST_RETURN_IF_ERROR(rank_.Seal().status());
      if (i % 2 == 0) OUTLAST_RETURN_IF_ERROR(SaveAndRead(FioTurn::kFirst));
      FioWrites();
      if (i % 2 != 0) OUTLAST_RETURN_IF_ERROR(SaveAndRead(FioTurn::kLast));
    }
    SetGoal(persist_, fio_write_, 0.95, "fio, O_DIRECT write, 8 MiB blocks, fsync");
    SetGoal(restore_, fio_read_, 0.9, "fio, O_DIRECT read, 8 MiB blocks");
    persist_.peer = settings_.PeerOf("dcp.save.rate");
    restore_.peer = settings_.PeerOf("dcp.load.cold");
    report.Add(persist_);
    report.Add(cpu_);
    report.Add(restore_);
    return absl::OkStatus();
  }

 private:
  enum class FioTurn : uint8_t { kFirst, kLast };

  static void SetGoal(Figure& figure, const std::vector<double>& fio, double share,
                      std::string name) {
    if (fio.empty()) return;
    figure.limit = Reference{std::move(name), Quantile(fio, 0.5)};
    figure.goal = share * figure.limit->value;
  }

  absl::Status SaveAndRead(FioTurn fio) {
    sync();  // what the other side left is no business of this one
    const double busy = ProcessorSeconds();
    OUTLAST_ASSIGN_OR_RETURN(const PersistResult saved, rank_.Save(root_));
    const double seconds = absl::ToDoubleSeconds(saved.write_time);
    cpu_.samples.push_back(100 * (ProcessorSeconds() - busy) / seconds);
    persist_.samples.push_back(static_cast<double>(saved.bytes) / 1e9 / seconds);
    RetentionOptions last;
    last.keep_last = 1;
    OUTLAST_RETURN_IF_ERROR(root_.Retain(last, {}).status());
    const std::string folder = root_.PathOf(saved.checkpoint);
    ForgetPages(folder);
    if (fio == FioTurn::kFirst) FioReads(folder);
    OUTLAST_ASSIGN_OR_RETURN(const double restored, rank_.RestoreFromDisk(folder));
    restore_.samples.push_back(static_cast<double>(saved.bytes) / 1e9 / restored);
    if (fio == FioTurn::kLast) FioReads(folder);
    return absl::OkStatus();
  }
  void FioWrites() {
    if (const auto rate = FioWrite(settings_.folder, rank_.bytes().size()))
      fio_write_.push_back(*rate);
  }
  void FioReads(const std::string& folder) {
    if (const auto rate = FioRead(settings_.folder, folder + "/w00000.safetensors"))
      fio_read_.push_back(*rate);
  }

  Rank& rank_;
  Root& root_;
  const Settings& settings_;
  Figure persist_{.name = "checkpoint.persist", .unit = "GB/s", .sense = Goal::kAtLeast};
  Figure cpu_{.name = "checkpoint.persist_cpu", .unit = "% core", .goal = 15};
  Figure restore_{.name = "checkpoint.restore_disk", .unit = "GB/s", .sense = Goal::kAtLeast};
  std::vector<double> fio_write_, fio_read_;
};

// Forward and backward of a step: products of matrices that are larger than a core's own caches, on
// the calling thread.
class MatrixWork {
 public:
  MatrixWork(int64_t side, double seconds)
      : side_(side), a_(Cells(), 0.5F), b_(Cells(), 0.25F), c_(Cells(), 0.0F) {
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
      const int64_t started = MonotonicNanos();
      Multiply();
      best = std::min(best, SecondsSince(started));
    }
    products_ = std::max<int64_t>(1, std::llround(std::ceil(seconds / best)));
  }

  // The time in seconds.
  double Run() {
    const int64_t started = MonotonicNanos();
    for (int64_t i = 0; i < products_; ++i) Multiply();
    return SecondsSince(started);
  }

 private:
  size_t Cells() const { return static_cast<size_t>(side_ * side_); }
  void Multiply() {
    for (int64_t i = 0; i < side_; ++i) {
      float* const row = &c_[static_cast<size_t>(i * side_)];
      for (int64_t k = 0; k < side_; ++k) {
        const float factor = a_[static_cast<size_t>(i * side_ + k)];
        const float* const other = &b_[static_cast<size_t>(k * side_)];
        for (int64_t j = 0; j < side_; ++j) row[j] = 0.5F * row[j] + factor * other[j];
      }
    }
  }

  const int64_t side_;
  std::vector<float> a_, b_, c_;
  int64_t products_ = 1;
};

// A trainer with a checkpointer of its own, as a user has it: a world of one without an agent.
class Trainer {
 public:
  static absl::StatusOr<std::unique_ptr<Trainer>> Make(const std::string& root, size_t bytes,
                                                       size_t tensors) {
    auto trainer = std::make_unique<Trainer>();
    OUTLAST_ASSIGN_OR_RETURN(trainer->run_, Run::Join());
    OUTLAST_ASSIGN_OR_RETURN(trainer->state_, State::Make(bytes, tensors));
    trainer->view_ = trainer->state_.View();
    OUTLAST_ASSIGN_OR_RETURN(trainer->checkpoints_,
                             Checkpointer::Open(*trainer->run_, {.uri = root,
                                                                 .every = Every::Steps(1),
                                                                 .snapshot_every = Every::Steps(1),
                                                                 .keep_last = 1,
                                                                 .buffers = 2}));
    return trainer;
  }

  // Calls `body` as the training loop.
  absl::Status Train(const std::function<absl::Status()>& body) {
    return run_->ForEachGeneration([&](Generation&) -> absl::Status {
      OUTLAST_RETURN_IF_ERROR(checkpoints_->Restore(view_).status());
      return body();
    });
  }
  // The two calls of a step. What each takes, in seconds.
  absl::StatusOr<double> BeforeUpdate() {
    const int64_t started = MonotonicNanos();
    OUTLAST_RETURN_IF_ERROR(checkpoints_->BeforeUpdate());
    return SecondsSince(started);
  }
  absl::StatusOr<double> Save() {
    const int64_t started = MonotonicNanos();
    OUTLAST_RETURN_IF_ERROR(checkpoints_->SaveIfDue(++step_, view_));
    return SecondsSince(started);
  }
  // The optimizer: every tensor is another one after it.
  void Update() {
    for (const Region& region : view_.regions)
      region.bytes[region.bytes.size() / 2] ^= std::byte{1};
  }
  bool is_durable() const { return checkpoints_->stats().durable_step >= step_; }
  // kDeadlineExceeded also where the save was left out, since the end of an older one still ran.
  absl::Status AwaitDurable() const {
    const int64_t started = MonotonicNanos();
    while (!is_durable()) {
      if (SecondsSince(started) > 60) return absl::DeadlineExceededError("not durable in 60 s");
      const CheckpointStats stats = checkpoints_->stats();
      if (stats.failed_saves > 0) return absl::InternalError("a save failed");
      if (stats.skipped > 0) return absl::InternalError("a snapshot found no buffer");
      usleep(500);
    }
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<Run> run_;
  State state_;
  StateView view_;
  std::unique_ptr<Checkpointer> checkpoints_;
  int64_t step_ = 0;
};

// What SaveIfDue and the BeforeUpdate of the next step take of a trainer whose state is copied
// under the forward and backward pass between them. Milliseconds.
absl::StatusOr<std::vector<double>> LazyStalls(Trainer& trainer, MatrixWork& work, size_t count) {
  std::vector<double> stalls;
  for (size_t i = 0; i < count + 2; ++i) {
    OUTLAST_ASSIGN_OR_RETURN(const double begun, trainer.Save());
    work.Run();
    OUTLAST_ASSIGN_OR_RETURN(const double ended, trainer.BeforeUpdate());
    trainer.Update();
    OUTLAST_RETURN_IF_ERROR(trainer.AwaitDurable());
    work.Run();  // a save that is due while an old checkpoint is still deleted is left out
    // The first copies are made in SaveIfDue, and map the buffers' pages.
    if (i >= 2) stalls.push_back(1e3 * (begun + ended));
  }
  return stalls;
}

// By how many percent a step takes longer that begins as the disk begins to get a snapshot, with no
// copy under it, than the one beside it without a save; which comes first alternates. The save may
// end before the step does: this is the step that it costs most.
absl::StatusOr<std::vector<double>> Slowdowns(Trainer& trainer, MatrixWork& work, size_t pairs) {
  std::vector<double> slowdowns;
  for (size_t i = 0; i < pairs; ++i) {
    double alone = i % 2 == 0 ? work.Run() : 0;
    OUTLAST_RETURN_IF_ERROR(trainer.Save().status());
    OUTLAST_RETURN_IF_ERROR(trainer.BeforeUpdate().status());  // sealed: the save begins
    trainer.Update();
    const double beside = work.Run();
    OUTLAST_RETURN_IF_ERROR(trainer.AwaitDurable());
    work.Run();  // as above
    if (i % 2 != 0) alone = work.Run();
    slowdowns.push_back(100 * (beside / alone - 1));
  }
  return slowdowns;
}

absl::Status MeasureSteps(const Settings& settings, Report& report) {
  OUTLAST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Make(settings.folder + "/steps",
                                                             StateBytes(settings), kTensors));
  MatrixWork work(settings.smoke ? 64 : 768, settings.smoke ? 0.002 : 1.1);
  Figure stall{.name = "checkpoint.stall_lazy", .unit = "ms", .goal = 5};
  Figure slowdown{.name = "checkpoint.step_slowdown", .unit = "%", .goal = 2};
  const absl::Status trained = trainer->Train([&]() -> absl::Status {
    if (report.Wants(stall.name)) {
      OUTLAST_ASSIGN_OR_RETURN(stall.samples, LazyStalls(*trainer, work, settings.smoke ? 1 : 11));
    }
    if (report.Wants(slowdown.name)) {
      OUTLAST_ASSIGN_OR_RETURN(slowdown.samples,
                               Slowdowns(*trainer, work, settings.smoke ? 2 : 50));
    }
    return absl::OkStatus();
  });
  OUTLAST_RETURN_IF_ERROR(trained);
  stall.peer = settings.PeerOf("dcp.async_save.stall");
  report.Add(stall);
  report.Add(slowdown);
  return absl::OkStatus();
}

double ResidentMiB() {
  std::ifstream file("/proc/self/statm");
  double pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / static_cast<double>(kMiB);
}

// Resident memory, the snapshot buffers included, over 100 saves to disk: the last ten beside the
// second ten. Of 256 MB in 2,000 tensors: what could grow, tables and receipts, grows by tensors
// and saves.
absl::Status MeasureGrowth(const Settings& settings, Report& report) {
  const size_t saves = settings.smoke ? 8 : 100, ten = saves / 10 + (settings.smoke ? 1 : 0);
  OUTLAST_ASSIGN_OR_RETURN(
      const auto trainer,
      Trainer::Make(settings.folder + "/growth", settings.smoke ? 8'000'000 : 256'000'000,
                    settings.smoke ? 100 : 2'000));
  std::vector<double> resident;
  const absl::Status trained = trainer->Train([&]() -> absl::Status {
    while (resident.size() < saves) {
      OUTLAST_RETURN_IF_ERROR(trainer->Save().status());
      OUTLAST_RETURN_IF_ERROR(trainer->BeforeUpdate().status());
      trainer->Update();
      OUTLAST_RETURN_IF_ERROR(trainer->AwaitDurable());
      resident.push_back(ResidentMiB());
    }
    return absl::OkStatus();
  });
  OUTLAST_RETURN_IF_ERROR(trained);
  const auto early = resident.begin() + static_cast<std::ptrdiff_t>(ten);
  const double before = Quantile({early, early + static_cast<std::ptrdiff_t>(ten)}, 0.5);
  Figure figure{.name = "checkpoint.rss_growth", .unit = "MiB", .goal = 1};
  for (size_t i = saves - ten; i < saves; ++i) figure.samples.push_back(resident[i] - before);
  report.Add(figure);
  return absl::OkStatus();
}

absl::Status MeasureMemoryAndDisk(const Settings& settings, Report& report) {
  OUTLAST_ASSIGN_OR_RETURN(const auto rank, Rank::Make(StateBytes(settings), kTensors));
  if (report.Wants("checkpoint.snapshot_eager") || report.Wants("checkpoint.restore_buffer"))
    OUTLAST_RETURN_IF_ERROR(MeasureMemory(*rank, settings, report));
  if (!report.Wants("checkpoint.persist") && !report.Wants("checkpoint.persist_cpu") &&
      !report.Wants("checkpoint.restore_disk"))
    return absl::OkStatus();
  OUTLAST_ASSIGN_OR_RETURN(const auto root, OpenRoot(settings.folder + "/large", rank->run()));
  return DiskRates(*rank, *root, settings).Measure(report);
}

}  // namespace

void MeasureLargeState(const Settings& settings, Report& report) {
  report.Measure({"checkpoint.rss_growth"}, [&] { return MeasureGrowth(settings, report); });
  report.Measure({"checkpoint.snapshot_eager", "checkpoint.restore_buffer", "checkpoint.persist",
                  "checkpoint.persist_cpu", "checkpoint.restore_disk"},
                 [&] { return MeasureMemoryAndDisk(settings, report); });
  report.Measure({"checkpoint.stall_lazy", "checkpoint.step_slowdown"},
                 [&] { return MeasureSteps(settings, report); });
}

}  // namespace outlast::bench
