#include "outlast/run/collectives.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/blackbox/flight_log.h"
#include "run/generation_store.h"
#include "run/run_state.h"
#include "run/shared_barrier.h"
#include "run/shared_memory.h"

namespace outlast {
namespace {

enum class Function : uint8_t { kBarrier = 1, kAllReduce = 2, kBroadcast = 3 };

constexpr uint8_t kFloat32 = 7;  // as NCCL numbers its data types
constexpr uint8_t kBytes = 0;
constexpr uint8_t kSum = 0;
constexpr uint8_t kKnown =
    kKnowsFunction | kKnowsDatatype | kKnowsReduction | kKnowsRoot | kKnowsCount;
constexpr size_t kBlockFloats =
    16 << 10;                     // 64 KiB of each rank: what a core sums at once lies in its cache
constexpr size_t kMaxRanks = 60;  // one line each, in one page
constexpr size_t kMaxGroupBytes = size_t{1} << 40;  // keeps sums of sizes from wrapping

// What a rank calls. Two of each, by the operation's parity: a fast rank writes its next call while
// slow ones still compare.
struct alignas(64) CallLine {
  uint64_t signature[2];
  uint32_t function[2];
};

// The first page of the memory; then `world` slots for what the ranks bring, and one for the
// result.
struct Control {
  SharedBarrier barrier;
  alignas(64) std::atomic<uint32_t> next_block;
  CallLine calls[kMaxRanks];
};
static_assert(sizeof(Control) <= kCleanBytes);

std::string_view FunctionName(uint32_t function) {
  switch (static_cast<Function>(function)) {
    case Function::kBarrier:
      return "Barrier";
    case Function::kAllReduce:
      return "AllReduceSum";
    case Function::kBroadcast:
      return "Broadcast";
  }
  return "nothing";
}

int64_t DeadlineNanos(absl::Duration timeout) {
  if (timeout == absl::InfiniteDuration()) return std::numeric_limits<int64_t>::max();
  return MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
}

}  // namespace

class ShmGroup::Impl {
 public:
  Impl(Generation& generation, Run& run, std::string name, size_t max_bytes, Mapping memory,
       CommCell cell)
      : generation_(generation),
        run_(run),
        name_(std::move(name)),
        max_bytes_(max_bytes),
        memory_(std::make_shared<Mapping>(std::move(memory))),
        cell_(std::move(cell)),
        barrier_(&control().barrier, static_cast<uint32_t>(generation.rank()),
                 static_cast<uint32_t>(generation.world())) {
    // The callback keeps the memory: it may run when the group is gone.
    generation.OnAbort([memory = memory_, member = barrier_]() mutable { member.Break(); });
  }

  absl::Status AllReduce(std::span<float> data, const CollectiveOptions& options);
  absl::Status Barrier(const CollectiveOptions& options);
  absl::Status Broadcast(std::span<std::byte> data, int root, const CollectiveOptions& options);

 private:
  // A collective from its call to its end, as the black box shows it.
  absl::Status Operate(const OperationSignature& operation, size_t bytes,
                       const CollectiveOptions& options, const std::function<absl::Status()>& body);
  absl::Status Meet();
  // Meet for the first time in a call, and see that all called the same.
  absl::Status MeetForTheSame();
  absl::Status CompareCalls() const;
  void SumBlocks(size_t count);

  Control& control() const { return *reinterpret_cast<Control*>(memory_->data()); }
  std::byte* slot(int index) const {
    return memory_->data() + kCleanBytes + static_cast<size_t>(index) * max_bytes_;
  }
  std::byte* result() const { return slot(generation_.world()); }

  Generation& generation_;
  Run& run_;
  const std::string name_;
  const size_t max_bytes_;  // a multiple of 64
  const std::shared_ptr<Mapping> memory_;
  CommCell cell_;
  BarrierMember barrier_;
  uint64_t calls_ = 0;
  int64_t deadline_ns_ = 0;  // of the present call
};

absl::Status ShmGroup::Impl::Operate(const OperationSignature& operation, size_t bytes,
                                     const CollectiveOptions& options,
                                     const std::function<absl::Status()>& body) {
  const std::string_view what = FunctionName(operation.function);
  if (bytes > max_bytes_) {
    return Error(absl::StatusCode::kInvalidArgument, "{} '{}': {} bytes, the group was made for {}",
                 what, name_, bytes, max_bytes_);
  }
  OUTLAST_RETURN_IF_ERROR(generation_.Check());
  OUTLAST_RETURN_IF_ERROR(Annotate(barrier_.CheckWhole(), fmt::format("{} '{}'", what, name_)));
  const SectionScope section = run_.Section(what, {.phase = Phase::kCommWait});
  const uint64_t seq = cell_.Enter(operation, static_cast<uint64_t>(MonotonicNanos()));
  cell_.SetLaunched(seq, static_cast<uint64_t>(MonotonicNanos()));
  CallLine& call = control().calls[generation_.rank()];
  call.signature[++calls_ % 2] = Signature(operation);
  call.function[calls_ % 2] = operation.function;
  deadline_ns_ = DeadlineNanos(options.timeout);

  absl::Status done = body();
  const auto now_ns = static_cast<uint64_t>(MonotonicNanos());
  if (done.ok()) {
    cell_.SetDone(seq, now_ns);
    return done;
  }
  cell_.SetState(generation_.is_aborted() ? CommState::kAborted : CommState::kFailed, now_ns);
  if (absl::IsDeadlineExceeded(done)) {
    return Error(done.code(), "{} '{}' of generation {}: not all {} ranks came within {}", what,
                 name_, generation_.number(), generation_.world(),
                 absl::FormatDuration(options.timeout));
  }
  return absl::IsAborted(done) ? done : Annotate(done, fmt::format("{} '{}'", what, name_));
}

absl::Status ShmGroup::Impl::Meet() {
  return barrier_.Wait(
      deadline_ns_, [this] { return generation_.Check(); },
      [this] { control().next_block.store(0); });
}

absl::Status ShmGroup::Impl::MeetForTheSame() {
  OUTLAST_RETURN_IF_ERROR(Meet());
  cell_.SetStarted(cell_.api_seq(), static_cast<uint64_t>(MonotonicNanos()));
  return CompareCalls();
}

// Every rank compares what all have called, so all come to the same answer.
absl::Status ShmGroup::Impl::CompareCalls() const {
  const CallLine& mine = control().calls[generation_.rank()];
  for (int peer = 0; peer < generation_.world(); ++peer) {
    const CallLine& theirs = control().calls[peer];
    if (theirs.signature[calls_ % 2] == mine.signature[calls_ % 2]) continue;
    const bool same_function = theirs.function[calls_ % 2] == mine.function[calls_ % 2];
    return Error(absl::StatusCode::kInvalidArgument,
                 "call {}: rank {} called {}{}, this rank {} called {}", calls_, peer,
                 FunctionName(theirs.function[calls_ % 2]),
                 same_function ? " with another size or root" : "", generation_.rank(),
                 FunctionName(mine.function[calls_ % 2]));
  }
  return absl::OkStatus();
}

absl::Status ShmGroup::Impl::Barrier(const CollectiveOptions& options) {
  const OperationSignature operation{.function = static_cast<uint8_t>(Function::kBarrier),
                                     .known = kKnown};
  return Operate(operation, 0, options, [this] { return MeetForTheSame(); });
}

absl::Status ShmGroup::Impl::AllReduce(std::span<float> data, const CollectiveOptions& options) {
  const OperationSignature operation{.function = static_cast<uint8_t>(Function::kAllReduce),
                                     .datatype = kFloat32,
                                     .reduction = kSum,
                                     .known = kKnown,
                                     .count = data.size()};
  return Operate(operation, data.size_bytes(), options, [&]() -> absl::Status {
    if (!data.empty()) std::memcpy(slot(generation_.rank()), data.data(), data.size_bytes());
    OUTLAST_RETURN_IF_ERROR(MeetForTheSame());
    SumBlocks(data.size());
    OUTLAST_RETURN_IF_ERROR(Meet());
    if (!data.empty()) std::memcpy(data.data(), result(), data.size_bytes());
    return absl::OkStatus();
  });
}

// Whoever has time takes the next block: with fewer cores than ranks, nobody waits for a rank that
// does not run. Who sums a block does not change the sum.
void ShmGroup::Impl::SumBlocks(size_t count) {
  const size_t blocks = (count + kBlockFloats - 1) / kBlockFloats;
  const int world = generation_.world();
  for (size_t block = control().next_block.fetch_add(1); block < blocks;
       block = control().next_block.fetch_add(1)) {
    const size_t first = block * kBlockFloats;
    const size_t floats = std::min(kBlockFloats, count - first);
    float* sum = reinterpret_cast<float*>(result()) + first;
    std::memcpy(sum, reinterpret_cast<const float*>(slot(0)) + first, floats * sizeof(float));
    for (int rank = 1; rank < world; ++rank) {
      const float* part = reinterpret_cast<const float*>(slot(rank)) + first;
      for (size_t i = 0; i < floats; ++i) sum[i] += part[i];
    }
  }
}

absl::Status ShmGroup::Impl::Broadcast(std::span<std::byte> data, int root,
                                       const CollectiveOptions& options) {
  if (root < 0 || root >= generation_.world()) {
    return Error(absl::StatusCode::kInvalidArgument, "Broadcast '{}': root {} of {} ranks", name_,
                 root, generation_.world());
  }
  const OperationSignature operation{.function = static_cast<uint8_t>(Function::kBroadcast),
                                     .datatype = kBytes,
                                     .known = kKnown,
                                     .root = root,
                                     .count = data.size()};
  const bool is_root = generation_.rank() == root;
  return Operate(operation, data.size(), options, [&]() -> absl::Status {
    if (is_root && !data.empty()) std::memcpy(slot(root), data.data(), data.size());
    OUTLAST_RETURN_IF_ERROR(MeetForTheSame());
    if (!is_root && !data.empty()) std::memcpy(data.data(), slot(root), data.size());
    return Meet();  // the root's next call overwrites its slot
  });
}

absl::StatusOr<ShmGroup> ShmGroup::Make(Generation& generation, Run& run, std::string_view name,
                                        size_t max_bytes) {
  const auto world = static_cast<size_t>(generation.world());
  if (world > kMaxRanks) {
    return Error(absl::StatusCode::kInvalidArgument, "group '{}': {} ranks, at most {} wanted",
                 name, world, kMaxRanks);
  }
  if (max_bytes > kMaxGroupBytes) {
    return Error(absl::StatusCode::kInvalidArgument, "group '{}': {} bytes, at most {} wanted",
                 name, max_bytes, kMaxGroupBytes);
  }
  const size_t slot_bytes = (max_bytes + 63) / 64 * 64;
  const size_t bytes = kCleanBytes + (world + 1) * slot_bytes;
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd fd,
                           AskForMemory(run.link(), fmt::format("group/{}", name), bytes,
                                        SharedScope::kGenerationDirty, generation.number()));
  OUTLAST_ASSIGN_OR_RETURN(Mapping memory, Mapping::Shared(fd.get(), bytes));
  madvise(memory.data(), bytes,
          MADV_POPULATE_WRITE);  // the pages are there; mapping them one fault at a time costs more
  std::vector<uint32_t> members(world);
  std::iota(members.begin(), members.end(), 0u);
  CommInfo info;
  info.id_hash = std::max<uint64_t>(1, Fnv1a64(name));
  info.my_rank = static_cast<uint32_t>(generation.rank());
  info.members = members;
  info.kind = CommKind::kData;
  info.name = name;
  OUTLAST_ASSIGN_OR_RETURN(CommCell cell, CommCell::Open(run.black_box(), info));
  cell.SetProgressIsKnown();
  cell.SetState(CommState::kReady, static_cast<uint64_t>(MonotonicNanos()));
  return ShmGroup(std::make_unique<Impl>(generation, run, std::string(name), slot_bytes,
                                         std::move(memory), std::move(cell)));
}

ShmGroup::ShmGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ShmGroup::ShmGroup(ShmGroup&&) noexcept = default;
ShmGroup::~ShmGroup() = default;

absl::Status ShmGroup::AllReduceSum(std::span<float> data, const CollectiveOptions& options) {
  return impl_->AllReduce(data, options);
}
absl::Status ShmGroup::Barrier(const CollectiveOptions& options) { return impl_->Barrier(options); }
absl::Status ShmGroup::Broadcast(std::span<std::byte> data, int root,
                                 const CollectiveOptions& options) {
  return impl_->Broadcast(data, root, options);
}

}  // namespace outlast
