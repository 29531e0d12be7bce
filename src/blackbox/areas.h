// The area table: as this version lays it out, and as it is found.
#pragma once

#include <cstddef>
#include <span>

#include "absl/status/statusor.h"
#include "outlast/blackbox/segment.h"

namespace outlast::blackbox {

// What Create writes into the header: table, areas and segment_bytes.
void LayOutAreas(SegmentHeader& header);

// Checks the header at the start of `bytes`, and its area table, against the bytes that there are. The header is copied
// once: it may be changing under a hostile writer.
absl::StatusOr<SegmentAreas> CheckAreas(std::span<const std::byte> bytes);

// Whether this version may write with these areas: all there, rows of the sizes that it knows.
absl::Status CheckWritable(const SegmentAreas& areas);

}  // namespace outlast::blackbox
