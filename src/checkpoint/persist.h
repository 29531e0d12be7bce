// Turns one sealed snapshot of all ranks into a committed checkpoint on disk: by one agent that
// holds them all (Persist), or in the parts of which several agents do theirs (save_team.h).
//
// Departure from design/checkpoint.md, section 8: who writes saves is in the batch class at nice 5,
// which gives its I/O the level 5 of 7 of the best-effort class, not the idle class. Where the
// kernel's scheduler heeds classes, a trainer that never stops reading would hold an idle write up
// for ever, past the save's deadline; and a stop, a Finish and the next save wait for this one.
// Uploads (remote_tier.h), which nobody waits for but at a job's end, are in the idle class.
//
// Plain pwrite and pread, no io_uring. fio, O_DIRECT, 2 GiB, four passes in alternated order, one
// of two cores of a virtual machine (EPYC, ext4, virtio, mq-deadline) busy otherwise; medians in
// GB/s [range], writes of 8 MiB with their fsync, reads of 4 MiB:
//   write  psync 1.75 [1.56-2.13]   libaio 2 deep 1.75 [1.62-1.92]
//          io_uring 1, 2, 4 deep 1.71, 1.81, 1.88, 16 deep 2.01 [1.75-2.33]
//   read   psync 1.10 [1.01-1.17], two threads 1.12 [1.03-1.26]; io_uring 2, 4, 16 deep 1.08, 1.08,
//          1.06
// No gain for reads. For writes 16 deep is 15 % ahead in the median, with ranges that overlap; a
// save's own pwrites, from memory that is mapped already, gave 3.27 (checkpoint.persist, the same
// minutes). To be measured again on bare NVMe before anything is built on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/commit.h"
#include "checkpoint/hooks.h"
#include "checkpoint/plan.h"
#include "checkpoint/root.h"
#include "outlast/base/id.h"
#include "outlast/blackbox/buffer.h"
#include "store/rate_limit.h"

namespace outlast {

// One rank's snapshot: sealed in `turn`, and pinned for the call.
struct PersistRank {
  const Buffer* buffer = nullptr;
  uint32_t turn = 0;
  const Assignment* assignment = nullptr;
  std::vector<std::pair<std::string, std::string>> aliases;
};

struct PersistRequest {
  std::vector<PersistRank> ranks;  // by rank
  Id128 run_id;
  uint64_t generation = 0;
  int64_t step = 0;
  std::string plan;                    // 64 hex digits
  std::optional<std::string> parent;   // folder name
  std::string committer;               // who, for people
  std::vector<std::string> elsewhere;  // ancestors that stand in another tier
  RetentionOptions retention;
  RateLimiter* limiter = nullptr;  // of the shards' bytes; borrowed, null: none
  Hooks hooks;                     // asked before the commit
};

struct PersistResult {
  std::string checkpoint;  // folder name
  uint64_t bytes = 0;      // of all shards
  absl::Duration write_time;
};

// --- The parts

// What a save is, as all who write it must know it.
struct SaveOrder {
  SaveKey key;
  Id128 job, run;
  uint64_t claim = 0;
  std::optional<std::string> parent;
  int64_t step = 0;
  uint64_t snapshot_generation = 0;
  uint32_t world = 0;
  std::string plan;                // 64 hex digits
  std::vector<std::string> hooks;  // names

  Receipt ToReceipt() const;  // what the receipts of all ranks have in common
};
SaveOrder OrderOf(const Root& root, const PersistRequest& request, std::string checkpoint);

struct WrittenReceipt {
  Receipt receipt;
  ReceiptEntry entry;
};
// How a rank's part is written. Borrowed.
struct RankWriting {
  RateLimiter* limiter = nullptr;  // null: none
  WriteFence* fence = nullptr;     // asked before shard and receipt; null: none
  std::atomic<uint64_t>* progress = nullptr;
};
// Writes one rank's shard, then its receipt, durably. kAborted: the fence is closed. Else the
// errors of Persist. Blocks.
absl::StatusOr<WrittenReceipt> WriteRank(const std::string& folder, const PersistRank& from,
                                         uint32_t rank, const SaveOrder& order,
                                         const RankWriting& how);

// What the hooks are shown of a rank whose bytes are in memory.
HookShard ShardView(const std::string& folder, const PersistRank& from, uint32_t rank);
// Row 6 of the commit: what the hooks said stands in hooks.json before anybody acts on it. An error
// where one is not ok. Blocks.
absl::StatusOr<std::vector<HookResult>> PassHooks(const Hooks& hooks, const HookView& view,
                                                  const std::string& checkpoint);
// Row 7: puts together and links the manifest of a folder whose receipts are all there. Blocks.
struct ManifestParts {
  std::vector<HookResult> hooks;
  CommittedBy by;
  std::span<const std::string> elsewhere;
};
absl::Status LinkCheckpoint(Root& root, Manifest manifest, ManifestParts parts);

// --- By one agent

// Writes every shard and receipt, then commits. After an error nothing of the save is left, but for
// what the crash table of a killed process leaves. kDataLoss: a buffer's bytes do not match its
// table. kFailedPrecondition: a hook vetoed it, or failed; its name and note. kAborted: another run
// took the root. Else the disk's own. Blocks: the bytes at the disk's speed, a few syncs, and the
// hooks.
absl::StatusOr<PersistResult> Persist(Root& root, const PersistRequest& request);

// What follows a commit that went well, and is none of the save's: LATEST, and the end of old
// checkpoints. Apart from Persist, since deleting takes a slow disk long and nobody needs to wait
// for it. `request.ranks` is not looked at; `in_use` are spared.
void Retire(Root& root, const PersistRequest& request, const PersistResult& committed,
            std::span<const std::string> in_use = {});

}  // namespace outlast
