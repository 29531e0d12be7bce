#include "base/name_index.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace outlast {
namespace {

size_t HashOf(std::string_view name) { return std::hash<std::string_view>()(name); }
uint32_t TagOf(size_t hash) { return static_cast<uint32_t>(hash >> 32); }

}  // namespace

NameIndex::NameIndex(size_t expected) : slots_(std::bit_ceil(std::max<size_t>(2 * expected, 16))) {
  names_.reserve(expected);
}

size_t NameIndex::SlotOf(std::string_view name, size_t hash) const {
  const size_t mask = slots_.size() - 1;
  size_t at = hash & mask;
  for (; slots_[at].number_and_1 != 0; at = (at + 1) & mask) {
    if (slots_[at].tag == TagOf(hash) && names_[slots_[at].number_and_1 - 1] == name) break;
  }
  return at;
}

NameIndex::Added NameIndex::Add(std::string_view name) {
  const size_t hash = HashOf(name);
  size_t at = SlotOf(name, hash);
  if (slots_[at].number_and_1 != 0) return {slots_[at].number_and_1 - 1, false};
  if (2 * (names_.size() + 1) > slots_.size()) {
    Grow();
    at = SlotOf(name, hash);
  }
  names_.push_back(name);
  slots_[at] = {TagOf(hash), static_cast<uint32_t>(names_.size())};
  return {static_cast<uint32_t>(names_.size() - 1), true};
}

std::optional<uint32_t> NameIndex::Find(std::string_view name) const {
  const Slot& slot = slots_[SlotOf(name, HashOf(name))];
  if (slot.number_and_1 == 0) return std::nullopt;
  return slot.number_and_1 - 1;
}

void NameIndex::Grow() {
  slots_.assign(2 * slots_.size(), {});
  for (size_t i = 0; i < names_.size(); ++i) {
    const size_t hash = HashOf(names_[i]);
    slots_[SlotOf(names_[i], hash)] = {TagOf(hash), static_cast<uint32_t>(i + 1)};
  }
}

}  // namespace outlast
