#include "checkpoint/persist.h"

#include <utility>

#include "base/error.h"
#include "checkpoint/snapshotter.h"
#include "checkpoint/writer.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

absl::StatusOr<Receipt> WriteRank(const std::string& folder, const PersistRank& from, uint32_t rank,
                                  Receipt receipt, const PersistRequest& request) {
  OUTLAST_ASSIGN_OR_RETURN(
      const Buffer::Sealed sealed,
      from.buffer->ReadSealed(request.run_id, BootId(), from.assignment->layout_hash));
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
    options.limiter = request.limiter;
    OUTLAST_ASSIGN_OR_RETURN(receipt.file,
                             WriteShard(folder, rank, from.buffer->image(),
                                        from.buffer->chunk_crcs().first(chunks), options));
  }
  return receipt;
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

// Row 6 of the commit: what the hooks said stands in the folder before anybody acts on it.
absl::StatusOr<std::vector<HookResult>> PassHooks(const std::string& folder,
                                                  const std::string& name,
                                                  const PersistRequest& request) {
  std::vector<HookResult> results;
  if (request.hooks.empty()) return results;
  HookView view{folder, request.step, {}};
  for (uint32_t rank = 0; rank < request.ranks.size(); ++rank)
    view.shards.push_back(ShardView(folder, request.ranks[rank], rank));
  results = AskHooks(request.hooks, view);
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToText(HooksRecord{name, results}));
  OUTLAST_RETURN_IF_ERROR(CreateWhole(folder, std::string(kHooksFile), text));
  OUTLAST_RETURN_IF_ERROR(JudgeHooks(results));
  return results;
}

absl::StatusOr<PersistResult> WriteAndCommit(Root& root, const PersistRequest& request,
                                             const std::string& name) {
  const std::string folder = root.PathOf(name);
  Receipt common;
  common.job = root.job();
  common.run = request.run_id;
  common.claim = root.claim();
  common.checkpoint = name;
  common.parent = request.parent;
  common.step = request.step;
  common.generation = request.generation;
  common.world = static_cast<uint32_t>(request.ranks.size());
  common.plan = request.plan;
  common.hooks = NamesOf(request.hooks);
  PersistResult result;
  result.checkpoint = name;
  std::vector<Receipt> receipts;
  std::vector<ReceiptEntry> entries;
  for (uint32_t rank = 0; rank < common.world; ++rank) {
    OUTLAST_ASSIGN_OR_RETURN(receipts.emplace_back(),
                             WriteRank(folder, request.ranks[rank], rank, common, request));
    OUTLAST_ASSIGN_OR_RETURN(entries.emplace_back(), WriteReceipt(folder, receipts.back()));
    if (receipts.back().file) result.bytes += receipts.back().file->bytes;
  }
  OUTLAST_ASSIGN_OR_RETURN(std::vector<HookResult> hooks, PassHooks(folder, name, request));
  OUTLAST_ASSIGN_OR_RETURN(Manifest manifest,
                           root.ComposeManifest(name, std::move(receipts), std::move(entries)));
  manifest.hooks = std::move(hooks);
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, root.List(Root::Look::kManifests));
  manifest.ancestors = root.AncestorsOf(request.parent, listing, request.elsewhere);
  manifest.committed_by = {request.committer, root.claim(), request.generation};
  OUTLAST_RETURN_IF_ERROR(root.Commit(manifest));
  return result;
}

}  // namespace

absl::StatusOr<PersistResult> Persist(Root& root, const PersistRequest& request) {
  const int64_t started = MonotonicNanos();
  const auto made = root.NewCheckpoint(request.step);
  if (!made.ok()) return Annotate(made.status(), fmt::format("save of step {}", request.step));
  const std::string& name = *made;
  auto result = WriteAndCommit(root, request, name);
  if (!result.ok()) {
    // Whatever lies there without a manifest is invisible; a failing clean-up is left to the next
    // retention. Who has lost the root cleans nothing up: the new owner may have committed it.
    if (root.CheckClaim().ok()) root.Delete(name).IgnoreError();
    return Annotate(result.status(),
                    fmt::format("save of step {} to {}", request.step, root.PathOf(name)));
  }
  result->write_time = absl::Nanoseconds(MonotonicNanos() - started);
  return result;
}

void Retire(Root& root, const PersistRequest& request, const PersistResult& committed,
            std::span<const std::string> in_use) {
  root.WriteLatest({committed.checkpoint, request.step}).IgnoreError();  // a hint
  root.Retain(request.retention, in_use).IgnoreError();
}

}  // namespace outlast
