#include "outlast/checkpoint/stateful.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace outlast {

void StatePart::Add(const Region& region) {
  const size_t index = builder_.view_.regions.size();
  if (index == builder_.names_.size()) builder_.names_.emplace_back();
  std::string& name = builder_.names_[index];
  const bool is_same = name.size() == prefix_.size() + region.name.size() &&
                       name.starts_with(prefix_) && name.ends_with(region.name);
  if (!is_same) {
    name = prefix_;
    name += region.name;
  }
  builder_.view_.regions.push_back(region);
  builder_.view_.regions.back().name = name;
}

void StatePart::AddExtra(std::string_view key, std::string value) {
  builder_.view_.extras[prefix_ + std::string(key)] = std::move(value);
}

void StateViewBuilder::Add(std::string prefix, Stateful& object) {
  if (!prefix.empty()) prefix += '.';
  entries_.push_back({std::move(prefix), &object});
}

const StateView& StateViewBuilder::View() {
  view_.regions.clear();
  view_.extras.clear();
  for (const Entry& entry : entries_) {
    StatePart part(*this, entry.prefix);
    entry.object->Describe(part);
  }
  return view_;
}

absl::Status StateViewBuilder::OnRestored(int64_t step, const Extras& extras) {
  if (step == 0) return absl::OkStatus();
  std::vector<Extras> parts(entries_.size());
  for (const auto& [key, value] : extras) {
    size_t owner = entries_.size();
    for (size_t i = 0; i < entries_.size(); ++i) {
      const bool is_longer =
          owner == entries_.size() || entries_[i].prefix.size() > entries_[owner].prefix.size();
      if (is_longer && key.starts_with(entries_[i].prefix)) owner = i;
    }
    if (owner < entries_.size()) parts[owner][key.substr(entries_[owner].prefix.size())] = value;
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    const absl::Status status = entries_[i].object->OnRestored(step, parts[i]);
    if (!status.ok()) return Annotate(status, fmt::format("restored '{}'", entries_[i].prefix));
  }
  return absl::OkStatus();
}

}  // namespace outlast
