#include "run/pod.h"

#include <charconv>
#include <limits>
#include <string_view>

#include "base/error.h"

namespace outlast {
namespace {

constexpr char kIndex[] = "JOB_COMPLETION_INDEX";

class Reader {
 public:
  explicit Reader(const Variables& variables) : variables_(variables) {}

  // Empty: it is not set.
  std::string Text(const char* name) {
    const char* text = variables_(name);
    if (text == nullptr || *text == '\0') return {};
    read_.push_back({name, text});
    return text;
  }
  absl::StatusOr<std::optional<int>> Number(const char* name, int least) {
    const std::string text = Text(name);
    if (text.empty()) return std::nullopt;
    int number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && end == text.data() + text.size() && number >= least) return number;
    return Error(absl::StatusCode::kInvalidArgument, "{}='{}': a whole number from {} to {} wanted",
                 name, text, least, std::numeric_limits<int>::max());
  }
  std::vector<Variable> Take() { return std::move(read_); }

 private:
  const Variables& variables_;
  std::vector<Variable> read_;
};

absl::Status Contradiction(std::string_view one, std::string_view other, std::string_view wanted) {
  return Error(absl::StatusCode::kInvalidArgument, "contradictory environment: {} and {}: {}", one,
               other, wanted);
}

// A host name that begins with `prefix`, as the pods' do, ends with `rest`; any other is a node's.
absl::Status CheckHost(const std::string& host, const std::string& prefix, const std::string& rest,
                       std::string_view from) {
  if (!host.starts_with(prefix)) return absl::OkStatus();
  const std::string wanted = prefix + rest;
  if (host.substr(0, host.find('.')) == wanted) return absl::OkStatus();
  return Contradiction(fmt::format("HOSTNAME={}", host), from,
                       fmt::format("{} wanted, or one of the two unset", wanted));
}

}  // namespace

std::string PodClaim::Text() const {
  std::string text;
  for (const Variable& variable : variables)
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", variable.name, variable.value);
  return text;
}

absl::StatusOr<std::optional<PodClaim>> FindPod(const Variables& variables) {
  Reader reader(variables);
  OUTLAST_ASSIGN_OR_RETURN(const std::optional<int> index, reader.Number(kIndex, 0));
  if (!index) return std::nullopt;
  PodClaim pod{.index = *index, .node = {}, .host = reader.Text("HOSTNAME"), .variables = {}};
  const std::string at = fmt::format("{}={}", kIndex, pod.index);

  const std::string job = reader.Text("JOB_NAME"), set = reader.Text("JOBSET_NAME"),
                    replicated = reader.Text("REPLICATED_JOB_NAME");
  OUTLAST_ASSIGN_OR_RETURN(const std::optional<int> job_index, reader.Number("JOB_INDEX", 0));
  OUTLAST_ASSIGN_OR_RETURN(const std::optional<int> size, reader.Number("PROCESSES_IN_JOB", 1));
  if (size && pod.index >= *size) {
    return Contradiction(at, fmt::format("PROCESSES_IN_JOB={}", *size),
                         "an index below the number of pods wanted");
  }
  const std::string number = fmt::format("{}", pod.index);
  if (!job.empty()) OUTLAST_RETURN_IF_ERROR(CheckHost(pod.host, job + "-", number, at));
  if (!set.empty() && !replicated.empty() && job_index) {
    const std::string from = fmt::format("JOBSET_NAME={} REPLICATED_JOB_NAME={} JOB_INDEX={} {}",
                                         set, replicated, *job_index, at);
    const std::string prefix = fmt::format("{}-{}-", set, replicated);
    const std::string name = fmt::format("{}{}", prefix, *job_index);
    if (!job.empty() && job != name)
      return Contradiction(fmt::format("JOB_NAME={}", job), from, name + " wanted");
    OUTLAST_RETURN_IF_ERROR(
        CheckHost(pod.host, prefix, fmt::format("{}-{}", *job_index, number), from));
  }
  // A Job's index alone says nothing of other Jobs' pods.
  if (!job_index || *job_index == 0) {
    pod.node = pod.index;
  } else if (size) {
    pod.node = *job_index * *size + pod.index;
  }
  pod.variables = reader.Take();
  return pod;
}

}  // namespace outlast
