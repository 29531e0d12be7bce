// How fast the links of a job's agents are, as pairs of them have measured: pure.
//
// Agents know nobody before they join, so the coordinator says who measures with whom. One slow
// measurement has two ends. Which of them is slow is told by a second partner: a node is unfit that
// is slow with two, at least one of which is not slow with a third.
//
// Slow is what is below a floor, or below a share of the median of all other links, once there are
// three of those: what a good link carries need not be known beforehand.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace outlast {

class LinkRates {
 public:
  enum class Fitness { kUnknown, kFit, kUnfit };

  // MB/s that each link is to carry, each way, and the share of the others' median; both 0: nothing
  // is asked for, and whoever was measured is fit.
  explicit LinkRates(double floor, double share = 0) : floor_(floor), share_(share) {}

  // The slower way of a pair; 0: they did not reach each other.
  void Note(const std::string& one, const std::string& other, double megabytes_per_second);
  // Another machine may have the name now.
  void Forget(const std::string& node);

  // What the link of these two is to carry.
  double Wanted(const std::string& one, const std::string& other) const;
  // Of all links of `node`, the least.
  double LeastWanted(const std::string& node) const;
  Fitness FitnessOf(const std::string& node) const;
  // Nothing is left to be found out about `node` with the partners that there are.
  bool IsSettled(const std::string& node, const std::vector<std::string>& partners) const;
  // Which of `whom` should measure next, and with which of `free`; nullopt: none. First those that
  // were never measured, each with the next one in order that was not either, so that all of a job
  // measure at once; then those of which it is not known who is slow. Both are ascending, and
  // `whom` are among the free ones.
  std::optional<std::pair<std::string, std::string>> NextPair(
      const std::vector<std::string>& whom, const std::vector<std::string>& free) const;
  // "3.1 MB/s with n1, 3 MB/s with n2".
  std::string Describe(const std::string& node) const;
  // Of all pairs: "3 links, 905 to 1210 MB/s, median 1100"; empty: none was measured.
  std::string Summary() const;
  // Those below half of the median of all others: "n3 and n4: 88 MB/s, the median of the 5 others
  // is 1100". For people: one measurement blames nobody.
  std::vector<std::string> OddLinks() const;

 private:
  using Rates = std::map<std::string, double>;  // by partner
  const Rates& Of(const std::string& node) const;
  bool IsSuspect(const std::string& node) const {
    return !Of(node).empty() && FitnessOf(node) == Fitness::kUnknown;
  }
  bool HasGoodLink(const std::string& node) const;
  // The next one of `free` after `node` that it was not measured with; nullptr: none.
  const std::string* PartnerOf(const std::string& node, const std::vector<std::string>& free,
                               bool of_the_new) const;

  // Ascending; without that of these two.
  std::vector<double> AllBut(const std::string& one, const std::string& other) const;
  // 0: there are too few others.
  double MedianWithout(const std::string& one, const std::string& other) const;

  double floor_, share_;
  std::map<std::string, Rates> rates_;
};

}  // namespace outlast
