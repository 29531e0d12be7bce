// A restore from the remote root: the ranks of a node read what they need of one remote checkpoint,
// straight to where it belongs.
//
//   rank: CheckpointReader ── ReadRange{shard, bytes, place in the window} ──> agent: Blob::Get
//         checks, copies out <── answer ── the rank's window (shared memory) <──┘ puts them there
//
// The agent reads, and not the rank, since the agent alone has the store's plug-in and its
// credentials: a trainer links neither an HTTP client nor keys that a crash dump would show. What a
// rank wants is its own to find out (any world from any world), and it checks every chunk itself,
// so that memory which the agent filled is trusted no more than a disk. Manifest and receipts are
// read once a node and handed to all its ranks.
//
// Nothing is written to the local disk: a checkpoint that was restored from afar lies on the disk
// again with the next save.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/serial_thread.h"
#include "checkpoint/reader.h"
#include "checkpoint/remote_root.h"
#include "outlast/base/fd.h"
#include "outlast/base/memory.h"
#include "run/link.h"

namespace outlast {

// One range that a rank wants (MessageKind::kReadRange).
struct RangeWanted {
  uint32_t attempt = 0;  // of the restore
  uint32_t rank = 0;     // whose shard, in the saved world
  uint64_t offset = 0, bytes = 0;
  uint64_t at = 0;  // where to, from the window's start

  std::string Encode() const;
  static absl::StatusOr<RangeWanted> Decode(std::string_view payload);
};

// The agent's side. Calls come on one thread, but for Open; those that read run on threads of its
// own.
class RemoteReads {
 public:
  // Reads and checks manifest and receipts, and makes a window for each of `slots`. Blocks on the
  // store.
  static absl::StatusOr<std::shared_ptr<RemoteReads>> Open(std::shared_ptr<RemoteRoot> root,
                                                           const std::string& checkpoint,
                                                           int slots);
  // Ends as soon as the reads that are running hear of it. May block on the store.
  ~RemoteReads();

  int head_fd() const { return head_.get(); }
  int window_fd(int slot) const { return windows_[static_cast<size_t>(slot)].fd.get(); }

  // `done` is called on another thread, always. kInternal: the shard or the window has no
  // such bytes; kDataLoss, or the store's error.
  void Read(int slot, const RangeWanted& wanted, std::function<void(absl::Status)> done);
  // What is asked for ends with kCancelled.
  void Cancel() { is_cancelled_ = true; }
  // Of shards, from the store.
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  struct Window {
    UniqueFd fd;
    Mapping memory;
  };
  RemoteReads(std::shared_ptr<RemoteRoot> root, std::unique_ptr<CheckpointReader> reader)
      : root_(std::move(root)), reader_(std::move(reader)) {}
  absl::Status Fill(const Window& window, const RangeWanted& wanted);

  const std::shared_ptr<RemoteRoot> root_;
  const std::unique_ptr<CheckpointReader> reader_;
  UniqueFd head_;
  std::vector<Window> windows_;  // by slot
  std::atomic<bool> is_cancelled_{false};
  std::atomic<uint64_t> bytes_read_{0};
  size_t next_ = 0;
  std::vector<std::unique_ptr<SerialThread>> threads_;  // last: they use all of the above
};

// The rank's side.
class RangeLink {
 public:
  // `link` outlives what is made of it. Reads end at `limit` from now.
  RangeLink(Link& link, uint64_t generation, uint32_t attempt, absl::Duration limit);

  // Of the two descriptors that came with the choice; `place` for messages. kDataLoss,
  // kInvalidArgument: manifest or receipts are not whole.
  absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenReader(const std::string& place, int head,
                                                               int window) const;

 private:
  Link& link_;
  const uint64_t generation_;
  const uint32_t attempt_;
  const absl::Duration until_;
};

}  // namespace outlast
