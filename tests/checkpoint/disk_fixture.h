// What the tests of checkpoints on disk share: a folder of their own, small states, and a whole
// save of them.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint/plan.h"
#include "checkpoint/reader.h"
#include "checkpoint/root.h"
#include "checkpoint/writer.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/digest.h"
#include "outlast/base/memory.h"
#include "outlast/base/status.h"
#include "outlast/checkpoint/state.h"
#include "store/folder.h"
#include "tests/support/temp_folder.h"

namespace outlast {

inline std::string ReadFileText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline void WriteFileText(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

// The text with one stretch replaced, and a self CRC that fits again: what a hostile writer would
// make.
inline std::string Forged(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  const size_t covered = text.size() - 11;
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", Crc32c(std::string_view(text).substr(0, covered)));
  return text.replace(covered, 8, digits);
}

// One rank's tensors with memory of their own.
class OwnedState {
 public:
  OwnedState() = default;
  OwnedState(OwnedState&&) = default;
  OwnedState& operator=(OwnedState&&) = default;

  // A tensor, or the box of one, whose every byte depends on its name and its place in the whole
  // tensor.
  void Add(std::string name, DType dtype, const Shape& global,
           std::optional<Box> box = std::nullopt) {
    const Box whole{Shape::Zeros(global.rank()), global};
    const Box held = box.value_or(whole);
    std::vector<std::byte> all(BytesOf(dtype, global).value());
    uint64_t seed = 1469598103934665603u;
    for (const char c : name) seed = (seed ^ static_cast<uint8_t>(c)) * 1099511628211u;
    for (std::byte& byte : all) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      byte = static_cast<std::byte>(seed >> 56);
    }
    AddZeros(std::move(name), dtype, global, held);
    ASSERT_TRUE(CopyBox(dtype, whole, all, held, *memory_.back()).ok());
  }

  void AddZeros(std::string name, DType dtype, const Shape& global,
                std::optional<Box> box = std::nullopt) {
    const Box held = box.value_or(Box{Shape::Zeros(global.rank()), global});
    names_.push_back(std::make_unique<std::string>(std::move(name)));
    memory_.push_back(
        std::make_unique<std::vector<std::byte>>(BytesOf(dtype, held.extent).value()));
    view_.regions.push_back({*names_.back(), dtype, global, held.offset, held.extent,
                             *memory_.back(), RegionKind::kStable});
  }

  StateView& view() { return view_; }
  const StateView& view() const { return view_; }

  // Names, and every byte.
  std::string Digest() const {
    std::string text;
    for (const Region& region : view_.regions) {
      text += std::string(region.name) + ":";
      text.append(reinterpret_cast<const char*>(region.bytes.data()), region.bytes.size());
    }
    return ToHex(Sha256(text));
  }

  // The same names and boxes, all bytes zero.
  OwnedState Blank() const {
    OwnedState blank;
    for (const Region& region : view_.regions) {
      blank.AddZeros(std::string(region.name), region.dtype, region.global,
                     Box{OffsetOf(region), region.extent});
    }
    return blank;
  }

 private:
  std::vector<std::unique_ptr<std::string>> names_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> memory_;
  StateView view_;
};

// Page-aligned memory with the file image of one rank.
inline Mapping ImageOf(const Assignment& assignment, const StateView& state) {
  Mapping image = Mapping::Anonymous((assignment.image_bytes() + 4095) / 4096 * 4096).value();
  std::memcpy(image.data(), assignment.header.data(), assignment.header.size());
  for (const PlannedItem& item : assignment.image) {
    for (const Region& region : state.regions) {
      if (region.name != item.box.name) continue;
      const Box piece{item.box.offset, item.box.extent};
      const auto target = image.bytes().subspan(assignment.header.size() + item.box.begin,
                                                item.box.end - item.box.begin);
      EXPECT_TRUE(CopyBox(region.dtype, item.held, region.bytes, piece, target).ok());
    }
  }
  return image;
}

struct SaveOptions {
  std::optional<std::string> parent;
  uint64_t generation = 1;
  std::vector<std::string> hooks;
  bool commit = true;
};

// Saves the ranks' states as an agent would: plan, shards, receipts, manifest. Returns the
// checkpoint's name.
inline absl::StatusOr<std::string> Save(Root& root, int64_t step, std::span<const OwnedState> ranks,
                                        const SaveOptions& options = {}) {
  std::vector<RankTable> tables;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    OUTLAST_ASSIGN_OR_RETURN(tables.emplace_back(), TableOfRank(ranks[rank].view(), rank));
  }
  SettleAliases(tables);
  OUTLAST_ASSIGN_OR_RETURN(TensorTable table, MergeTables(tables));
  OUTLAST_ASSIGN_OR_RETURN(const Plan plan, MakePlan(std::move(table)));
  OUTLAST_ASSIGN_OR_RETURN(const std::string name, root.NewCheckpoint(step));
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    OUTLAST_ASSIGN_OR_RETURN(const Assignment assignment, AssignmentOf(plan, rank));
    Receipt receipt;
    receipt.job = root.job();
    receipt.run = Id128::FromName("run");
    receipt.claim = root.claim();
    receipt.checkpoint = name;
    receipt.parent = options.parent;
    receipt.step = step;
    receipt.generation = options.generation;
    receipt.writer = receipt.rank = rank;
    receipt.world = static_cast<uint32_t>(ranks.size());
    receipt.plan = ToHex(plan.digest);
    receipt.mesh = {{"data", static_cast<int64_t>(ranks.size())}};
    receipt.hooks = options.hooks;
    receipt.boot_id = BootId();
    receipt.tensors = SavedBoxesOf(assignment);
    receipt.aliases = tables[rank].aliases;
    receipt.extra = ranks[rank].view().extras;
    if (!assignment.image.empty()) {
      const Mapping image = ImageOf(assignment, ranks[rank].view());
      OUTLAST_ASSIGN_OR_RETURN(
          receipt.file,
          WriteShard(root.PathOf(name), rank, image.bytes().first(assignment.image_bytes()), {}));
    }
    OUTLAST_RETURN_IF_ERROR(WriteReceipt(root.PathOf(name), receipt).status());
  }
  if (!options.commit) return name;
  OUTLAST_ASSIGN_OR_RETURN(Manifest manifest,
                           root.ComposeManifest(name, static_cast<uint32_t>(ranks.size())));
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, root.List());
  manifest.ancestors = root.AncestorsOf(options.parent, listing);
  manifest.committed_by = {"0", root.claim(), options.generation};
  OUTLAST_RETURN_IF_ERROR(root.Commit(manifest));
  return name;
}

// A root that this test's run may write to.
inline std::unique_ptr<Root> OpenRoot(const std::string& path, const std::string& run = "run") {
  auto root = Root::Open(path, {.run = Id128::FromName(run)});
  EXPECT_TRUE(root.ok()) << root.status();
  EXPECT_TRUE((*root)->TakeClaim().ok());
  return *std::move(root);
}

}  // namespace outlast
