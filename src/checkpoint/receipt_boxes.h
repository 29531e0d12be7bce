// The tensors of a receipt, read as our own receipts spell them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/manifest.h"

namespace outlast {

// What is wrong with a box by itself: the member, and why; none: nothing.
std::optional<std::pair<const char*, const char*>> WhyBoxIsWrong(const SavedBox& box);

// A receipt whose boxes were read already, and its text without them.
struct Scanned {
  std::vector<SavedBox> boxes;
  std::string rest;
};

// `text` without the list of its tensors, which lies between the brackets.
std::string WithoutList(std::string_view text, size_t begin, size_t end);
// nullopt: not our own spelling.
std::optional<Scanned> ScanBoxes(std::string_view text);
// The list is passed over by its brackets.
std::optional<Scanned> SkipBoxes(std::string_view text);

}  // namespace outlast
