#include "outlast/data/cursor.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace outlast {
namespace {

using nlohmann::json;

constexpr std::string_view kFormat = "outlast.cursor";
constexpr int64_t kVersion = 1;
constexpr size_t kLongestText = 16384;

std::string_view NameOf(Remainder remainder) {
  return remainder == Remainder::kDrop ? "drop" : "pad";
}

absl::Status Bad(std::string_view what) {
  return Error(absl::StatusCode::kInvalidArgument, "cursor text: {}", what);
}

// A member that counts something. The upper bound is far beyond any run, and leaves room to count
// on.
absl::StatusOr<int64_t> CountOf(const json& object, const char* name) {
  const auto member = object.find(name);
  if (member == object.end() || !member->is_number_integer())
    return Bad(fmt::format("'{}': an integer wanted", name));
  constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max() / 2;
  if (!member->is_number_unsigned() || member->get<uint64_t>() > kLargest) {
    return Bad(
        fmt::format("'{}': {} found, a count from 0 to {} wanted", name, member->dump(), kLargest));
  }
  return member->get<int64_t>();
}

absl::StatusOr<uint64_t> SeedOf(const json& object) {
  const auto member = object.find("seed");
  if (member == object.end() || !member->is_number_unsigned())
    return Bad("'seed': an integer from 0 wanted");
  return member->get<uint64_t>();
}

absl::StatusOr<std::string> StringOf(const json& object, const char* name) {
  const auto member = object.find(name);
  if (member == object.end() || !member->is_string())
    return Bad(fmt::format("'{}': a string wanted", name));
  return member->get<std::string>();
}

// The one source object in `text`.
absl::StatusOr<json> SourceOf(std::string_view text) {
  if (text.size() > kLongestText)
    return Bad(fmt::format("{} bytes found, at most {} wanted", text.size(), kLongestText));
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) return Bad("a JSON object wanted");
  OUTLAST_ASSIGN_OR_RETURN(const std::string format, StringOf(object, "format"));
  if (format != kFormat)
    return Bad(fmt::format("'format': '{}' found, '{}' wanted", format.substr(0, 64), kFormat));
  OUTLAST_ASSIGN_OR_RETURN(const int64_t version, CountOf(object, "version"));
  if (version != kVersion)
    return Bad(fmt::format("'version': {} found, {} wanted", version, kVersion));
  const auto sources = object.find("sources");
  if (sources == object.end() || !sources->is_array()) return Bad("'sources': a list wanted");
  if (sources->size() != 1)
    return Bad(fmt::format("'sources': {} found, one wanted", sources->size()));
  if (!sources->front().is_object()) return Bad("'sources': a list of objects wanted");
  return sources->front();
}

absl::Status CheckSameOrder(const CursorOptions& options, const json& source) {
  OUTLAST_ASSIGN_OR_RETURN(const int64_t samples, CountOf(source, "samples"));
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t seed, SeedOf(source));
  OUTLAST_ASSIGN_OR_RETURN(const std::string remainder, StringOf(source, "remainder"));
  if (remainder != "drop" && remainder != "pad") {
    return Bad(fmt::format("'remainder': '{}' found, drop or pad wanted", remainder.substr(0, 64)));
  }
  constexpr auto kOther = absl::StatusCode::kFailedPrecondition;
  if (samples != options.samples) {
    return Error(kOther, "cursor: saved over {} samples, the source has {}", samples,
                 options.samples);
  }
  if (seed != options.seed)
    return Error(kOther, "cursor: saved with seed {}, this run has {}", seed, options.seed);
  if (remainder != NameOf(options.remainder)) {
    return Error(kOther, "cursor: saved with remainder {}, this run has {}", remainder,
                 NameOf(options.remainder));
  }
  return absl::OkStatus();
}

// Each epoch before consumed at most all samples, and this one exactly `position`.
bool IsPossible(int64_t samples, int64_t epoch, int64_t position, int64_t consumed) {
  if (position > samples || consumed < position) return false;
  const int64_t before = consumed - position;
  return samples == 0 ? before == 0 : before / samples + (before % samples != 0 ? 1 : 0) <= epoch;
}

}  // namespace

Cursor::Cursor(const CursorOptions& options)
    : options_(options), order_(options.samples, options.seed, 0) {}

absl::StatusOr<Cursor> Cursor::Create(const CursorOptions& options) {
  if (options.samples < 0 || options.batch < 1 || options.batch > kLargestBatch) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "cursor: {} samples in batches of {}, at least 0 in batches of 1 to {} wanted",
                 options.samples, options.batch, kLargestBatch);
  }
  return Cursor(options);
}

absl::StatusOr<Cursor> Cursor::FromText(const CursorOptions& options, std::string_view text) {
  OUTLAST_ASSIGN_OR_RETURN(Cursor cursor, Create(options));
  OUTLAST_ASSIGN_OR_RETURN(const json source, SourceOf(text));
  OUTLAST_ASSIGN_OR_RETURN(cursor.epoch_, CountOf(source, "epoch"));
  OUTLAST_ASSIGN_OR_RETURN(cursor.position_, CountOf(source, "position"));
  OUTLAST_ASSIGN_OR_RETURN(cursor.consumed_, CountOf(source, "consumed"));
  OUTLAST_RETURN_IF_ERROR(CheckSameOrder(options, source));
  if (!IsPossible(options.samples, cursor.epoch_, cursor.position_, cursor.consumed_)) {
    return Bad(fmt::format("epoch {}, position {} and {} consumed cannot be of {} samples",
                           cursor.epoch_, cursor.position_, cursor.consumed_, options.samples));
  }
  cursor.order_ = SampleOrder(options.samples, options.seed, cursor.epoch_);
  cursor.EnterNextEpochIfDone();
  return cursor;
}

std::string Cursor::ToText() const {
  const json source = {{"samples", options_.samples},
                       {"seed", options_.seed},
                       {"remainder", NameOf(options_.remainder)},
                       {"epoch", epoch_},
                       {"position", position_},
                       {"consumed", consumed_}};
  return json{{"format", kFormat}, {"version", kVersion}, {"sources", json::array({source})}}
      .dump();
}

int64_t Cursor::steps_per_epoch() const {
  const int64_t whole = options_.samples / options_.batch;
  const bool has_rest = options_.samples % options_.batch != 0;
  return options_.remainder == Remainder::kPad && has_rest ? whole + 1 : whole;
}

absl::Status Cursor::CheckNotEmpty() const {
  if (steps_per_epoch() > 0) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "cursor: {} samples give no step of {} (remainder {})", options_.samples,
               options_.batch, NameOf(options_.remainder));
}

int64_t Cursor::NextCount() const { return std::min(options_.batch, options_.samples - position_); }

absl::StatusOr<std::vector<int64_t>> Cursor::StepIds() const {
  OUTLAST_RETURN_IF_ERROR(CheckNotEmpty());
  std::vector<int64_t> ids(static_cast<size_t>(options_.batch), kPadding);
  for (int64_t i = 0; i < NextCount(); ++i)
    ids[static_cast<size_t>(i)] = order_.IdAt(position_ + i);
  return ids;
}

absl::StatusOr<std::vector<int64_t>> Cursor::RankIds(int rank, int world) const {
  if (world < 1 || rank < 0 || rank >= world) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "cursor: rank {} of {}, a rank in [0, world) wanted", rank, world);
  }
  OUTLAST_RETURN_IF_ERROR(CheckNotEmpty());
  const int64_t places = (options_.batch - 1) / world + 1;
  std::vector<int64_t> ids(static_cast<size_t>(places), kPadding);
  for (int64_t i = 0; i < places; ++i) {
    const int64_t place = rank * places + i;
    if (place < NextCount()) ids[static_cast<size_t>(i)] = order_.IdAt(position_ + place);
  }
  return ids;
}

absl::Status Cursor::Advance() {
  OUTLAST_RETURN_IF_ERROR(CheckNotEmpty());
  consumed_ += NextCount();
  position_ += NextCount();
  EnterNextEpochIfDone();
  return absl::OkStatus();
}

void Cursor::EnterNextEpochIfDone() {
  const int64_t left = options_.samples - position_;
  const bool done = options_.remainder == Remainder::kDrop ? left < options_.batch : left == 0;
  if (!done || steps_per_epoch() == 0) return;
  ++epoch_;
  position_ = 0;
  order_ = SampleOrder(options_.samples, options_.seed, epoch_);
}

}  // namespace outlast
