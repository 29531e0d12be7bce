// Writes one rank's part of a checkpoint: its shard from a sealed image, and its receipt.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/manifest.h"
#include "checkpoint/plan.h"
#include "store/folder.h"
#include "store/rate_limit.h"

namespace outlast {

// The boxes of `assignment` as a receipt lists them.
std::vector<SavedBox> SavedBoxesOf(const Assignment& assignment);

// CRC32C of each kChunkBytes of `bytes`.
std::vector<uint32_t> ChunkCrcs(std::span<const std::byte> bytes);

// CRC32C of two stretches, from the CRC of each and the length of the second.
uint32_t CombineCrcs(uint32_t first, uint32_t second, uint64_t second_bytes);

struct ShardWriteOptions {
  DirectWriteOptions io;
  // How much of the image is checked against the CRCs given while it streams, so that a damaged
  // buffer never becomes a file. kCheck: every chunk (40 to 60 ms of processor a GB). kSample: one
  // chunk in kSampleOneIn, others each time `sample` grows by one; a restore checks them all
  // anyway.
  enum class Crcs : uint8_t { kCheck, kSample } crcs = Crcs::kCheck;
  uint64_t sample = 0;
  RateLimiter* limiter = nullptr;             // asked before each block; borrowed, null: none
  std::atomic<uint64_t>* progress = nullptr;  // grows by the bytes of each block; borrowed
};
inline constexpr uint64_t kSampleOneIn = 4;

// Streams `image`, the file as it shall stand, into folder/w<writer>.safetensors; durable when this
// returns, except for the folder's entry (WriteReceipt syncs the folder). `chunks` are the image's
// CRCs from its buffer; none: they are computed here. kDataLoss: the image does not match `chunks`.
// Errors of the disk name path, errno, bytes wanted and free; no file is left.
absl::StatusOr<ShardFile> WriteShard(const std::string& folder, uint32_t writer,
                                     std::span<const std::byte> image,
                                     std::span<const uint32_t> chunks,
                                     const ShardWriteOptions& options = {});

// Writes folder/w<rank>.receipt.json whole, and syncs the folder. kAlreadyExists: never
// overwritten.
absl::StatusOr<ReceiptEntry> WriteReceipt(const std::string& folder, const Receipt& receipt);

}  // namespace outlast
