#include "corpus.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <set>
#include <system_error>
#include <vector>

std::string ReadTexts(const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.is_regular_file(error)) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::set<std::string> seen;
  std::string text;
  for (const std::filesystem::path& file : files) {
    std::ifstream stream(file, std::ios::binary);
    std::string content{std::istreambuf_iterator<char>(stream), {}};
    if (seen.insert(content).second) text += content;
  }
  return text;
}

double UnigramEntropy(std::string_view text) {
  std::array<int64_t, 256> counts{};
  for (const char byte : text) ++counts[static_cast<unsigned char>(byte)];
  double entropy = 0;
  for (const int64_t count : counts) {
    const double probability = static_cast<double>(count) / static_cast<double>(text.size());
    if (count > 0) entropy -= probability * std::log(probability);
  }
  return entropy;
}

int64_t SampleCount(int64_t bytes, const Window& window) {
  return std::max<int64_t>(0, bytes - window.context) / window.targets;
}

TokenBatch MakeBatch(std::string_view text, const Window& window, std::span<const int64_t> ids) {
  TokenBatch batch;
  for (const int64_t id : ids) {
    if (id < 0) continue;
    for (int target = 0; target < window.targets; ++target) {
      const auto begin = text.begin() + id * window.targets + target;
      batch.contexts.insert(batch.contexts.end(), begin, begin + window.context);
      batch.targets.push_back(static_cast<uint8_t>(begin[window.context]));
    }
  }
  return batch;
}
