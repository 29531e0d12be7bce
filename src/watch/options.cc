#include "watch/options.h"

#include <array>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"

namespace outlast {
namespace {

using nlohmann::json;

struct NamedLimit {
  const char* name;
  absl::Duration FirstLimits::*field;
  bool may_pass_ceiling;
};
constexpr std::array<NamedLimit, 6> kFirstLimits = {
    {{"init", &FirstLimits::init, true},
     {"rebuild", &FirstLimits::rebuild, true},
     {"compile", &FirstLimits::compile, false},
     {"step", &FirstLimits::step, false},
     {"checkpoint", &FirstLimits::checkpoint, false},
     {"outside", &FirstLimits::outside, false}}};

struct NamedDuration {
  const char* name;
  absl::Duration WatchdogOptions::*field;
  bool may_be_infinite;
};
constexpr std::array<NamedDuration, 4> kDurations = {
    {{"poll", &WatchdogOptions::poll, false},
     {"floor", &WatchdogOptions::floor, false},
     {"ceiling", &WatchdogOptions::ceiling, true},
     {"looks_apart", &WatchdogOptions::looks_apart, false}}};

absl::Status CheckDuration(const char* name, absl::Duration value, bool may_be_infinite) {
  if (value <= absl::ZeroDuration()) {
    return Error(absl::StatusCode::kInvalidArgument, "watchdog: {} is {}; more than zero is wanted",
                 name, absl::FormatDuration(value));
  }
  if (!may_be_infinite && value == absl::InfiniteDuration()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "watchdog: {} is infinite; a finite one is wanted", name);
  }
  return absl::OkStatus();
}

absl::Status CheckFirstLimit(const NamedLimit& limit, const WatchdogOptions& options) {
  const absl::Duration value = options.first_limits.*limit.field;
  OUTLAST_RETURN_IF_ERROR(
      CheckDuration(fmt::format("first_limits.{}", limit.name).c_str(), value, true));
  if (value < options.floor) {
    return Error(
        absl::StatusCode::kInvalidArgument,
        "watchdog: first_limits.{} ({}) is below floor ({}); floor <= first limit is wanted",
        limit.name, absl::FormatDuration(value), absl::FormatDuration(options.floor));
  }
  if (!limit.may_pass_ceiling && value != absl::InfiniteDuration() && value > options.ceiling) {
    return Error(
        absl::StatusCode::kInvalidArgument,
        "watchdog: first_limits.{} ({}) is above ceiling ({}); first limit <= ceiling is wanted",
        limit.name, absl::FormatDuration(value), absl::FormatDuration(options.ceiling));
  }
  return absl::OkStatus();
}

absl::Status ReadDuration(const json& object, const char* name, absl::Duration* value) {
  const std::string key = std::string(name) + "_ns";
  const auto found = object.find(key);
  if (found == object.end()) return absl::OkStatus();
  if (!found->is_number_integer()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "watchdog options: {} is {}; an integer is wanted", key, found->type_name());
  }
  const auto nanos = found->get<int64_t>();
  *value = nanos == std::numeric_limits<int64_t>::max() ? absl::InfiniteDuration()
                                                        : absl::Nanoseconds(nanos);
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const WatchdogOptions& options) {
  for (const NamedDuration& duration : kDurations) {
    OUTLAST_RETURN_IF_ERROR(
        CheckDuration(duration.name, options.*duration.field, duration.may_be_infinite));
  }
  if (options.floor > options.ceiling) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "watchdog: floor ({}) is above ceiling ({}); floor <= ceiling is wanted",
                 absl::FormatDuration(options.floor), absl::FormatDuration(options.ceiling));
  }
  for (const NamedLimit& limit : kFirstLimits)
    OUTLAST_RETURN_IF_ERROR(CheckFirstLimit(limit, options));
  if (options.warm_up_steps < 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "watchdog: warm_up_steps is {}; zero or more is wanted", options.warm_up_steps);
  }
  return absl::OkStatus();
}

absl::Status CheckNesting(const WatchdogOptions& options, const JobDeadlines& job) {
  const absl::Duration rebuild = options.first_limits.rebuild;
  const absl::Duration there = job.respawn + job.commit_ack + job.connect;
  if (rebuild <= there) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "watchdog: first_limits.rebuild is {}, and a new process may take {} (respawn {}, "
                 "acknowledgement {}, connect {}): a longer rebuild limit wanted",
                 absl::FormatDuration(rebuild), absl::FormatDuration(there),
                 absl::FormatDuration(job.respawn), absl::FormatDuration(job.commit_ack),
                 absl::FormatDuration(job.connect));
  }
  const absl::Duration acts = options.ceiling + job.soft_abort;
  if (options.ceiling == absl::InfiniteDuration() || job.collective_timeout > acts)
    return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "watchdog: ceiling is {}, and --collective-timeout {}: longer than the ceiling and "
               "the soft abort ({}) wanted, else the trainer's library ends the rank first",
               absl::FormatDuration(options.ceiling), absl::FormatDuration(job.collective_timeout),
               absl::FormatDuration(job.soft_abort));
}

std::string EncodeWatchOptions(const WatchdogOptions& options) {
  json first = json::object();
  for (const NamedLimit& limit : kFirstLimits) {
    first[std::string(limit.name) + "_ns"] =
        absl::ToInt64Nanoseconds(options.first_limits.*limit.field);
  }
  json encoded = {{"mode", options.mode == WatchMode::kAct ? "act" : "observe"},
                  {"warm_up_steps", options.warm_up_steps},
                  {"first_limits", std::move(first)}};
  for (const NamedDuration& duration : kDurations) {
    encoded[std::string(duration.name) + "_ns"] = absl::ToInt64Nanoseconds(options.*duration.field);
  }
  return encoded.dump();
}

absl::StatusOr<WatchdogOptions> DecodeWatchOptions(std::string_view text) {
  const json encoded = json::parse(text, nullptr, false);
  if (!encoded.is_object())
    return Error(absl::StatusCode::kInvalidArgument, "watchdog options: no JSON object");
  WatchdogOptions options;
  if (const auto mode = encoded.find("mode"); mode != encoded.end()) {
    if (*mode != "act" && *mode != "observe") {
      return Error(absl::StatusCode::kInvalidArgument,
                   "watchdog options: mode is {}; act or observe is wanted",
                   mode->is_string() ? mode->get<std::string>() : mode->type_name());
    }
    options.mode = *mode == "act" ? WatchMode::kAct : WatchMode::kObserve;
  }
  if (const auto steps = encoded.find("warm_up_steps"); steps != encoded.end()) {
    if (!steps->is_number_integer())
      return Error(absl::StatusCode::kInvalidArgument,
                   "watchdog options: warm_up_steps is no integer");
    options.warm_up_steps = steps->get<int>();
  }
  for (const NamedDuration& duration : kDurations) {
    OUTLAST_RETURN_IF_ERROR(ReadDuration(encoded, duration.name, &(options.*duration.field)));
  }
  if (const auto first = encoded.find("first_limits"); first != encoded.end()) {
    if (!first->is_object())
      return Error(absl::StatusCode::kInvalidArgument,
                   "watchdog options: first_limits is no object");
    for (const NamedLimit& limit : kFirstLimits) {
      OUTLAST_RETURN_IF_ERROR(
          ReadDuration(*first, limit.name, &(options.first_limits.*limit.field)));
    }
  }
  OUTLAST_RETURN_IF_ERROR(Validate(options));
  return options;
}

}  // namespace outlast
