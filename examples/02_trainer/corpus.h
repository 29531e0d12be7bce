// The text that the example trains on, and its cut into samples.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "model.h"

// All regular files of `folder` (symbolic links followed) in order of name, one after the other; a
// file whose content came already is left out. Empty when nothing can be read.
std::string ReadTexts(const std::filesystem::path& folder);

// Nats a byte that a model knowing only how often each byte occurs would need at best: -sum p ln p.
double UnigramEntropy(std::string_view text);

// How a text becomes samples: sample i predicts the `targets` bytes after context, each from the
// `context` bytes before it; samples begin `targets` bytes apart, so that each byte behind the
// first `context` is predicted by exactly one.
struct Window {
  int context = 16;
  int targets = 8;
};

// Whole samples in a text of `bytes`.
int64_t SampleCount(int64_t bytes, const Window& window);

// The samples `ids` as one batch; negative ids are padding and left out. Each id is below
// SampleCount.
TokenBatch MakeBatch(std::string_view text, const Window& window, std::span<const int64_t> ids);
