#include "figures/saved_state.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/reader.h"
#include "figures/figures.h"
#include "outlast/base/clock.h"
#include "outlast/base/status.h"

namespace outlast::bench {
namespace {

void FillWithNoise(std::span<std::byte> bytes) {
  uint64_t word = 0x9e3779b97f4a7c15;
  for (size_t at = 0; at + sizeof word <= bytes.size(); at += sizeof word) {
    word ^= word << 13;
    word ^= word >> 7;
    word ^= word << 17;
    std::memcpy(bytes.data() + at, &word, sizeof word);
  }
}

double SecondsSince(int64_t started) {
  return static_cast<double>(MonotonicNanos() - started) / 1e9;
}

// What fio's JSON says of its only job; null: it failed.
nlohmann::json RunFio(const std::string& folder, std::vector<std::string> arguments) {
  const std::string output = folder + "/fio.json";
  std::vector<std::string> command = {"fio",        "--name=x",         "--bs=8M",
                                      "--direct=1", "--ioengine=psync", "--output-format=json"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  if (!TimeCommand(command, output)) return nullptr;
  std::ifstream text(output);
  const auto json = nlohmann::json::parse(text, nullptr, false);
  return json.is_discarded() ? nlohmann::json() : json["jobs"][0];
}

}  // namespace

absl::StatusOr<State> State::Make(size_t bytes, size_t tensors) {
  State state;
  for (size_t i = 0; i < tensors; ++i) state.names_.push_back(fmt::format("layers.{}.weight", i));
  OUTLAST_ASSIGN_OR_RETURN(state.memory_, Mapping::Anonymous(bytes));
  FillWithNoise(state.memory_.bytes());
  return state;
}

StateView State::View() const {
  const size_t each = memory_.size() / names_.size();
  const Shape shape{static_cast<int64_t>(each / sizeof(float))};
  StateView view;
  for (size_t i = 0; i < names_.size(); ++i)
    view.regions.push_back(
        {names_[i], DType::kF32, shape, {}, shape, memory_.bytes().subspan(i * each, each)});
  return view;
}

absl::StatusOr<std::unique_ptr<Rank>> Rank::Make(size_t bytes, size_t tensors) {
  auto rank = std::make_unique<Rank>();
  OUTLAST_ASSIGN_OR_RETURN(rank->state_, State::Make(bytes, tensors));
  rank->view_ = rank->state_.View();
  OUTLAST_RETURN_IF_ERROR(rank->MakeBuffers());
  return rank;
}

absl::Status Rank::MakeBuffers() {
  OUTLAST_ASSIGN_OR_RETURN(const auto mine, TableOfRank(view_, 0));
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
  OUTLAST_ASSIGN_OR_RETURN(snapshotter_, Snapshotter::Make(std::move(options), *table_,
                                                           std::move(mapped), assignment_, view_));
  return absl::OkStatus();
}

absl::StatusOr<Rank::Found> Rank::FindLast() const {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const auto sealed = buffers_[i].ReadSealed(run_, BootId(), assignment_.layout_hash);
    if (sealed.ok() && sealed->header.step == step_)
      return Found{static_cast<int>(i), sealed->turn};
  }
  return absl::NotFoundError("no snapshot of that step");
}

absl::StatusOr<double> Rank::Seal() {
  const int64_t started = MonotonicNanos();
  OUTLAST_ASSIGN_OR_RETURN(
      const bool begun,
      snapshotter_->Begin({++step_, 1, 0, Snapshotter::Want::kMemory, Snapshotter::Mode::kEager},
                          view_));
  if (!begun || !snapshotter_->Finish()) return absl::InternalError("no buffer was free");
  return SecondsSince(started);
}

absl::StatusOr<double> Rank::RestoreFromBuffer() {
  OUTLAST_ASSIGN_OR_RETURN(const Found found, FindLast());
  const int64_t started = MonotonicNanos();
  OUTLAST_RETURN_IF_ERROR(snapshotter_->Restore(found.buffer, found.turn, view_, Belief::kNothing));
  return SecondsSince(started);
}

absl::StatusOr<PersistResult> Rank::Save(Root& root) {
  OUTLAST_ASSIGN_OR_RETURN(const Found found, FindLast());
  PersistRequest request;
  request.ranks = {{&buffers_[static_cast<size_t>(found.buffer)], found.turn, &assignment_, {}}};
  request.run_id = run_;
  request.generation = 1;
  request.step = step_;
  request.plan = std::string(64, '0');
  request.committer = "bench";
  request.retention.keep_last = 1;
  request.parent = parent_;
  OUTLAST_ASSIGN_OR_RETURN(PersistResult result, Persist(root, request));
  parent_ = result.checkpoint;
  return result;
}

absl::StatusOr<double> Rank::RestoreFromDisk(const std::string& folder) {
  const int64_t started = MonotonicNanos();
  OUTLAST_ASSIGN_OR_RETURN(const auto reader, CheckpointReader::Open(folder));
  OUTLAST_RETURN_IF_ERROR(reader->ReadState(view_).status());
  return SecondsSince(started);
}

absl::StatusOr<std::unique_ptr<Root>> OpenRoot(const std::string& folder, const Id128& run) {
  RootOptions options;
  options.run = run;
  OUTLAST_ASSIGN_OR_RETURN(auto root, Root::Open(folder, options));
  OUTLAST_RETURN_IF_ERROR(root->TakeClaim());
  return root;
}

OneProcessor::OneProcessor() {
  sched_getaffinity(0, sizeof before_, &before_);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  sched_setaffinity(0, sizeof one, &one);
}

OneProcessor::~OneProcessor() { sched_setaffinity(0, sizeof before_, &before_); }

double ProcessorSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::optional<double> FioWrite(const std::string& folder, size_t bytes) {
  const std::string file = folder + "/fio.data";
  const auto job = RunFio(folder, {"--rw=write", "--filename=" + file,
                                   fmt::format("--size={}", bytes), "--end_fsync=1"});
  std::filesystem::remove(file);
  if (job.is_null()) return std::nullopt;
  const double write_s = job["write"]["runtime"].get<double>() / 1e3;
  const double sync_s =
      job.contains("sync") ? job["sync"]["lat_ns"]["mean"].get<double>() / 1e9 : 0.0;
  if (write_s <= 0) return std::nullopt;
  return job["write"]["io_bytes"].get<double>() / 1e9 / (write_s + sync_s);
}

std::optional<double> FioRead(const std::string& folder, const std::string& file) {
  const auto job = RunFio(folder, {"--rw=read", "--filename=" + file, "--readonly"});
  if (job.is_null()) return std::nullopt;
  const double read_s = job["read"]["runtime"].get<double>() / 1e3;
  if (read_s <= 0) return std::nullopt;
  return job["read"]["io_bytes"].get<double>() / 1e9 / read_s;
}

void ForgetPages(const std::string& folder) {
  sync();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const UniqueFd fd(open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

}  // namespace outlast::bench
