#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"
#include "blackbox/areas.h"
#include "blackbox/strings.h"
#include "blackbox/words.h"
#include "outlast/blackbox/segment.h"

namespace outlast {
namespace {

constexpr uint64_t kLargestCopy = uint64_t{256} << 20;

using Words = std::vector<uint64_t>;  // what a copy is kept in: aligned for word loads

std::span<std::byte> BytesOf(Words& words, size_t bytes) { return std::as_writable_bytes(std::span(words)).first(bytes); }

bool CannotShrink(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

// Fills `target` from the start of `fd`; returns how much there was.
absl::StatusOr<size_t> ReadFromStart(int fd, std::span<std::byte> target) {
  size_t done = 0;
  while (done < target.size()) {
    const ssize_t got = pread(fd, target.data() + done, target.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "read a black box");
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

absl::Status CheckCopySize(uint64_t bytes) {
  if (bytes <= kLargestCopy) return absl::OkStatus();
  return Error(absl::StatusCode::kDataLoss, "black box: {} bytes, at most {} wanted", bytes, kLargestCopy);
}

}  // namespace

SegmentView::SegmentView(std::shared_ptr<const void> owner, std::span<const std::byte> bytes, const SegmentAreas& areas)
    : owner_(std::move(owner)), bytes_(bytes), areas_(areas) {}

absl::StatusOr<SegmentView> SegmentView::Open(int fd) {
  struct stat file {};
  if (fstat(fd, &file) != 0) return ErrnoStatus(errno, "open a black box");
  const auto size = static_cast<uint64_t>(std::max<off_t>(file.st_size, 0));
  if (size > 0 && CannotShrink(fd)) {
    OUTLAST_ASSIGN_OR_RETURN(Mapping mapping, Mapping::SharedReadOnly(fd, size));
    OUTLAST_ASSIGN_OR_RETURN(const SegmentAreas areas, blackbox::CheckAreas(mapping.bytes()));
    auto owner = std::make_shared<Mapping>(std::move(mapping));
    const std::span<const std::byte> bytes = owner->bytes();
    return SegmentView(std::move(owner), bytes, areas);
  }
  OUTLAST_RETURN_IF_ERROR(CheckCopySize(size));
  auto words = std::make_shared<Words>((size + 7) / 8);
  OUTLAST_ASSIGN_OR_RETURN(const size_t read, ReadFromStart(fd, BytesOf(*words, size)));
  const std::span<const std::byte> bytes = BytesOf(*words, read);
  OUTLAST_ASSIGN_OR_RETURN(const SegmentAreas areas, blackbox::CheckAreas(bytes));
  return SegmentView(std::move(words), bytes, areas);
}

absl::StatusOr<SegmentView> SegmentView::FromBytes(std::span<const std::byte> source) {
  OUTLAST_RETURN_IF_ERROR(CheckCopySize(source.size()));
  auto words = std::make_shared<Words>((source.size() + 7) / 8);
  const std::span<std::byte> bytes = BytesOf(*words, source.size());
  if (!source.empty()) std::memcpy(bytes.data(), source.data(), source.size());
  OUTLAST_ASSIGN_OR_RETURN(const SegmentAreas areas, blackbox::CheckAreas(bytes));
  return SegmentView(std::move(words), bytes, areas);
}

uint64_t SegmentView::rows(AreaKind kind) const { return areas_[static_cast<size_t>(kind)].count; }

uint64_t SegmentView::sub_rows(AreaKind kind, size_t bytes) const {
  return areas_[static_cast<size_t>(kind)].stride / bytes;
}

void SegmentView::CopyWords(AreaKind kind, uint64_t row, uint64_t offset, std::span<uint64_t> words) const {
  const SegmentArea& area = areas_[static_cast<size_t>(kind)];
  std::fill(words.begin(), words.end(), 0);
  if (row >= area.count || offset > area.stride || words.size_bytes() > area.stride - offset) return;
  const std::byte* source = bytes_.data() + area.offset + row * area.stride + offset;
  for (size_t i = 0; i < words.size(); ++i) words[i] = blackbox::LoadWordAt(source + 8 * i);
}

std::string SegmentView::String(uint32_t index) const {
  const SegmentArea& area = areas_[static_cast<size_t>(AreaKind::kStrings)];
  return blackbox::StringAt(bytes_.subspan(area.offset, area.count), index);
}

std::vector<uint32_t> SegmentView::Members(uint64_t digest) const {
  const SegmentArea& area = areas_[static_cast<size_t>(AreaKind::kMembers)];
  return blackbox::MembersOf(bytes_.subspan(area.offset, area.count), digest);
}

}  // namespace outlast
