#include "checkpoint/persist.h"

#include <utility>

#include "base/error.h"
#include "checkpoint/snapshotter.h"
#include "checkpoint/writer.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

absl::Status Closed(const SaveOrder& order, uint32_t rank) {
  return Error(absl::StatusCode::kAborted, "rank {} of {}: the save was aborted", rank,
               order.key.checkpoint);
}

}  // namespace

Receipt SaveOrder::ToReceipt() const {
  Receipt receipt;
  receipt.job = job;
  receipt.run = run;
  receipt.claim = claim;
  receipt.checkpoint = key.checkpoint;
  receipt.parent = parent;
  receipt.step = step;
  receipt.generation = snapshot_generation;
  receipt.world = world;
  receipt.plan = plan;
  receipt.hooks = hooks;
  return receipt;
}

SaveOrder OrderOf(const Root& root, const PersistRequest& request, std::string checkpoint) {
  SaveOrder order;
  order.key = {request.generation, std::move(checkpoint)};
  order.job = root.job();
  order.run = request.run_id;
  order.claim = root.claim();
  order.parent = request.parent;
  order.step = request.step;
  order.snapshot_generation = request.generation;
  order.world = static_cast<uint32_t>(request.ranks.size());
  order.plan = request.plan;
  order.hooks = NamesOf(request.hooks);
  return order;
}

absl::StatusOr<WrittenReceipt> WriteRank(const std::string& folder, const PersistRank& from,
                                         uint32_t rank, const SaveOrder& order,
                                         const RankWriting& how) {
  if (how.fence != nullptr && !how.fence->IsOpen(order.key)) return Closed(order, rank);
  WrittenReceipt written{order.ToReceipt(), {}};
  Receipt& receipt = written.receipt;
  OUTLAST_ASSIGN_OR_RETURN(
      const Buffer::Sealed sealed,
      from.buffer->ReadSealed(order.run, BootId(), from.assignment->layout_hash));
  if (sealed.turn != from.turn || sealed.header.step != receipt.step ||
      sealed.header.generation != receipt.generation) {
    return Error(
        absl::StatusCode::kInternal,
        "buffer of rank {}: holds step {} of generation {}, pinned for step {} of generation {}",
        rank, sealed.header.step, sealed.header.generation, receipt.step, receipt.generation);
  }
  OUTLAST_ASSIGN_OR_RETURN(const std::span<const std::byte> extra, from.buffer->ReadExtra(sealed));
  OUTLAST_ASSIGN_OR_RETURN(receipt.extra, ParseExtras(extra));
  receipt.rank = receipt.writer = rank;
  receipt.boot_id = BootId();
  receipt.tensors = SavedBoxesOf(*from.assignment);
  receipt.aliases = from.aliases;
  if (!from.assignment->image.empty()) {
    const uint32_t chunks = from.buffer->layout().image_chunk_count();
    ShardWriteOptions options;
    options.crcs = ShardWriteOptions::Crcs::kSample;
    options.sample = sealed.turn;
    options.limiter = how.limiter;
    options.progress = how.progress;
    OUTLAST_ASSIGN_OR_RETURN(receipt.file,
                             WriteShard(folder, rank, from.buffer->image(),
                                        from.buffer->chunk_crcs().first(chunks), options));
  }
  if (how.fence == nullptr) {
    OUTLAST_ASSIGN_OR_RETURN(written.entry, WriteReceipt(folder, receipt));
    return written;
  }
  const WriteFence::Permit permit = how.fence->Enter(order.key);
  if (!permit) return Closed(order, rank);
  OUTLAST_ASSIGN_OR_RETURN(written.entry, WriteReceipt(folder, receipt));
  return written;
}

HookShard ShardView(const std::string& folder, const PersistRank& from, uint32_t rank) {
  HookShard shard{rank, {}, {}};
  if (from.assignment->image.empty()) return shard;
  shard.path = folder + "/" + ShardName(rank);
  const auto data = std::as_bytes(from.buffer->image()).subspan(from.assignment->header.size());
  for (const PlannedItem& item : from.assignment->image) {
    const SafetensorsBox& box = item.box;
    shard.tensors.push_back({box.name, box.dtype, box.global, box.offset, box.extent,
                             data.subspan(box.begin, box.end - box.begin)});
  }
  return shard;
}

absl::StatusOr<std::vector<HookResult>> PassHooks(const Hooks& hooks, const HookView& view,
                                                  const std::string& checkpoint) {
  std::vector<HookResult> results;
  if (hooks.empty()) return results;
  results = AskHooks(hooks, view);
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToText(HooksRecord{checkpoint, results}));
  OUTLAST_RETURN_IF_ERROR(CreateWhole(view.folder, std::string(kHooksFile), text));
  OUTLAST_RETURN_IF_ERROR(JudgeHooks(results));
  return results;
}

absl::Status LinkCheckpoint(Root& root, Manifest manifest, ManifestParts parts) {
  manifest.hooks = std::move(parts.hooks);
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, root.List(Root::Look::kManifests));
  manifest.ancestors = root.AncestorsOf(manifest.parent, listing, parts.elsewhere);
  manifest.committed_by = std::move(parts.by);
  return root.Commit(manifest);
}

namespace {

// A save whose parts are all of one agent: what the machine asks for is done at once, on the
// caller's thread. Its deadlines are the caller's, who can at best stop waiting for the disk.
class LocalCommit {
 public:
  LocalCommit(Root& root, const PersistRequest& request) : root_(root), request_(request) {
    CommitPart part{request.committer, {}};
    for (uint32_t rank = 0; rank < request.ranks.size(); ++rank) part.ranks.push_back(rank);
    machine_.emplace(request.generation, request.step, std::vector{std::move(part)},
                     CommitLimits());
  }

  absl::StatusOr<PersistResult> Run() {
    Do(machine_->Start(absl::ZeroDuration()));
    if (machine_->phase() == CommitPhase::kCommitted) return std::move(result_);
    if (failure_.ok()) return machine_->reason();  // the machine's own: nothing failed here
    if (result_.checkpoint.empty())
      return Annotate(failure_, fmt::format("save of step {}", request_.step));
    return Annotate(failure_, fmt::format("save of step {} to {}", request_.step,
                                          root_.PathOf(result_.checkpoint)));
  }

 private:
  void Do(const std::vector<CommitAction>& actions) {
    for (const CommitAction& action : actions)
      std::visit([this](const auto& one) { Do(one); }, action);
  }
  void Step(const CommitEvent& event) { Do(machine_->Step(event, absl::ZeroDuration())); }
  absl::Status Failed(absl::Status why) { return failure_ = std::move(why); }

  void Do(const MakeSaveFolder&) {
    auto made = root_.NewCheckpoint(request_.step);
    if (!made.ok()) return Step(FolderRefused{Failed(made.status())});
    result_.checkpoint = *made;
    Step(FolderMade{*made});
  }
  void Do(const AnnounceSave& announce) {
    const SaveOrder order = OrderOf(root_, request_, announce.save.checkpoint);
    for (uint32_t rank = 0; rank < order.world; ++rank) {
      auto written =
          WriteRank(folder(), request_.ranks[rank], rank, order, {.limiter = request_.limiter});
      if (!written.ok()) {
        return Step(PartFailed{request_.committer, order.key, static_cast<int>(rank),
                               Failed(written.status())});
      }
      if (written->receipt.file) result_.bytes += written->receipt.file->bytes;
      receipts_.push_back(std::move(written->receipt));
      entries_.push_back(written->entry);
      Step(RankWritten{request_.committer, order.key, {rank, written->entry}});
    }
  }
  void Do(const AskSaveHooks&) {
    HookView view{folder(), request_.step, {}};
    for (uint32_t rank = 0; rank < request_.ranks.size() && !request_.hooks.empty(); ++rank)
      view.shards.push_back(ShardView(folder(), request_.ranks[rank], rank));
    auto passed = PassHooks(request_.hooks, view, result_.checkpoint);
    if (!passed.ok()) return Step(HooksAnswered{Failed(passed.status())});
    hooks_ = *std::move(passed);
    Step(HooksAnswered{});
  }
  void Do(const LinkManifest&) { Step(ManifestLinked{Failed(Link())}); }
  absl::Status Link() {
    OUTLAST_ASSIGN_OR_RETURN(
        Manifest manifest,
        root_.ComposeManifest(result_.checkpoint, std::move(receipts_), std::move(entries_)));
    return LinkCheckpoint(root_, std::move(manifest),
                          {std::move(hooks_),
                           {request_.committer, root_.claim(), request_.generation},
                           request_.elsewhere});
  }
  void Do(const TellOutcome&) {}
  void Do(const RemoveSaveFolder&) {
    // Whatever lies there without a manifest is invisible; a failing clean-up is left to the next
    // retention. Who has lost the root cleans nothing up: the new owner may have committed it.
    if (root_.CheckClaim().ok()) root_.Delete(result_.checkpoint).IgnoreError();
  }
  std::string folder() const { return root_.PathOf(result_.checkpoint); }

  Root& root_;
  const PersistRequest& request_;
  std::optional<Commit> machine_;
  PersistResult result_;
  absl::Status failure_;
  std::vector<Receipt> receipts_;
  std::vector<ReceiptEntry> entries_;
  std::vector<HookResult> hooks_;
};

}  // namespace

absl::StatusOr<PersistResult> Persist(Root& root, const PersistRequest& request) {
  const int64_t started = MonotonicNanos();
  auto result = LocalCommit(root, request).Run();
  if (result.ok()) result->write_time = absl::Nanoseconds(MonotonicNanos() - started);
  return result;
}

void Retire(Root& root, const PersistRequest& request, const PersistResult& committed,
            std::span<const std::string> in_use) {
  root.WriteLatest({committed.checkpoint, request.step}).IgnoreError();  // a hint
  root.Retain(request.retention, in_use).IgnoreError();
}

}  // namespace outlast
