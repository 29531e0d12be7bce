// What a checkpointer and the save service say to each other (run/wire.h kinds 32..63, and
// kSaveEvent). Version 1 of the wire. Fields by PayloadWriter.
//
//   kOpenRoot   Text options (JSON, OpenRequest) -> 16 B job id, u8 resume (0: start at step 0)
//   kBuffers    u32 part, u32 parts, Text bytes of the rank's table; the last part is answered:
//               u64 bytes of all tables, u32 buffers; descriptors: all ranks' tables, the seal
//               table, then this rank's buffers
//   kSealed     i64 step, u32 buffer, u32 turn, u8 last (the agreed stop's step)     no answer
//   kSkipped    i64 step, which the disk wants: no buffer was free, it was given up,   no answer
//               or the rank was past it when it was wanted
//   kHeld       i64 every (0: no opinion): of several nodes, a snapshot for memory alone was
//               sealed; rank 0 says how far apart such ones should be, in steps      no answer
//   kHurry      a rank waits for a save: no rate limit until one has ended            no answer
//   kFinish     i64 step, u8 FinishAsk -> u8 durable
//   kChoose     u32 attempt -> RestoreChoice; with served_by one descriptor, of that slot's buffer;
//               kRemote: two, of the checkpoint's head and of the rank's window, or `error`
//   kReadRange  RangeWanted -> nothing: the agent has put bytes of a remote shard into the rank's
//               window. kCancelled: another rank could not read its share
//   kGather     u32 attempt, Share, u32 buffer -> Share; with kReady descriptors: every rank's
//               buffer. kFailed as soon as one rank votes against
//   kVote       u32 attempt, u8 ok, u8 mismatch, Text detail (empty: another rank's failure) -> u8
//               restored (else choose again with attempt + 1)
//   kSaveEvent  i64 step, SaveOutcome, Text error                                        pushed
//   kAhead      RestoreChoice (memory): what survivors may bring back before the next generation
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/channel.h"
#include "checkpoint/plan.h"
#include "outlast/checkpoint/checkpointer.h"

namespace outlast {

// A rank's table as bytes, and back. kInvalidArgument: not a table.
std::string EncodeTable(const RankTable& table);
absl::StatusOr<RankTable> DecodeTable(std::string_view bytes);
// The tables of all ranks in one.
std::string EncodeTables(std::span<const std::string> tables);
absl::StatusOr<std::vector<RankTable>> DecodeTables(std::string_view bytes);

// CheckpointerOptions as they cross: all ranks must send the same text.
std::string EncodeOptions(const CheckpointerOptions& options);
absl::StatusOr<CheckpointerOptions> DecodeOptions(std::string_view text);

// Is the step durable; or tell me when it is.
enum class FinishAsk : uint8_t { kQuery = 0, kWait = 1 };

enum class SaveOutcome : uint8_t { kFailed = 0, kDurable = 1, kUploadFailed = 2, kUploaded = 3 };

// kRemote: a checkpoint in the remote root, whose bytes the agent brings (remote_reads.h). kPeer: a
// snapshot that another node's agent brought into this rank's buffer.
enum class RestoreSource : uint8_t { kNone = 0, kMemory = 1, kDisk = 2, kRemote = 3, kPeer = 4 };

// How a rank's share of a restore from files went: each byte that several ranks of a node need is
// read by one of them, into its buffer.
enum class Share : uint8_t {
  kReady = 0,   // it lies in the buffer; as an answer: everybody's does
  kCannot = 1,  // no buffer is free, say: then each reads all for itself
  kFailed = 2,  // it could not be read: no rank has this checkpoint
};

// Where all ranks restore from now.
struct RestoreChoice {
  RestoreSource source = RestoreSource::kNone;
  int64_t step = 0;
  uint64_t generation = 0;  // of the snapshot (kMemory, kPeer)
  uint32_t buffer = 0;      // of the asking rank (kMemory, kPeer)
  uint32_t turn = 0;
  // The slot whose snapshot serves the asking rank, since its own is damaged; kNobody: its own
  // does. Extras come from its own.
  static constexpr uint32_t kNobody = 0xffffffff;
  uint32_t served_by = kNobody;
  uint32_t served_turn = 0;
  std::string folder;  // the checkpoint's place: an absolute path (kDisk), a URI (kRemote)
  std::string error;   // this node cannot read it, and why (kRemote)
  // Ranks of this node that restore together, ascending (kDisk, kRemote); empty: too many to share.
  std::vector<uint32_t> mates;

  bool is_of_files() const {
    return source == RestoreSource::kDisk || source == RestoreSource::kRemote;
  }

  bool is_of_memory() const {
    return source == RestoreSource::kMemory || source == RestoreSource::kPeer;
  }

  std::string Encode() const;
  static absl::StatusOr<RestoreChoice> Decode(std::string_view payload);
};

// Bytes of a table a message carries at most.
inline constexpr size_t kTablePartBytes = 96 << 10;

}  // namespace outlast
