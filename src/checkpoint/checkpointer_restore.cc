#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "checkpoint/checkpointer_impl.h"
#include "checkpoint/remote_reads.h"
#include "run/link.h"

namespace outlast {
namespace {

constexpr absl::Duration kChooseTimeout = absl::Seconds(60);
constexpr absl::Duration kVoteTimeout = absl::Seconds(150);

// The share of a restore that a rank reads, in its buffer.
std::vector<Region> RegionsOf(const Assignment& share, const Buffer& buffer) {
  std::vector<Region> regions;
  const auto add = [&](const PlannedItem& item, std::span<std::byte> part, uint64_t begin) {
    regions.push_back({item.box.name, item.box.dtype, item.box.global, item.box.offset,
                       item.box.extent, part.subspan(begin, item.box.end - item.box.begin)});
  };
  for (const PlannedItem& item : share.image)
    add(item, buffer.image(), share.header.size() + item.box.begin);
  for (const PlannedItem& item : share.replicated) add(item, buffer.replicated(), item.box.begin);
  return regions;
}

}  // namespace

absl::StatusOr<int64_t> Checkpointer::Impl::Restore(const StateView& state,
                                                    const RestoreOptions& options) {
  SectionScope section = run_.Section("restore", {.phase = Phase::kRestore});
  if (snapshotter_ != nullptr) snapshotter_->GiveUp();  // nothing of an aborted step is sealed
  OUTLAST_RETURN_IF_ERROR(EnsureBuffers(state));
  KeepRegions(state);
  absl::Duration choose_timeout = kChooseTimeout;
  if (!options_.remote.uri.empty()) choose_timeout += kOpenRemoteTimeout;
  // Of several nodes, the choice may come with what another one's agent has of this rank.
  choose_timeout += absl::Seconds(static_cast<double>(StateBytes(state)) / 50e6);
  for (uint32_t attempt = 0;; ++attempt) {
    OUTLAST_ASSIGN_OR_RETURN(
        const Message chosen,
        run_.link().Call(MessageKind::kChoose, run_.generation(),
                         PayloadWriter().Int(attempt).bytes(), choose_timeout));
    OUTLAST_ASSIGN_OR_RETURN(const RestoreChoice choice, RestoreChoice::Decode(chosen.payload));
    const absl::Status status = RestoreFrom(attempt, chosen, choice, state, options);
    const bool mismatch = status.code() == absl::StatusCode::kInvalidArgument;
    const std::string vote = PayloadWriter()
                                 .Int(attempt)
                                 .Int(static_cast<uint8_t>(status.ok()))
                                 .Int(static_cast<uint8_t>(mismatch))
                                 .Text(absl::IsCancelled(status) ? "" : MessageOf(status))
                                 .bytes();
    const auto counted = run_.link().Call(MessageKind::kVote, run_.generation(), vote,
                                          kVoteTimeout + ReadLimit(choice.source, state));
    share_.reset();  // all have voted, so nobody looks into it any more
    OUTLAST_RETURN_IF_ERROR(counted.status());
    if (mismatch) return status;
    if (PayloadReader(counted->payload).Int<uint8_t>() == 0) continue;
    updates_are_announced_ = false;
    state_step_ = choice.step;
    return choice.step;
  }
}

absl::Status Checkpointer::Impl::RestoreFrom(uint32_t attempt, const Message& chosen,
                                             const RestoreChoice& choice, const StateView& state,
                                             const RestoreOptions& options) {
  std::string source;
  saved_extras_.clear();
  report_ = {};
  if (choice.is_of_memory()) {
    const Live wanted{choice.generation, choice.step};
    const bool is_live = live_ == wanted;
    const bool was_brought_back = std::exchange(ahead_, std::nullopt) == wanted;
    const bool is_served = choice.served_by != RestoreChoice::kNobody;
    live_.reset();
    if (is_served) {
      OUTLAST_RETURN_IF_ERROR(RestoreFromReplica(chosen, choice, state));
    } else if (!was_brought_back) {
      OUTLAST_RETURN_IF_ERROR(
          snapshotter_->Restore(static_cast<int>(choice.buffer), choice.turn, state,
                                is_live ? Belief::kUntouched : Belief::kNothing));
    }
    OUTLAST_ASSIGN_OR_RETURN(extras_, snapshotter_->ReadExtras(static_cast<int>(choice.buffer)));
    live_ = wanted;
    source = is_served                               ? "replica"
             : is_live                               ? "live"
             : choice.source == RestoreSource::kPeer ? "peer"
                                                     : "memory";
  } else {
    live_ = ahead_ = std::nullopt;
    extras_.clear();
    if (choice.is_of_files()) {
      OUTLAST_RETURN_IF_ERROR(RestoreFromFiles(attempt, chosen, choice, state, options));
      source = choice.source == RestoreSource::kRemote ? "remote" : "disk";
    }
  }
  tally_->Change([&](CheckpointStats& stats) {
    stats.restored_from = source;
    // A save of a later step was of a history that is given up.
    stats.durable_step =
        choice.is_of_files() ? choice.step : std::min(stats.durable_step, choice.step);
  });
  return absl::OkStatus();
}

absl::Status Checkpointer::Impl::RestoreFromReplica(const Message& chosen,
                                                    const RestoreChoice& choice,
                                                    const StateView& state) const {
  if (chosen.fds.size() != 1)
    return Error(absl::StatusCode::kInternal, "choice of a replica: {} descriptors, 1 wanted",
                 chosen.fds.size());
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, Duplicate(chosen.fds[0].get()));
  OUTLAST_ASSIGN_OR_RETURN(const Buffer buffer, Buffer::Open(std::move(fd)));
  OUTLAST_ASSIGN_OR_RETURN(const JobPlan job, ReadJobPlan());
  OUTLAST_ASSIGN_OR_RETURN(const Assignment own,
                           AssignmentOf(job.plan, static_cast<uint32_t>(run_.rank())));
  OUTLAST_ASSIGN_OR_RETURN(const Assignment theirs, AssignmentOf(job.plan, choice.served_by));
  OUTLAST_ASSIGN_OR_RETURN(const CopyPlan plan,
                           MakeReplicaPlan(own, theirs, buffer.layout(), state));
  OUTLAST_ASSIGN_OR_RETURN(const Buffer::Sealed sealed,
                           buffer.ReadSealed(run_.run_id(), BootId(), theirs.layout_hash));
  if (sealed.turn != choice.served_turn) {
    return Error(absl::StatusCode::kDataLoss, "snapshot of rank {}: turn {}, wanted {}",
                 choice.served_by, sealed.turn, choice.served_turn);
  }
  OUTLAST_RETURN_IF_ERROR(CopyBack(buffer, plan, choice.step, state, Belief::kNothing));
  // What is on its way to disk, or is saved when the job ends now, is this rank's own buffer.
  return snapshotter_->Mend(static_cast<int>(choice.buffer), choice.turn, state);
}

// On the trainer's thread, between two bodies. What fails here fails again, and is told, when the
// body asks.
void Checkpointer::Impl::RestoreAhead(const Message& message) {
  const auto choice = RestoreChoice::Decode(message.payload);
  if (!choice.ok() || snapshotter_ == nullptr || state_.regions.empty()) return;
  const Live wanted{choice->generation, choice->step};
  const auto belief = live_ == wanted ? Belief::kUntouched : Belief::kNothing;
  SectionScope section = run_.Section("restore", {.phase = Phase::kRestore});
  snapshotter_->GiveUp();
  const absl::Status restored =
      snapshotter_->Restore(static_cast<int>(choice->buffer), choice->turn, state_, belief);
  if (belief == Belief::kNothing) live_.reset();
  if (restored.ok()) ahead_ = wanted;
}

void Checkpointer::Impl::KeepRegions(const StateView& state) {
  if (!options_.restore_ahead || HasMemoryOf(state)) return;
  ahead_.reset();  // it was brought back into other memory
  state_.regions = state.regions;
}

bool Checkpointer::Impl::HasMemoryOf(const StateView& state) const {
  return std::ranges::equal(state.regions, state_.regions, [](const Region& a, const Region& b) {
    return a.bytes.data() == b.bytes.data();
  });
}

absl::StatusOr<Message> Checkpointer::Impl::Gather(uint32_t attempt, Share share,
                                                   absl::Duration timeout) {
  const auto buffer = static_cast<uint32_t>(share_ ? share_->index() : 0);
  return run_.link().Call(MessageKind::kGather, run_.generation(),
                          PayloadWriter().Int(attempt).Int(share).Int(buffer).bytes(), timeout);
}

// Each byte is read by one rank of the node, into a free buffer of its own; the others copy it from
// there. False: nothing is shared, or somebody has no free buffer. The error's message is empty
// where a mate could not read its share: that one tells why.
absl::StatusOr<bool> Checkpointer::Impl::ReadTogether(uint32_t attempt, const RestoreChoice& choice,
                                                      const CheckpointReader& reader,
                                                      const StateView& state, Widening widening) {
  if (choice.mates.size() < 2) return false;
  OUTLAST_ASSIGN_OR_RETURN(const JobPlan job, ReadJobPlan());
  std::vector<Assignment> assignments;
  for (const uint32_t rank : choice.mates) {
    OUTLAST_ASSIGN_OR_RETURN(Assignment assignment, AssignmentOf(job.plan, rank));
    assignments.push_back(std::move(assignment));
  }
  if (std::ranges::all_of(assignments, [](const Assignment& a) { return a.replicated.empty(); }))
    return false;
  const auto self = std::ranges::find(choice.mates, static_cast<uint32_t>(run_.rank()));
  if (self == choice.mates.end())
    return Error(absl::StatusCode::kInternal, "rank {} restores with others", run_.rank());
  const auto own = static_cast<size_t>(self - choice.mates.begin());
  const std::vector<Assignment> shares = SharesOfNode(assignments);
  share_ = snapshotter_->Borrow();
  absl::Status read = absl::OkStatus();
  if (share_) {
    read = reader.ReadRegions(RegionsOf(shares[own], share_->buffer()), IoMode::kDirect, widening);
  }
  // A share that cannot be a state is no damage: each then reads its own.
  const bool cannot = !share_ || absl::IsInvalidArgument(read);
  const Share share = cannot ? Share::kCannot : read.ok() ? Share::kReady : Share::kFailed;
  OUTLAST_ASSIGN_OR_RETURN(const Message gathered,
                           Gather(attempt, share, kVoteTimeout + ReadLimit(choice.source, state)));
  const auto all = PayloadReader(gathered.payload).Int<Share>();
  if (all == Share::kCannot) return false;
  OUTLAST_RETURN_IF_ERROR(read);
  if (all != Share::kReady) return MakeStatus(absl::StatusCode::kUnavailable, "");
  if (gathered.fds.size() != shares.size())
    return Error(absl::StatusCode::kInternal, "shares of a restore: {} descriptors, {} wanted",
                 gathered.fds.size(), shares.size());
  for (size_t mate = 0; mate < shares.size(); ++mate) {
    OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, Duplicate(gathered.fds[mate].get()));
    OUTLAST_ASSIGN_OR_RETURN(const Buffer buffer, Buffer::Open(std::move(fd)));
    OUTLAST_ASSIGN_OR_RETURN(const CopyPlan plan,
                             MakeSharePlan(assignments[own], shares[mate], buffer.layout(), state));
    CopyOut(buffer, plan, state);
  }
  return true;
}

// What the slowest rank may take to read.
absl::Duration Checkpointer::Impl::ReadLimit(RestoreSource source, const StateView& state) const {
  const auto bytes = static_cast<double>(StateBytes(state));
  if (source != RestoreSource::kRemote) return absl::Seconds(bytes / 50e6);
  return kOpenRemoteTimeout + absl::Seconds(bytes * run_.world() / 5e6);
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> Checkpointer::Impl::OpenChosen(
    uint32_t attempt, const Message& chosen, const RestoreChoice& choice, const StateView& state) {
  if (choice.source != RestoreSource::kRemote) return CheckpointReader::Open(choice.folder);
  if (!choice.error.empty()) return MakeStatus(absl::StatusCode::kUnavailable, choice.error);
  if (chosen.fds.size() != 2) {
    return Error(absl::StatusCode::kInternal,
                 "choice of a remote checkpoint: {} descriptors, 2 wanted", chosen.fds.size());
  }
  const RangeLink ranges(run_.link(), run_.generation(), attempt,
                         ReadLimit(RestoreSource::kRemote, state));
  return ranges.OpenReader(choice.folder, chosen.fds[0].get(), chosen.fds[1].get());
}

absl::Status Checkpointer::Impl::RestoreFromFiles(uint32_t attempt, const Message& chosen,
                                                  const RestoreChoice& choice,
                                                  const StateView& state,
                                                  const RestoreOptions& options) {
  const auto opened = OpenChosen(attempt, chosen, choice, state);
  // Whatever is wrong with it is damage to this job: another source may be whole.
  if (absl::IsInvalidArgument(opened.status()))
    return MakeStatus(absl::StatusCode::kDataLoss, MessageOf(opened.status()));
  OUTLAST_RETURN_IF_ERROR(opened.status());
  const std::unique_ptr<CheckpointReader>& reader = *opened;
  // Every rank compares what all of them expect: so all come to the same end, before any byte of
  // any state is changed.
  std::vector<WantedTensor> wanted;
  wanted.reserve(job_rows_.size());
  for (const TensorRow& row : job_rows_) wanted.push_back({row.name, row.dtype, row.global});
  MatchReport report = reader->Match(wanted, options.widening);
  if (options.strictness == Strictness::kStrict)
    OUTLAST_RETURN_IF_ERROR(report.ToStatus(reader->manifest().checkpoint));
  bool is_read = false;
  if (run_.world() > 1 && report.missing.empty() && report.mismatched.empty()) {
    OUTLAST_ASSIGN_OR_RETURN(is_read,
                             ReadTogether(attempt, choice, *reader, state, options.widening));
  }
  if (!is_read) {
    OUTLAST_RETURN_IF_ERROR(
        reader->ReadState(state, Strictness::kMatching, IoMode::kDirect, options.widening)
            .status());
  }
  tally_->Change([&](CheckpointStats& stats) {
    stats.restore_read_bytes = static_cast<int64_t>(reader->bytes_read());
  });
  report_ = std::move(report);
  const auto rank = static_cast<uint32_t>(run_.rank());
  const uint32_t world = reader->manifest().world;
  OUTLAST_ASSIGN_OR_RETURN(extras_, reader->ExtrasOf(rank < world ? rank : 0));
  if (world == static_cast<uint32_t>(run_.world())) return absl::OkStatus();
  for (const Receipt& receipt : reader->receipts()) saved_extras_.push_back(receipt.extra);
  return absl::OkStatus();
}

}  // namespace outlast
