// Snapshots beside memcpy, saves beside fio.
#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/persist.h"
#include "checkpoint/reader.h"
#include "checkpoint/remote_root.h"
#include "checkpoint/root.h"
#include "checkpoint/seal_table.h"
#include "checkpoint/snapshotter.h"
#include "figures/figures.h"
#include "outlast/base/clock.h"
#include "outlast/base/memory.h"
#include "outlast/base/status.h"
#include "outlast/store/blob.h"

namespace outlast::bench {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Bytes that no file system or device can shorten.
void FillWithNoise(std::span<std::byte> bytes) {
  uint64_t word = 0x9e3779b97f4a7c15;
  for (size_t at = 0; at + sizeof word <= bytes.size(); at += sizeof word) {
    word ^= word << 13;
    word ^= word >> 7;
    word ^= word << 17;
    std::memcpy(bytes.data() + at, &word, sizeof word);
  }
}

// A world of one rank with some equal tensors, its snapshot buffers and what fills them.
class Rank {
 public:
  static absl::StatusOr<std::unique_ptr<Rank>> Make(size_t bytes, size_t tensors = 1) {
    auto rank = std::make_unique<Rank>();
    for (size_t i = 0; i < tensors; ++i) rank->names_.push_back(fmt::format("layers.{}.weight", i));
    OUTLAST_ASSIGN_OR_RETURN(rank->memory_, Mapping::Anonymous(bytes));
    FillWithNoise(rank->memory_.bytes());
    OUTLAST_RETURN_IF_ERROR(rank->MakeBuffers());
    return rank;
  }

  StateView State() const {
    const size_t each = memory_.size() / names_.size();
    const Shape shape{static_cast<int64_t>(each / sizeof(float))};
    StateView state;
    for (size_t i = 0; i < names_.size(); ++i)
      state.regions.push_back(
          {names_[i], DType::kF32, shape, {}, shape, memory_.bytes().subspan(i * each, each)});
    return state;
  }
  // Copies and seals the state as snapshot `step`, and returns the time.
  absl::StatusOr<double> Seal(int64_t step) {
    const int64_t started = MonotonicNanos();
    OUTLAST_ASSIGN_OR_RETURN(
        const bool begun,
        snapshotter_->Begin({step, 1, 0, Snapshotter::Want::kMemory, Snapshotter::Mode::kEager},
                            State()));
    if (!begun || !snapshotter_->Finish()) return absl::InternalError("no buffer was free");
    return static_cast<double>(MonotonicNanos() - started) / 1e9;
  }
  std::span<const std::byte> bytes() const { return memory_.bytes(); }

  absl::StatusOr<PersistResult> Save(Root& root, int64_t step) {
    PersistRequest request;
    for (const Buffer& buffer : buffers_) {
      const auto sealed = buffer.ReadSealed(run_, BootId(), assignment_.layout_hash);
      if (sealed.ok() && sealed->header.step == step)
        request.ranks = {{&buffer, sealed->turn, &assignment_, {}}};
    }
    if (request.ranks.empty()) return absl::NotFoundError("no snapshot of that step");
    request.run_id = run_;
    request.generation = 1;
    request.step = step;
    request.plan = std::string(64, '0');
    request.committer = "bench";
    request.retention.keep_last = 1;
    request.parent = parent_;
    OUTLAST_ASSIGN_OR_RETURN(PersistResult result, Persist(root, request));
    parent_ = result.checkpoint;
    return result;
  }
  const Id128& run() const { return run_; }

 private:
  absl::Status MakeBuffers() {
    OUTLAST_ASSIGN_OR_RETURN(const auto mine, TableOfRank(State(), 0));
    OUTLAST_ASSIGN_OR_RETURN(auto merged, MergeTables(std::vector{mine}));
    OUTLAST_ASSIGN_OR_RETURN(const Plan plan, MakePlan(std::move(merged)));
    OUTLAST_ASSIGN_OR_RETURN(assignment_, AssignmentOf(plan, 0));
    OUTLAST_ASSIGN_OR_RETURN(auto memory, Mapping::Anonymous(SealTable::BytesFor(1)));
    table_ = std::make_unique<SealTable>(std::move(memory), 1);
    const BufferLayout layout{.image_bytes = assignment_.image_bytes(),
                              .replicated_bytes = assignment_.replicated_bytes,
                              .extra_capacity = 4096};
    std::vector<Buffer> mapped;
    for (int i = 0; i < 2; ++i) {
      OUTLAST_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Create(layout, {run_, run_, 0, 1}));
      OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, Duplicate(buffer.fd()));
      OUTLAST_ASSIGN_OR_RETURN(Buffer same, Buffer::Open(std::move(fd)));
      buffers_.push_back(std::move(buffer));
      mapped.push_back(std::move(same));
    }
    Snapshotter::Options options;
    options.job_id = options.run_id = run_;
    options.is_aborted = [](uint64_t) { return false; };
    options.on_wanted_sealed = [](int64_t, uint64_t, int, uint32_t, bool) {};
    OUTLAST_ASSIGN_OR_RETURN(
        snapshotter_,
        Snapshotter::Make(std::move(options), *table_, std::move(mapped), assignment_, State()));
    return absl::OkStatus();
  }

  const Id128 run_ = Id128::Random();
  std::vector<std::string> names_;
  Mapping memory_;
  Assignment assignment_;
  std::unique_ptr<SealTable> table_;
  std::vector<Buffer> buffers_;  // as the agent has them
  std::optional<std::string> parent_;
  std::unique_ptr<Snapshotter> snapshotter_;
};

// This thread and those that it starts share one processor, so that both sides of a comparison have
// the same.
class OneProcessor {
 public:
  OneProcessor() {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
  }
  ~OneProcessor() { sched_setaffinity(0, sizeof before_, &before_); }

 private:
  cpu_set_t before_;
};

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
    OUTLAST_ASSIGN_OR_RETURN(const double sealed, rank->Seal(i));
    if (i <= 2) continue;  // each buffer's first fill maps its pages
    bare.push_back(gigabytes / seconds);
    figure.samples.push_back(gigabytes / sealed);
  }
  figure.limit = Reference{"memcpy into touched memory", Quantile(bare, 0.5)};
  figure.goal = 0.75 * figure.limit->value;
  report.Add(figure);
  return absl::OkStatus();
}

double ProcessorSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// GB/s of fio, its fsync included.
std::optional<double> RunFio(const std::string& folder, size_t bytes) {
  const std::string file = folder + "/fio.data", output = folder + "/fio.json";
  const auto ran = TimeCommand(
      {"fio", "--name=write", "--filename=" + file, fmt::format("--size={}", bytes), "--bs=8M",
       "--rw=write", "--direct=1", "--ioengine=psync", "--end_fsync=1", "--output-format=json"},
      output);
  std::filesystem::remove(file);
  if (!ran) return std::nullopt;
  std::ifstream text(output);
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded()) return std::nullopt;
  const auto& job = json["jobs"][0];
  const double write_s = job["write"]["runtime"].get<double>() / 1e3;
  const double sync_s =
      job.contains("sync") ? job["sync"]["lat_ns"]["mean"].get<double>() / 1e9 : 0.0;
  if (write_s <= 0) return std::nullopt;
  return static_cast<double>(bytes) / 1e9 / (write_s + sync_s);
}

absl::Status MeasurePersist(const Settings& settings, Report& report) {
  const size_t bytes = (settings.smoke ? 32 : 512) * kMiB;
  OUTLAST_ASSIGN_OR_RETURN(const auto rank, Rank::Make(bytes));
  RootOptions options;
  options.run = rank->run();
  OUTLAST_ASSIGN_OR_RETURN(const auto root, Root::Open(settings.folder + "/root", options));
  OUTLAST_RETURN_IF_ERROR(root->TakeClaim());
  Figure rate{.name = "persist.rate", .unit = "GB/s", .sense = Goal::kAtLeast};
  Figure cpu{.name = "persist.cpu", .unit = "% core", .goal = 15};
  std::vector<double> fio;
  for (int64_t i = 1; i <= (settings.smoke ? 1 : 15); ++i) {
    if (const auto measured = RunFio(settings.folder, bytes)) fio.push_back(*measured);
    OUTLAST_RETURN_IF_ERROR(rank->Seal(i).status());
    sync();  // what the other side left is no business of this one
    const double busy = ProcessorSeconds();
    const int64_t started = MonotonicNanos();
    OUTLAST_ASSIGN_OR_RETURN(const PersistResult result, rank->Save(*root, i));
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

// What is read next comes from the disk.
void ForgetPages(const std::string& folder) {
  sync();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const UniqueFd fd(open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
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
  OUTLAST_ASSIGN_OR_RETURN(const auto root, Root::Open(settings.folder + "/near", options));
  OUTLAST_RETURN_IF_ERROR(root->TakeClaim());
  OUTLAST_RETURN_IF_ERROR(rank->Seal(1).status());
  OUTLAST_ASSIGN_OR_RETURN(const PersistResult saved, rank->Save(*root, 1));
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

// Seconds of a snapshot, of saving it, and of reading the checkpoint into the state.
absl::StatusOr<double> TakeAround(Rank& rank, Root& root, int64_t step) {
  const auto seconds_since = [](int64_t started) {
    return static_cast<double>(MonotonicNanos() - started) / 1e9;
  };
  OUTLAST_ASSIGN_OR_RETURN(const double sealed, rank.Seal(step));
  int64_t started = MonotonicNanos();
  OUTLAST_ASSIGN_OR_RETURN(const PersistResult saved, rank.Save(root, step));
  const double persisted = seconds_since(started);
  started = MonotonicNanos();
  OUTLAST_ASSIGN_OR_RETURN(const auto reader,
                           CheckpointReader::Open(root.PathOf(saved.checkpoint)));
  OUTLAST_RETURN_IF_ERROR(reader->ReadState(rank.State()).status());
  const double restored = seconds_since(started);
  return sealed + persisted + restored;
}

absl::Status MeasureTiny(const Settings& settings, Report& report) {
  const size_t tensors = settings.smoke ? 500 : 50'000;
  OUTLAST_ASSIGN_OR_RETURN(const auto many, Rank::Make(tensors * 1024, tensors));
  OUTLAST_ASSIGN_OR_RETURN(const auto one, Rank::Make(tensors * 1024));
  RootOptions options;
  options.run = many->run();
  OUTLAST_ASSIGN_OR_RETURN(const auto many_root, Root::Open(settings.folder + "/many", options));
  OUTLAST_RETURN_IF_ERROR(many_root->TakeClaim());
  options.run = one->run();
  OUTLAST_ASSIGN_OR_RETURN(const auto one_root, Root::Open(settings.folder + "/one", options));
  OUTLAST_RETURN_IF_ERROR(one_root->TakeClaim());
  Figure figure{.name = "checkpoint.tiny", .unit = "x", .goal = 3};
  for (int64_t i = 1; i <= (settings.smoke ? 1 : 9); ++i) {
    OUTLAST_ASSIGN_OR_RETURN(const double one_s, TakeAround(*one, *one_root, i));
    OUTLAST_ASSIGN_OR_RETURN(const double many_s, TakeAround(*many, *many_root, i));
    if (i <= 2 && !settings.smoke) continue;  // each buffer's first fill maps its pages
    figure.samples.push_back(many_s / one_s);
  }
  figure.limit = Reference{"one tensor of the same bytes", 1};
  report.Add(figure);
  return absl::OkStatus();
}

}  // namespace

void MeasureCheckpoint(const Settings& settings, Report& report) {
  if (const absl::Status done = MeasurePlan(settings, report); !done.ok())
    report.Fail("checkpoint.plan", done.ToString());
  if (const absl::Status done = MeasureTiny(settings, report); !done.ok())
    report.Fail("checkpoint.tiny", done.ToString());
  if (const absl::Status done = MeasureSnapshot(settings, report); !done.ok())
    report.Fail("snapshot.copy", done.ToString());
  if (const absl::Status done = MeasurePersist(settings, report); !done.ok())
    report.Fail("persist.rate", done.ToString());
  if (const absl::Status done = MeasureRemote(settings, report); !done.ok())
    report.Fail("remote.upload", done.ToString());
}

}  // namespace outlast::bench
