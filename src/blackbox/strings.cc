#include "blackbox/strings.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "blackbox/words.h"
#include "outlast/blackbox/segment.h"

namespace outlast::blackbox {
namespace {

constexpr uint64_t kFirstEntry = 8;  // behind the word of bytes used
constexpr size_t kLongestText = 255;
constexpr uint64_t kMostRanks = uint64_t{1} << 20;

constexpr uint64_t RoundUp8(uint64_t bytes) { return (bytes + 7) & ~uint64_t{7}; }

uint64_t UsedBytes(std::span<const std::byte> area) {
  if (area.size() < kFirstEntry) return 0;
  return std::clamp<uint64_t>(LoadWordAt(area.data()), kFirstEntry, area.size());
}

// Takes `bytes` of the area; nothing when it is full.
std::optional<uint64_t> Reserve(std::span<std::byte> area, uint64_t bytes) {
  if (area.size() < kFirstEntry) return std::nullopt;
  auto* used = reinterpret_cast<AliasedWord*>(area.data());
  uint64_t found = __atomic_load_n(used, __ATOMIC_RELAXED);
  while (true) {
    const uint64_t start = std::max(found, kFirstEntry);
    if (start > area.size() || bytes > area.size() - start) return std::nullopt;
    if (__atomic_compare_exchange_n(used, &found, start + bytes, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return start;
  }
}

std::optional<StringEntry> EntryAt(std::span<const std::byte> area, uint64_t index) {
  if (index < kFirstEntry || index % 8 != 0 || area.size() < sizeof(StringEntry) ||
      index > area.size() - sizeof(StringEntry)) {
    return std::nullopt;
  }
  const auto entry = LoadRecord<StringEntry>(area.data() + index);
  if (entry.id == 0 || entry.bytes > area.size() - index - sizeof(StringEntry)) return std::nullopt;
  return entry;
}

std::string_view TextAt(std::span<const std::byte> area, uint64_t index, const StringEntry& entry) {
  return {reinterpret_cast<const char*>(area.data()) + index + sizeof(StringEntry), entry.bytes};
}

std::vector<MemberRun> RunsOf(std::span<const uint32_t> ranks) {
  std::vector<MemberRun> runs;
  for (const uint32_t rank : ranks) {
    MemberRun* run = runs.empty() ? nullptr : &runs.back();
    if (run != nullptr && run->count == 1) run->stride = rank - run->first;
    if (run != nullptr && rank == run->first + run->count * run->stride) {
      ++run->count;
    } else {
      runs.push_back({.first = rank, .count = 1, .stride = 1});
    }
  }
  return runs;
}

uint64_t BytesOf(uint32_t runs) { return RoundUp8(sizeof(MembersEntry) + uint64_t{runs} * sizeof(MemberRun)); }

// Where the entry with this digest lies; nothing when it is not there.
std::optional<uint64_t> FindMembers(std::span<const std::byte> area, uint64_t digest) {
  const uint64_t used = UsedBytes(area);
  uint64_t at = kFirstEntry;
  while (at + sizeof(MembersEntry) <= used) {
    const auto entry = LoadRecord<MembersEntry>(area.data() + at);
    if (entry.runs == 0 || BytesOf(entry.runs) > used - at) return std::nullopt;  // unfinished: the rest has no start
    if (entry.digest == digest) return at;
    at += BytesOf(entry.runs);
  }
  return std::nullopt;
}

}  // namespace

uint32_t IdOf(std::string_view text) {
  const uint64_t hash = Fnv1a64(text);
  const auto folded = static_cast<uint32_t>(hash ^ hash >> 32);
  return folded == 0 ? 1 : folded;
}

uint16_t InternString(std::span<std::byte> area, std::string_view text) {
  text = text.substr(0, kLongestText);
  area = area.first(std::min<size_t>(area.size(), 1 << 16));  // an index has 16 bits
  const uint32_t id = IdOf(text);
  const uint64_t used = UsedBytes(area);
  for (uint64_t at = kFirstEntry; at < used;) {
    const std::optional<StringEntry> entry = EntryAt(area, at);
    if (!entry) break;  // unfinished: what is behind it is not found, and at worst added again
    if (entry->id == id && TextAt(area, at, *entry) == text) return static_cast<uint16_t>(at);
    at += RoundUp8(sizeof(StringEntry) + entry->bytes);
  }
  const std::optional<uint64_t> place = Reserve(area, RoundUp8(sizeof(StringEntry) + text.size()));
  if (!place) return 0;
  std::memcpy(area.data() + *place + sizeof(StringEntry), text.data(), text.size());
  StoreRecord(area.data() + *place, StringEntry{.id = id, .bytes = static_cast<uint16_t>(text.size()), .zero = 0});
  return static_cast<uint16_t>(*place);
}

std::string StringAt(std::span<const std::byte> area, uint32_t index) {
  const std::optional<StringEntry> entry = EntryAt(area, index);
  if (!entry) return {};
  std::string text(TextAt(area, index, *entry));
  return IdOf(text) == entry->id ? text : std::string();
}

uint64_t InternMembers(std::span<std::byte> area, std::span<const uint32_t> ranks) {
  const uint64_t digest = MembersDigest(ranks);
  if (ranks.empty() || ranks.size() > kMostRanks || FindMembers(area, digest)) return digest;
  const std::vector<MemberRun> runs = RunsOf(ranks);
  const auto count = static_cast<uint32_t>(runs.size());
  const std::optional<uint64_t> place = Reserve(area, BytesOf(count));
  if (!place) return digest;
  std::byte* entry = area.data() + *place;
  StoreWordAt(entry + 8, uint64_t{count} | uint64_t{ranks.size()} << 32);
  std::memcpy(entry + sizeof(MembersEntry), runs.data(), runs.size() * sizeof(MemberRun));
  StoreWordAt(entry, digest);
  return digest;
}

std::vector<uint32_t> MembersOf(std::span<const std::byte> area, uint64_t digest) {
  const std::optional<uint64_t> place = FindMembers(area, digest);
  if (!place) return {};
  const auto entry = LoadRecord<MembersEntry>(area.data() + *place);
  const uint64_t room = (area.size() - *place - sizeof(MembersEntry)) / sizeof(MemberRun);
  std::vector<uint32_t> ranks;
  for (uint32_t i = 0; i < entry.runs && i < room; ++i) {
    MemberRun run;
    std::memcpy(&run, area.data() + *place + sizeof(MembersEntry) + i * sizeof(MemberRun), sizeof(run));
    if (run.count > kMostRanks || ranks.size() + run.count > kMostRanks) return {};
    for (uint32_t k = 0; k < run.count; ++k) ranks.push_back(run.first + k * run.stride);
  }
  return MembersDigest(ranks) == digest ? ranks : std::vector<uint32_t>();
}

}  // namespace outlast::blackbox
