// A small, strict reader of Prometheus text 0.0.4 and OpenMetrics 1.0, for tests: what is wrong
// with a page, and its samples. (Rules: prometheus/docs exposition_formats.md, OpenMetrics
// specification.)
#pragma once

#include <algorithm>
#include <cstdlib>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace outlast::testing {

class MetricsLint {
 public:
  MetricsLint(const std::string& page, bool is_open_metrics) : is_open_(is_open_metrics) {
    if (page.empty() || page.back() != '\n') Wrong("the last line has no end");
    if (page.find('\r') != std::string::npos) Wrong("a carriage return");
    std::istringstream lines(page);
    for (std::string line; std::getline(lines, line);) Line(line);
    if (is_open_ && !has_end_) Wrong("no # EOF");
    CheckHistograms();
  }

  const std::vector<std::string>& wrong() const { return wrong_; }
  // By name and labels as they stand: `outlast_ranks{job="a",state="running"}`.
  const std::map<std::string, double>& samples() const { return samples_; }
  double value(const std::string& series) const {
    const auto found = samples_.find(series);
    return found == samples_.end() ? -1 : found->second;
  }

 private:
  void Wrong(const std::string& what) { wrong_.push_back(what); }

  void Line(const std::string& line) {
    if (has_end_) return Wrong("behind # EOF: " + line);
    if (line == "# EOF") {
      has_end_ = is_open_;
      if (!is_open_) Wrong("# EOF in 0.0.4");
      return;
    }
    if (line.starts_with("# ")) return Comment(line);
    Sample(line);
  }

  void Comment(const std::string& line) {
    static const std::regex kComment("# (HELP|TYPE|UNIT) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)");
    std::smatch match;
    if (!std::regex_match(line, match, kComment)) return Wrong("no HELP, TYPE or UNIT: " + line);
    const std::string keyword = match[1], name = match[2], rest = match[3];
    if (!seen_.insert(keyword + " " + name).second) Wrong("twice: " + line);
    if (name != family_) {
      if (!families_.insert(name).second) Wrong("lines of one family apart: " + line);
      family_ = name;
      type_.clear();
      has_samples_ = false;
    }
    if (has_samples_) Wrong("behind the family's samples: " + line);
    if (keyword == "TYPE") type_ = rest;
    if (keyword == "UNIT" && !name.ends_with("_" + rest)) Wrong("no suffix of the name: " + line);
    const bool ends_in_total = name.ends_with("_total");
    if (keyword == "TYPE" && rest == "counter" && ends_in_total == is_open_)
      Wrong("a counter's family: " + line);
  }

  std::set<std::string> SuffixesOf() const {
    if (type_ == "histogram") return {"_bucket", "_sum", "_count"};
    if (is_open_ && type_ == "counter") return {"_total"};
    if (is_open_ && type_ == "info") return {"_info"};
    return {""};
  }

  void Sample(const std::string& line) {
    static const std::regex kSample(
        "([a-zA-Z_:][a-zA-Z0-9_:]*)(\\{((?:[a-zA-Z_][a-zA-Z0-9_]*=\"(?:[^\"\\\\\n]|\\\\[\\\\\"n])*"
        "\""
        ",?)*)\\})? (\\S+)");
    std::smatch match;
    if (!std::regex_match(line, match, kSample)) return Wrong("no sample: " + line);
    const std::string name = match[1], labels = match[3], value = match[4];
    has_samples_ = true;
    if (type_.empty()) Wrong("no TYPE before: " + line);
    const auto suffixes = SuffixesOf();
    if (!name.starts_with(family_) || suffixes.count(name.substr(family_.size())) == 0)
      Wrong("a sample of another family: " + line);
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (end == value.c_str() || *end != '\0') Wrong("no number: " + line);
    if (type_ == "counter" && !(number >= 0)) Wrong("a counter below 0: " + line);
    if (labels.find("rank=") != std::string::npos || labels.find("step=") != std::string::npos)
      Wrong("a label of a rank or a step: " + line);
    if (!samples_.emplace(line.substr(0, line.rfind(' ')), number).second)
      Wrong("a series twice: " + line);
    if (type_ == "histogram" && name.ends_with("_bucket")) buckets_[family_].push_back(number);
    if (type_ == "histogram" && name.ends_with("_count")) counts_[family_] = number;
  }

  void CheckHistograms() {
    for (const auto& [family, buckets] : buckets_) {
      if (!std::is_sorted(buckets.begin(), buckets.end())) Wrong("buckets fall: " + family);
      if (buckets.back() != counts_[family]) Wrong("le=\"+Inf\" is not the count: " + family);
    }
  }

  const bool is_open_;
  bool has_end_ = false, has_samples_ = false;
  std::string family_, type_;
  std::set<std::string> families_, seen_;
  std::map<std::string, double> samples_;
  std::map<std::string, std::vector<double>> buckets_;  // of families of one series
  std::map<std::string, double> counts_;
  std::vector<std::string> wrong_;
};

}  // namespace outlast::testing
