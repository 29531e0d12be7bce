#include "outlast/elastic/link_rates.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/plain_number.h"

namespace outlast {
namespace {

constexpr size_t kFewestOthers = 3;

}  // namespace

void LinkRates::Note(const std::string& one, const std::string& other,
                     double megabytes_per_second) {
  rates_[one][other] = rates_[other][one] = megabytes_per_second;
}

void LinkRates::Forget(const std::string& node) {
  rates_.erase(node);
  for (auto& [other, rates] : rates_) rates.erase(node);
}

const LinkRates::Rates& LinkRates::Of(const std::string& node) const {
  static const Rates none;
  const auto known = rates_.find(node);
  return known == rates_.end() ? none : known->second;
}

std::vector<double> LinkRates::AllBut(const std::string& one, const std::string& other) const {
  std::vector<double> all;
  for (const auto& [node, rates] : rates_) {
    for (const auto& [partner, rate] : rates) {
      const bool is_theirs = (node == one && partner == other) || (node == other && partner == one);
      if (node < partner && !is_theirs) all.push_back(rate);
    }
  }
  std::sort(all.begin(), all.end());
  return all;
}

double LinkRates::MedianWithout(const std::string& one, const std::string& other) const {
  const std::vector<double> others = AllBut(one, other);
  return others.size() < kFewestOthers ? 0 : others[others.size() / 2];
}

double LinkRates::Wanted(const std::string& one, const std::string& other) const {
  return share_ == 0 ? floor_ : std::max(floor_, share_ * MedianWithout(one, other));
}

double LinkRates::LeastWanted(const std::string& node) const {
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [partner, rate] : Of(node)) least = std::min(least, Wanted(node, partner));
  return least;
}

std::vector<std::string> LinkRates::OddLinks() const {
  std::vector<std::string> odd;
  for (const auto& [node, rates] : rates_) {
    for (const auto& [partner, rate] : rates) {
      const double median = MedianWithout(node, partner);
      if (partner < node || rate >= median / 2) continue;
      odd.push_back(fmt::format("{} and {}: {} MB/s, the median of the {} others is {}", node,
                                partner, PlainNumber(rate), AllBut(node, partner).size(),
                                PlainNumber(median)));
    }
  }
  return odd;
}

bool LinkRates::HasGoodLink(const std::string& node) const {
  const Rates& rates = Of(node);
  return std::any_of(rates.begin(), rates.end(),
                     [&](const auto& one) { return one.second >= Wanted(node, one.first); });
}

LinkRates::Fitness LinkRates::FitnessOf(const std::string& node) const {
  const Rates& rates = Of(node);
  if (HasGoodLink(node)) return Fitness::kFit;
  const bool is_told_by_another =
      rates.size() > 1 && std::any_of(rates.begin(), rates.end(),
                                      [this](const auto& one) { return HasGoodLink(one.first); });
  return is_told_by_another ? Fitness::kUnfit : Fitness::kUnknown;
}

bool LinkRates::IsSettled(const std::string& node, const std::vector<std::string>& partners) const {
  if (FitnessOf(node) != Fitness::kUnknown) return true;
  return std::all_of(partners.begin(), partners.end(), [&](const std::string& partner) {
    return partner == node || Of(node).contains(partner);
  });
}

const std::string* LinkRates::PartnerOf(const std::string& node,
                                        const std::vector<std::string>& free,
                                        bool of_the_new) const {
  const auto at = static_cast<size_t>(std::find(free.begin(), free.end(), node) - free.begin());
  for (size_t i = 1; i < free.size(); ++i) {
    const std::string& other = free[(at + i) % free.size()];
    if (!Of(node).contains(other) && (!of_the_new || Of(other).empty())) return &other;
  }
  return nullptr;
}

std::optional<std::pair<std::string, std::string>> LinkRates::NextPair(
    const std::vector<std::string>& whom, const std::vector<std::string>& free) const {
  for (const bool of_the_new : {true, false}) {
    for (const std::string& node : whom) {
      if (!Of(node).empty()) continue;
      if (const std::string* other = PartnerOf(node, free, of_the_new))
        return std::make_pair(node, *other);
    }
  }
  for (const std::string& node : whom) {
    if (!IsSuspect(node)) continue;
    if (const std::string* other = PartnerOf(node, free, false))
      return std::make_pair(node, *other);
  }
  return std::nullopt;
}

std::string LinkRates::Describe(const std::string& node) const {
  std::string text;
  for (const auto& [partner, rate] : Of(node))
    text += fmt::format("{}{} MB/s with {}", text.empty() ? "" : ", ", PlainNumber(rate), partner);
  return text;
}

std::string LinkRates::Summary() const {
  const std::vector<double> all = AllBut({}, {});
  if (all.empty()) return {};
  return fmt::format("{} link{}, {} to {} MB/s, median {}", all.size(), all.size() == 1 ? "" : "s",
                     PlainNumber(all.front()), PlainNumber(all.back()),
                     PlainNumber(all[all.size() / 2]));
}

}  // namespace outlast
