// Snapshots beside memcpy, saves beside fio.
#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>

#include "checkpoint/remote_root.h"
#include "figures/figures.h"
#include "figures/saved_state.h"
#include "outlast/base/clock.h"
#include "outlast/base/memory.h"
#include "outlast/base/status.h"
#include "outlast/store/blob.h"

namespace outlast::bench {
namespace {

absl::Status MeasureSnapshot(const Settings& settings, Report& report) {
  const size_t bytes = (settings.smoke ? 8 : 256) * kMiB;
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  const OneProcessor one;
  OUTLAST_ASSIGN_OR_RETURN(const auto rank, Rank::Make(bytes));
  OUTLAST_ASSIGN_OR_RETURN(const Mapping copy, Mapping::Anonymous(bytes));
  Figure figure{.name = "snapshot.copy", .unit = "GB/s", .sense = Goal::kAtLeast};
  std::vector<double> bare;
  for (int64_t i = 1; i <= (settings.smoke ? 3 : 25); ++i) {
    const int64_t started = MonotonicNanos();
    std::memcpy(copy.data(), rank->bytes().data(), bytes);
    const double seconds = static_cast<double>(MonotonicNanos() - started) / 1e9;
    OUTLAST_ASSIGN_OR_RETURN(const double sealed, rank->Seal());
    if (i <= 2) continue;  // each buffer's first fill maps its pages
    bare.push_back(gigabytes / seconds);
    figure.samples.push_back(gigabytes / sealed);
  }
  figure.limit = Reference{"memcpy into touched memory", Quantile(bare, 0.5)};
  figure.goal = 0.75 * figure.limit->value;
  report.Add(figure);
  return absl::OkStatus();
}

absl::Status MeasurePersist(const Settings& settings, Report& report) {
  const size_t bytes = (settings.smoke ? 32 : 512) * kMiB;
  OUTLAST_ASSIGN_OR_RETURN(const auto rank, Rank::Make(bytes));
  OUTLAST_ASSIGN_OR_RETURN(const auto root, OpenRoot(settings.folder + "/root", rank->run()));
  Figure rate{.name = "persist.rate", .unit = "GB/s", .sense = Goal::kAtLeast};
  Figure cpu{.name = "persist.cpu", .unit = "% core", .goal = 15};
  std::vector<double> fio;
  for (int64_t i = 1; i <= (settings.smoke ? 1 : 15); ++i) {
    if (const auto measured = FioWrite(settings.folder, bytes)) fio.push_back(*measured);
    OUTLAST_RETURN_IF_ERROR(rank->Seal().status());
    sync();  // what the other side left is no business of this one
    const double busy = ProcessorSeconds();
    const int64_t started = MonotonicNanos();
    OUTLAST_ASSIGN_OR_RETURN(const PersistResult result, rank->Save(*root));
    const double seconds = static_cast<double>(MonotonicNanos() - started) / 1e9;
    cpu.samples.push_back(100 * (ProcessorSeconds() - busy) / seconds);
    rate.samples.push_back(static_cast<double>(result.bytes) / 1e9 /
                           absl::ToDoubleSeconds(result.write_time));
  }
  if (!fio.empty()) {
    rate.limit = Reference{"fio, O_DIRECT, 8 MiB blocks, fsync", Quantile(fio, 0.5)};
    rate.goal = 0.9 * rate.limit->value;
  }
  report.Add(rate);
  report.Add(cpu);
  return absl::OkStatus();
}

// Seconds of a plain copy that is durable at its end.
std::optional<double> CopyPlainly(const std::string& from, const std::string& to) {
  std::filesystem::remove_all(to);
  ForgetPages(from);
  return TimeCommand(
      {"sh", "-c", "cp -r --reflink=never \"$1\" \"$2\" && sync -f \"$2\"", "sh", from, to});
}

// A checkpoint to a remote root in a folder of the same disk, and back; each beside cp and sync,
// all from cold pages.
absl::Status MeasureRemote(const Settings& settings, Report& report) {
  const size_t bytes = (settings.smoke ? 32 : 512) * kMiB;
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  OUTLAST_ASSIGN_OR_RETURN(const auto rank, Rank::Make(bytes));
  RootOptions options;
  options.run = rank->run();
  OUTLAST_ASSIGN_OR_RETURN(const auto root, OpenRoot(settings.folder + "/near", rank->run()));
  OUTLAST_RETURN_IF_ERROR(rank->Seal().status());
  OUTLAST_ASSIGN_OR_RETURN(const PersistResult saved, rank->Save(*root));
  const std::string near = root->PathOf(saved.checkpoint), plain = settings.folder + "/plain";
  const std::string far = settings.folder + "/far";
  OUTLAST_ASSIGN_OR_RETURN(auto blob, MakeFolderBlob(far));
  OUTLAST_ASSIGN_OR_RETURN(const auto remote, RemoteRoot::Open(std::move(blob), options));
  OUTLAST_RETURN_IF_ERROR(remote->Adopt(root->job(), ""));
  OUTLAST_RETURN_IF_ERROR(remote->TakeClaim(root->claim()));
  Figure upload{.name = "remote.upload", .unit = "GB/s", .sense = Goal::kAtLeast};
  Figure fetch{.name = "remote.fetch", .unit = "GB/s", .sense = Goal::kAtLeast};
  std::vector<double> copied_up, copied_down;
  for (int i = 0; i < (settings.smoke ? 1 : 7); ++i) {
    if (const auto seconds = CopyPlainly(near, plain)) copied_up.push_back(gigabytes / *seconds);
    ForgetPages(near);
    OUTLAST_ASSIGN_OR_RETURN(const UploadResult sent, remote->Upload(near, nullptr, {}));
    upload.samples.push_back(gigabytes / absl::ToDoubleSeconds(sent.time));
    if (const auto seconds = CopyPlainly(far + "/" + saved.checkpoint, plain))
      copied_down.push_back(gigabytes / *seconds);
    OUTLAST_RETURN_IF_ERROR(root->Delete(saved.checkpoint));
    ForgetPages(far);
    const int64_t started = MonotonicNanos();
    OUTLAST_RETURN_IF_ERROR(remote->Fetch(saved.checkpoint, *root, {}));
    fetch.samples.push_back(gigabytes / (static_cast<double>(MonotonicNanos() - started) / 1e9));
    OUTLAST_RETURN_IF_ERROR(remote->Delete(saved.checkpoint));
  }
  for (auto& [figure, copied] : {std::pair(&upload, &copied_up), std::pair(&fetch, &copied_down)}) {
    if (copied->empty()) continue;
    figure->limit = Reference{"cp and sync, the same bytes", Quantile(*copied, 0.5)};
    figure->goal = 0.9 * figure->limit->value;
    report.Add(*figure);
  }
  return absl::OkStatus();
}

// The plan of a large job, as each of its ranks makes it: 1,000 ranks, of which 8 share a tensor
// and 125 hold the same slice, by 20,000 tensors; every other one is held by all.
absl::Status MeasurePlan(const Settings& settings, Report& report) {
  TensorTable table{1000, {}};
  for (int64_t i = 0; i < 20'000; ++i) {
    const Shape global{8 * (i % 100 + 1), 64};
    TensorRow row{fmt::format("layers.{}.weight", i), DType::kBF16, global, {}};
    for (uint32_t slice = 0; slice < 8 && i % 2 == 0; ++slice) {
      const Box box{{global[0] / 8 * slice, 0}, {global[0] / 8, 64}};
      row.boxes.push_back({slice, box, 125, 8});
    }
    table.rows.push_back(std::move(row));
  }
  Figure figure{.name = "checkpoint.plan", .unit = "s", .goal = 2};
  for (int i = 0; i < (settings.smoke ? 1 : 5); ++i) {
    const int64_t started = MonotonicNanos();
    OUTLAST_ASSIGN_OR_RETURN(const Plan plan, MakePlan(table));
    OUTLAST_RETURN_IF_ERROR(AssignmentOf(plan, 123).status());
    figure.samples.push_back(static_cast<double>(MonotonicNanos() - started) / 1e9);
  }
  report.Add(figure);
  return absl::OkStatus();
}

// What a job pays for a checkpoint whose plan and buffers are made: copying and sealing a snapshot,
// saving it (shard, receipt and manifest, durable), and, at the next start, opening the checkpoint
// and reading it into the state with all checks. Making the plan (checkpoint.plan) and the list of
// regions is once a job, and not in it; nor is the end of older checkpoints, which nobody waits
// for.
struct RoundTrip {
  double sealed = 0, saved = 0, restored = 0;  // seconds
  double sum() const { return sealed + saved + restored; }
};

absl::StatusOr<RoundTrip> TakeAround(Rank& rank, Root& root) {
  RoundTrip times;
  OUTLAST_ASSIGN_OR_RETURN(times.sealed, rank.Seal());
  OUTLAST_ASSIGN_OR_RETURN(const PersistResult saved, rank.Save(root));
  times.saved = absl::ToDoubleSeconds(saved.write_time);
  OUTLAST_ASSIGN_OR_RETURN(times.restored, rank.RestoreFromDisk(root.PathOf(saved.checkpoint)));
  RetentionOptions last;
  last.keep_last = 1;
  OUTLAST_RETURN_IF_ERROR(root.Retain(last, {}).status());
  return times;
}

absl::Status MeasureTiny(const Settings& settings, Report& report) {
  const size_t tensors = settings.smoke ? 500 : 50'000;
  OUTLAST_ASSIGN_OR_RETURN(const auto many, Rank::Make(tensors * 1024, tensors));
  OUTLAST_ASSIGN_OR_RETURN(const auto one, Rank::Make(tensors * 1024));
  OUTLAST_ASSIGN_OR_RETURN(const auto many_root, OpenRoot(settings.folder + "/many", many->run()));
  OUTLAST_ASSIGN_OR_RETURN(const auto one_root, OpenRoot(settings.folder + "/one", one->run()));
  Figure figure{.name = "checkpoint.tiny", .unit = "x", .goal = 3};
  for (int64_t i = 1; i <= (settings.smoke ? 1 : 13); ++i) {
    OUTLAST_ASSIGN_OR_RETURN(const RoundTrip one_s, TakeAround(*one, *one_root));
    OUTLAST_ASSIGN_OR_RETURN(const RoundTrip many_s, TakeAround(*many, *many_root));
    if (i <= 2 && !settings.smoke) continue;  // each buffer's first fill maps its pages
    figure.samples.push_back(many_s.sum() / one_s.sum());
  }
  figure.limit = Reference{"one tensor of the same bytes", 1};
  report.Add(figure);
  return absl::OkStatus();
}

}  // namespace

void MeasureCheckpoint(const Settings& settings, Report& report) {
  report.Measure({"checkpoint.plan"}, [&] { return MeasurePlan(settings, report); });
  report.Measure({"checkpoint.tiny"}, [&] { return MeasureTiny(settings, report); });
  report.Measure({"snapshot.copy"}, [&] { return MeasureSnapshot(settings, report); });
  report.Measure({"persist.rate", "persist.cpu"}, [&] { return MeasurePersist(settings, report); });
  report.Measure({"remote.upload", "remote.fetch"},
                 [&] { return MeasureRemote(settings, report); });
  MeasureLargeState(settings, report);
}

}  // namespace outlast::bench
