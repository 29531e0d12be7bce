#include "outlast/run/collectives.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/blackbox/flight_log.h"
#include "run/chain_connect.h"
#include "run/chain_plan.h"
#include "run/generation_store.h"
#include "run/group_access.h"
#include "run/node_chain.h"
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
constexpr size_t kMaxRanks = 60;  // of a node: one line each, in one page
constexpr size_t kBytesOfManyLanes =
    1 << 20;  // below, the hops cost more than the bytes, and one lane does
// How long after a lost connection an abort may come: a node's beats, and the time in which it may
// come back.
constexpr absl::Duration kUnheardGrace = absl::Seconds(2);
constexpr absl::Duration kLossGrace = absl::Seconds(30);
constexpr size_t kMaxGroupBytes = size_t{1} << 40;  // keeps sums of sizes from wrapping

// What a rank calls. Two of each, by the operation's parity: a fast rank writes its next call while
// slow ones still compare.
struct alignas(64) CallLine {
  uint64_t signature[2];
  uint32_t function[2];
};

// The first page of the memory; then a slot for what each rank of the node brings, and one for the
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

// The ranks of a node meet in shared memory. Where there are other nodes, those that hold a lane of
// the chain carry sums between them while the others wait at the next barrier; what goes wrong
// there is left as a key of the generation, for all ranks of all nodes.
class Group::Impl {
 public:
  Impl(Generation& generation, Run& run, std::string name, size_t max_bytes, ChainPlan plan,
       Mapping memory, CommCell cell, std::shared_ptr<NodeChain> chain)
      : generation_(generation),
        run_(run),
        name_(std::move(name)),
        max_bytes_(max_bytes),
        plan_(std::move(plan)),
        memory_(std::make_shared<Mapping>(std::move(memory))),
        cell_(std::move(cell)),
        chain_(std::move(chain)),
        barrier_(&control().barrier, static_cast<uint32_t>(generation.rank()),
                 static_cast<uint32_t>(plan_.local_ranks.size())) {
    // The callback keeps what it breaks: it may run when the group is gone. A thread of its own
    // would cost every survivor more than what it does.
    RunAccess::State(run)->AddQuickAbortCallback(
        generation.number(), [memory = memory_, member = barrier_, chain = chain_]() mutable {
          member.Break();
          if (chain != nullptr) chain->Shutdown();
        });
  }
  ~Impl() {
    if (chain_ != nullptr) chain_->Finish();
  }

  absl::Status AllReduce(std::span<float> data, const CollectiveOptions& options);
  absl::Status Barrier(const CollectiveOptions& options);
  absl::Status Broadcast(std::span<std::byte> data, int root, const CollectiveOptions& options);

 private:
  // A collective from its call to its end, as the black box shows it.
  absl::Status Operate(const OperationSignature& operation, size_t bytes,
                       const CollectiveOptions& options, const std::function<absl::Status()>& body);
  absl::Status CheckUsable() const;
  absl::Status Meet();
  // Meet for the first time in a call, and see that all called the same. Between nodes, the first
  // `bytes` of the result are then the sum over all.
  absl::Status MeetForTheSame(size_t bytes);
  std::optional<ChainWord> CompareCalls() const;
  void SumBlocks(size_t count);

  // Between nodes.
  bool spans_nodes() const { return !plan_.is_one_node(); }
  // This rank's part of the bytes, its start and size; nullopt: it carries nothing in this call.
  std::optional<std::pair<size_t, size_t>> LaneOf(size_t bytes) const;
  absl::Status ReduceBetweenNodes(const std::optional<ChainWord>& differing, size_t bytes);
  absl::Status SpreadBetweenNodes(std::span<std::byte> bytes, int root);
  void AddStage(int number, size_t from, std::span<std::byte> sum) const;
  NodeChain::Wait ChainWait();
  // Ends the call for the others, and finds out why it failed.
  absl::Status Explain(const absl::Status& failed);
  std::string failure_key() const { return fmt::format("group/{}/failed", name_); }
  absl::Status DescribeDifference(const ChainWord& word) const;

  Control& control() const { return *reinterpret_cast<Control*>(memory_->data()); }
  // By the rank's index on this node.
  std::byte* slot(size_t index) const { return memory_->data() + kCleanBytes + index * max_bytes_; }
  std::byte* own_slot() const { return slot(static_cast<size_t>(plan_.local_index)); }
  std::byte* result() const { return slot(plan_.local_ranks.size()); }

  Generation& generation_;
  Run& run_;
  const std::string name_;
  const size_t max_bytes_;  // a multiple of 64
  const ChainPlan plan_;
  const std::shared_ptr<Mapping> memory_;
  CommCell cell_;
  const std::shared_ptr<NodeChain> chain_;  // null: this rank carries nothing between nodes
  BarrierMember barrier_;
  uint64_t calls_ = 0;
  int64_t deadline_ns_ = 0;  // of the present call
  bool has_failed_ = false;
};

absl::Status Group::Impl::Operate(const OperationSignature& operation, size_t bytes,
                                  const CollectiveOptions& options,
                                  const std::function<absl::Status()>& body) {
  const std::string_view what = FunctionName(operation.function);
  if (bytes > max_bytes_) {
    return Error(absl::StatusCode::kInvalidArgument, "{} '{}': {} bytes, the group was made for {}",
                 what, name_, bytes, max_bytes_);
  }
  OUTLAST_RETURN_IF_ERROR(generation_.Check());
  OUTLAST_RETURN_IF_ERROR(Annotate(CheckUsable(), fmt::format("{} '{}'", what, name_)));
  const SectionScope section = run_.Section(what, {.phase = Phase::kCommWait});
  const uint64_t seq = cell_.Enter(operation, static_cast<uint64_t>(MonotonicNanos()));
  cell_.SetLaunched(seq, static_cast<uint64_t>(MonotonicNanos()));
  CallLine& call = control().calls[plan_.local_index];
  call.signature[++calls_ % 2] = Signature(operation);
  call.function[calls_ % 2] = operation.function;
  deadline_ns_ = DeadlineNanos(options.timeout);

  absl::Status done = body();
  if (!done.ok() && spans_nodes()) done = Explain(done);
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

absl::Status Group::Impl::CheckUsable() const {
  if (!spans_nodes()) return barrier_.CheckWhole();
  if (!has_failed_ && barrier_.CheckWhole().ok()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "an operation failed earlier: the group cannot be used any more");
}

absl::Status Group::Impl::Meet() {
  return barrier_.Wait(
      deadline_ns_, [this] { return generation_.Check(); },
      [this] { control().next_block.store(0); });
}

absl::Status Group::Impl::MeetForTheSame(size_t bytes) {
  OUTLAST_RETURN_IF_ERROR(Meet());
  cell_.SetStarted(cell_.api_seq(), static_cast<uint64_t>(MonotonicNanos()));
  const std::optional<ChainWord> differing = CompareCalls();
  if (spans_nodes()) return ReduceBetweenNodes(differing, bytes);
  return differing ? DescribeDifference(*differing) : absl::OkStatus();
}

// Every rank compares what all have called, so all come to the same answer.
std::optional<ChainWord> Group::Impl::CompareCalls() const {
  const auto word_of = [&](size_t index, uint32_t* function, int32_t* rank) {
    *function = control().calls[index].function[calls_ % 2];
    *rank = plan_.local_ranks[index];
    return control().calls[index].signature[calls_ % 2];
  };
  ChainWord word{.differs = 1, .call = calls_};
  word.signature = word_of(static_cast<size_t>(plan_.local_index), &word.function, &word.rank);
  for (size_t peer = 0; peer < plan_.local_ranks.size(); ++peer) {
    word.other_signature = word_of(peer, &word.other_function, &word.other_rank);
    if (word.other_signature != word.signature) return word;
  }
  return std::nullopt;
}

absl::Status Group::Impl::DescribeDifference(const ChainWord& word) const {
  return Error(absl::StatusCode::kInvalidArgument,
               "call {}: rank {} called {}{}, rank {} called {}", word.call, word.other_rank,
               FunctionName(word.other_function),
               word.other_function == word.function ? " with another size or root" : "", word.rank,
               FunctionName(word.function));
}

absl::Status Group::Impl::Barrier(const CollectiveOptions& options) {
  const OperationSignature operation{.function = static_cast<uint8_t>(Function::kBarrier),
                                     .known = kKnown};
  return Operate(operation, 0, options, [this]() -> absl::Status {
    OUTLAST_RETURN_IF_ERROR(MeetForTheSame(0));
    return spans_nodes() ? Meet() : absl::OkStatus();
  });
}

absl::Status Group::Impl::AllReduce(std::span<float> data, const CollectiveOptions& options) {
  const OperationSignature operation{.function = static_cast<uint8_t>(Function::kAllReduce),
                                     .datatype = kFloat32,
                                     .reduction = kSum,
                                     .known = kKnown,
                                     .count = data.size()};
  return Operate(operation, data.size_bytes(), options, [&]() -> absl::Status {
    if (!data.empty()) std::memcpy(own_slot(), data.data(), data.size_bytes());
    OUTLAST_RETURN_IF_ERROR(MeetForTheSame(data.size_bytes()));
    if (!spans_nodes()) SumBlocks(data.size());
    OUTLAST_RETURN_IF_ERROR(Meet());
    if (!data.empty()) std::memcpy(data.data(), result(), data.size_bytes());
    return absl::OkStatus();
  });
}

// Whoever has time takes the next block: with fewer cores than ranks, nobody waits for a rank that
// does not run. Who sums a block does not change the sum.
void Group::Impl::SumBlocks(size_t count) {
  const size_t blocks = (count + kBlockFloats - 1) / kBlockFloats;
  for (size_t block = control().next_block.fetch_add(1); block < blocks;
       block = control().next_block.fetch_add(1)) {
    const size_t first = block * kBlockFloats;
    const size_t floats = std::min(kBlockFloats, count - first);
    AddStage(0, first * sizeof(float), {result() + first * sizeof(float), floats * sizeof(float)});
  }
}

// In blocks, so that what is added up stays in the cache.
void Group::Impl::AddStage(int number, size_t from, std::span<std::byte> sum) const {
  const Stage& stage = plan_.stages[static_cast<size_t>(number)];
  const auto first_slot = static_cast<size_t>(
      std::lower_bound(plan_.local_ranks.begin(), plan_.local_ranks.end(), stage.first_rank) -
      plan_.local_ranks.begin());
  const auto slots = static_cast<size_t>(stage.count);
  for (size_t done = 0; done < sum.size(); done += kBlockFloats * sizeof(float)) {
    const size_t bytes = std::min(kBlockFloats * sizeof(float), sum.size() - done);
    float* const total = reinterpret_cast<float*>(sum.data() + done);
    size_t at = 0;
    if (number == 0) std::memcpy(total, slot(first_slot + at++) + from + done, bytes);
    for (; at < slots; ++at) {
      const float* part = reinterpret_cast<const float*>(slot(first_slot + at) + from + done);
      for (size_t i = 0; i < bytes / sizeof(float); ++i) total[i] += part[i];
    }
  }
}

absl::Status Group::Impl::Broadcast(std::span<std::byte> data, int root,
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
  const auto local = std::find(plan_.local_ranks.begin(), plan_.local_ranks.end(), root);
  std::byte* const from = local == plan_.local_ranks.end()
                              ? result()
                              : slot(static_cast<size_t>(local - plan_.local_ranks.begin()));
  return Operate(operation, data.size(), options, [&]() -> absl::Status {
    if (is_root && !data.empty()) std::memcpy(from, data.data(), data.size());
    OUTLAST_RETURN_IF_ERROR(MeetForTheSame(0));
    if (spans_nodes()) OUTLAST_RETURN_IF_ERROR(SpreadBetweenNodes({from, data.size()}, root));
    if (!is_root && !data.empty()) std::memcpy(data.data(), from, data.size());
    return Meet();  // the next call overwrites what is copied here
  });
}

// --- Between nodes ---

std::optional<std::pair<size_t, size_t>> Group::Impl::LaneOf(size_t bytes) const {
  const auto lanes = static_cast<size_t>(bytes >= kBytesOfManyLanes ? plan_.lanes : 1);
  const auto lane = static_cast<size_t>(plan_.local_index);
  if (lane >= lanes) return std::nullopt;
  constexpr size_t kLine = 64;
  const size_t part = (bytes / lanes + kLine) / kLine * kLine;
  const size_t first = std::min(bytes, lane * part);
  return std::pair(first, std::min(bytes - first, part));
}

NodeChain::Wait Group::Impl::ChainWait() {
  return {.deadline_ns = deadline_ns_, .check = [this]() -> absl::Status {
            OUTLAST_RETURN_IF_ERROR(generation_.Check());
            return barrier_.CheckWhole();
          }};
}

absl::Status Group::Impl::ReduceBetweenNodes(const std::optional<ChainWord>& differing,
                                             size_t bytes) {
  const auto lane = LaneOf(bytes);
  if (!lane) return differing ? DescribeDifference(*differing) : absl::OkStatus();
  const CallLine& own = control().calls[plan_.local_index];
  ChainWord word{.call = calls_,
                 .signature = own.signature[calls_ % 2],
                 .rank = generation_.rank(),
                 .function = own.function[calls_ % 2]};
  if (differing) word = *differing;
  const auto add = [&](int stage, size_t from, std::span<std::byte> sum) {
    AddStage(stage, lane->first + from, sum);
  };
  const absl::Status reduced =
      chain_->Reduce(&word, {result() + lane->first, lane->second}, add, ChainWait());
  return absl::IsInvalidArgument(reduced) ? DescribeDifference(word) : reduced;
}

absl::Status Group::Impl::SpreadBetweenNodes(std::span<std::byte> bytes, int root) {
  if (const auto lane = LaneOf(bytes.size()); lane) {
    OUTLAST_RETURN_IF_ERROR(
        chain_->Spread(bytes.subspan(lane->first, lane->second), plan_.StageOf(root), ChainWait()));
  }
  return Meet();
}

absl::Status Group::Impl::Explain(const absl::Status& failed) {
  OUTLAST_RETURN_IF_ERROR(generation_.Check());
  has_failed_ = true;
  const bool gave_up = absl::IsDeadlineExceeded(failed);
  if (gave_up || absl::IsInvalidArgument(failed)) {
    const absl::StatusCode code =
        gave_up ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kInvalidArgument;
    const std::string text =
        gave_up ? fmt::format("rank {} gave up waiting: the group cannot be used any more",
                              generation_.rank())
                : std::string(MessageOf(failed));
    // Another rank may have told first. An agent that is gone tells nobody.
    (void)generation_.Put(failure_key(), fmt::format("{} {}", static_cast<int>(code), text));
  }
  barrier_.Break();
  if (chain_ != nullptr) chain_->Shutdown();
  if (gave_up || absl::IsInvalidArgument(failed)) return failed;

  // Who left, or why, is known in a moment: somebody's reason, or an abort. Of a lost node the
  // abort would have come while nothing was heard of it.
  const absl::Duration left = absl::Nanoseconds(deadline_ns_ - MonotonicNanos());
  const absl::Duration most =
      chain_ != nullptr && chain_->is_unheard() ? kUnheardGrace : kLossGrace;
  const auto reason = generation_.Get(failure_key(), std::clamp(left, absl::Seconds(1), most));
  if (reason.ok()) {
    const size_t space = std::min(reason->find(' '), reason->size());
    int code = 0;
    std::from_chars(reason->data(), reason->data() + space, code);
    return MakeStatus(static_cast<absl::StatusCode>(code),
                      std::string_view(*reason).substr(std::min(space + 1, reason->size())));
  }
  OUTLAST_RETURN_IF_ERROR(generation_.Check());
  return MakeStatus(absl::StatusCode::kUnavailable, MessageOf(failed));
}

// --- Making one ---

namespace {

absl::StatusOr<CommCell> OpenCell(Generation& generation, Run& run, std::string_view name) {
  std::vector<uint32_t> members(static_cast<size_t>(generation.world()));
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
  return cell;
}

absl::StatusOr<std::shared_ptr<NodeChain>> ConnectLane(Generation& generation,
                                                       const ChainPlan& plan, std::string_view name,
                                                       size_t max_bytes,
                                                       const std::string& address) {
  if (plan.is_one_node() || !plan.holds_a_lane()) return nullptr;
  auto stages = ConnectChain(generation, plan,
                             {.group = std::string(name),
                              .address = address,
                              .max_bytes = max_bytes,
                              .timeout = kConnect + kConnectARank * generation.world()});
  if (!stages.ok()) return Annotate(stages.status(), fmt::format("group '{}'", name));
  return std::make_shared<NodeChain>(std::move(*stages));
}

}  // namespace

absl::StatusOr<Group> Group::Make(Generation& generation, Run& run, std::string_view name,
                                  size_t max_bytes) {
  GroupPlace place{.address = RunAccess::State(run)->environment().address};
  for (int rank = 0; rank < generation.world(); ++rank) {
    const int node = generation.node_of(rank);
    if (node >= 0) place.node_of.push_back(node);
  }
  return GroupAccess::Make(generation, run, name, max_bytes, place);
}

absl::StatusOr<Group> GroupAccess::Make(Generation& generation, Run& run, std::string_view name,
                                        size_t max_bytes, const GroupPlace& place) {
  const auto world = static_cast<size_t>(generation.world());
  ChainPlan plan =
      PlanChain(place.node_of.size() == world ? place.node_of : std::vector<int>(world, 0),
                generation.rank());
  const size_t ranks = plan.local_ranks.size();
  if (ranks > kMaxRanks) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "group '{}': {} ranks on a node, at most {} wanted", name, ranks, kMaxRanks);
  }
  if (max_bytes > kMaxGroupBytes) {
    return Error(absl::StatusCode::kInvalidArgument, "group '{}': {} bytes, at most {} wanted",
                 name, max_bytes, kMaxGroupBytes);
  }
  const size_t slot_bytes = (max_bytes + 63) / 64 * 64;
  const size_t bytes = kCleanBytes + (ranks + 1) * slot_bytes;
  const std::string memory_name =
      plan.is_one_node() ? fmt::format("group/{}", name)
                         : fmt::format("group/{}/node/{}", name,
                                       plan.stages[static_cast<size_t>(plan.own_stages[0])].node);
  OUTLAST_ASSIGN_OR_RETURN(
      const UniqueFd fd, AskForMemory(run.link(), memory_name, bytes, SharedScope::kGenerationDirty,
                                      generation.number()));
  OUTLAST_ASSIGN_OR_RETURN(Mapping memory, Mapping::Shared(fd.get(), bytes));
  madvise(memory.data(), bytes,
          MADV_POPULATE_WRITE);  // the pages are there; mapping them one fault at a time costs more
  OUTLAST_ASSIGN_OR_RETURN(auto chain,
                           ConnectLane(generation, plan, name, slot_bytes, place.address));
  OUTLAST_ASSIGN_OR_RETURN(CommCell cell, OpenCell(generation, run, name));
  return Group(std::make_unique<Group::Impl>(generation, run, std::string(name), slot_bytes,
                                             std::move(plan), std::move(memory), std::move(cell),
                                             std::move(chain)));
}

Group::Group(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Group::Group(Group&&) noexcept = default;
Group::~Group() = default;

absl::Status Group::AllReduceSum(std::span<float> data, const CollectiveOptions& options) {
  return impl_->AllReduce(data, options);
}
absl::Status Group::Barrier(const CollectiveOptions& options) { return impl_->Barrier(options); }
absl::Status Group::Broadcast(std::span<std::byte> data, int root,
                              const CollectiveOptions& options) {
  return impl_->Broadcast(data, root, options);
}

}  // namespace outlast
