#include "blackbox/areas.h"

#include <bit>
#include <limits>

#include "base/error.h"
#include "blackbox/words.h"
#include "outlast/blackbox/flight_log.h"
#include "outlast/blackbox/step_log.h"

namespace outlast::blackbox {
namespace {

struct AreaShape {
  AreaKind kind;
  const char* name;
  uint32_t stride;   // as this version writes it; readers take more
  uint32_t element;  // a stride is a multiple of this
  uint64_t count;
};

constexpr AreaShape kShapes[] = {
    {AreaKind::kSections, "sections", sizeof(SectionRow), 8, kSectionRows},
    {AreaKind::kComms, "comms", sizeof(CommRow), 8, kCommRows},
    {AreaKind::kSignatures, "signatures", kSignaturesPerComm * sizeof(SignatureRow), sizeof(SignatureRow), kCommRows},
    {AreaKind::kPairs, "pairs", sizeof(PairRow), 8, kPairRows},
    {AreaKind::kFlightRings, "flight rings", kFlightRecordsPerRing * sizeof(FlightRecord), sizeof(FlightRecord),
     kFlightRings},
    {AreaKind::kStepLog, "step log", sizeof(StepRecord), 8, kStepRecords},
    {AreaKind::kStrings, "strings", 1, 1, kStringsBytes},
    {AreaKind::kMembers, "members", 1, 1, kMembersBytes},
};

const AreaShape* ShapeOf(uint32_t kind) {
  for (const AreaShape& shape : kShapes) {
    if (static_cast<uint32_t>(shape.kind) == kind) return &shape;
  }
  return nullptr;
}

// The least that a reader can use: rings and signatures may be shorter than ours.
uint32_t LeastStride(const AreaShape& shape) { return shape.element > 8 ? shape.element : shape.stride; }

bool HasGoodStride(const AreaShape& shape, uint32_t stride) {
  if (shape.stride == 1) return stride == 1;
  if (stride < LeastStride(shape) || stride % shape.element != 0) return false;
  return shape.kind != AreaKind::kFlightRings || std::has_single_bit(stride / shape.element);
}

absl::Status CheckArea(const AreaShape& shape, const AreaEntry& entry, const SegmentHeader& header) {
  const auto bad = [&](std::string_view what, uint64_t value) {
    return Error(absl::StatusCode::kDataLoss, "black box: area '{}' has {} {}", shape.name, what, value);
  };
  if (!HasGoodStride(shape, entry.stride)) return bad("stride", entry.stride);
  if (entry.offset % 64 != 0 || entry.offset < header.header_bytes) return bad("offset", entry.offset);
  uint64_t bytes = 0;
  uint64_t end = 0;
  if (__builtin_mul_overflow(uint64_t{entry.stride}, entry.count, &bytes) ||
      __builtin_add_overflow(entry.offset, bytes, &end) || end > header.segment_bytes) {
    return bad("more rows than the segment has room for:", entry.count);
  }
  return absl::OkStatus();
}

absl::Status CheckHeader(const SegmentHeader& header, uint64_t bytes) {
  if (header.magic != kSegmentMagic) {
    return Error(absl::StatusCode::kDataLoss, "black box: magic {:#018x}, {:#018x} ('OTLBBX01') wanted", header.magic,
                 kSegmentMagic);
  }
  if (header.major != kSegmentMajor) {
    return Error(absl::StatusCode::kUnimplemented, "black box: version {}.{}, this program reads {}.x", header.major,
                 header.minor, kSegmentMajor);
  }
  if (header.segment_bytes > bytes) {
    return Error(absl::StatusCode::kDataLoss, "black box: cut after {} bytes, its header says {}", bytes,
                 header.segment_bytes);
  }
  if (header.header_bytes < kSegmentHeaderBytes || header.header_bytes > header.segment_bytes) {
    return Error(absl::StatusCode::kDataLoss, "black box: a header of {} bytes in a segment of {}, at least {} wanted",
                 header.header_bytes, header.segment_bytes, kSegmentHeaderBytes);
  }
  if (header.areas > kMaxAreas) {
    return Error(absl::StatusCode::kDataLoss, "black box: {} areas, at most {} wanted", header.areas, kMaxAreas);
  }
  return absl::OkStatus();
}

}  // namespace

void LayOutAreas(SegmentHeader& header) {
  uint64_t offset = kSegmentHeaderBytes;
  header.areas = 0;
  for (const AreaShape& shape : kShapes) {
    header.area[header.areas++] = {.kind = static_cast<uint32_t>(shape.kind), .stride = shape.stride, .offset = offset,
                                   .count = shape.count, .reserved = 0};
    offset += uint64_t{shape.stride} * shape.count;
  }
  header.header_bytes = kSegmentHeaderBytes;
  header.segment_bytes = offset;
}

absl::StatusOr<SegmentAreas> CheckAreas(std::span<const std::byte> bytes) {
  if (bytes.size() < kSegmentHeaderBytes) {
    return Error(absl::StatusCode::kDataLoss, "black box: {} bytes, a header alone has {}", bytes.size(),
                 kSegmentHeaderBytes);
  }
  const auto header = LoadRecord<SegmentHeader>(bytes.data());
  OUTLAST_RETURN_IF_ERROR(CheckHeader(header, bytes.size()));
  SegmentAreas areas;
  for (uint32_t i = 0; i < header.areas; ++i) {
    const AreaEntry& entry = header.area[i];
    const AreaShape* shape = ShapeOf(entry.kind);
    if (shape == nullptr) continue;  // of a newer minor version
    SegmentArea& area = areas[entry.kind];
    if (area.stride != 0) return Error(absl::StatusCode::kDataLoss, "black box: two areas '{}'", shape->name);
    OUTLAST_RETURN_IF_ERROR(CheckArea(*shape, entry, header));
    area = {.offset = entry.offset, .count = entry.count, .stride = entry.stride};
  }
  return areas;
}

absl::Status CheckWritable(const SegmentAreas& areas) {
  for (const AreaShape& shape : kShapes) {
    const SegmentArea& area = areas[static_cast<size_t>(shape.kind)];
    if (area.stride != shape.stride || area.count != shape.count) {
      return Error(absl::StatusCode::kUnimplemented, "black box: area '{}' has {} rows of {} bytes, this program writes {} of {}",
                   shape.name, area.count, area.stride, shape.count, shape.stride);
    }
  }
  return absl::OkStatus();
}

}  // namespace outlast::blackbox
