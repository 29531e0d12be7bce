#include "checkpoint/save_wire.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/hooks.h"

namespace outlast {
namespace {

void PutShape(PayloadWriter& writer, const Shape& shape) {
  writer.Int(static_cast<uint8_t>(shape.rank()));
  for (const int64_t length : shape.dimensions()) writer.Int(length);
}

Shape TakeShape(PayloadReader& reader) {
  const int rank = std::min<int>(reader.Int<uint8_t>(), kMaxDimensions);
  Shape shape = Shape::Zeros(rank);
  for (int i = 0; i < rank; ++i) shape.set(i, reader.Int<int64_t>());
  return shape;
}

absl::Status Malformed(std::string_view what) {
  return Error(absl::StatusCode::kInvalidArgument, "{}: cut or malformed message", what);
}

}  // namespace

std::string EncodeTable(const RankTable& table) {
  PayloadWriter writer;
  writer.Int(static_cast<uint32_t>(table.rows.size()))
      .Int(static_cast<uint32_t>(table.aliases.size()));
  for (const TensorRow& row : table.rows) {
    const HeldBox& held = row.boxes.front();
    writer.Text(row.name).Int(static_cast<uint8_t>(row.dtype)).Int(held.rank);
    PutShape(writer, row.global);
    PutShape(writer, held.box.offset);
    PutShape(writer, held.box.extent);
  }
  for (const auto& [name, of] : table.aliases) writer.Text(name).Text(of);
  return writer.bytes();
}

absl::StatusOr<RankTable> DecodeTable(std::string_view bytes) {
  PayloadReader reader(bytes);
  RankTable table;
  const auto rows = reader.Int<uint32_t>();
  const auto aliases = reader.Int<uint32_t>();
  for (uint32_t i = 0; i < rows && reader.ok(); ++i) {
    TensorRow row;
    row.name = std::string(reader.Text());
    const auto dtype = reader.Int<uint8_t>();
    if (dtype >= kDTypeCount) return Malformed("table of tensors");
    row.dtype = static_cast<DType>(dtype);
    HeldBox held;
    held.rank = reader.Int<uint32_t>();
    row.global = TakeShape(reader);
    held.box.offset = TakeShape(reader);
    held.box.extent = TakeShape(reader);
    row.boxes.push_back(std::move(held));
    table.rows.push_back(std::move(row));
  }
  for (uint32_t i = 0; i < aliases && reader.ok(); ++i) {
    std::string name(reader.Text());
    std::string of(reader.Text());
    table.aliases.emplace_back(std::move(name), std::move(of));
  }
  if (!reader.ok()) return Malformed("table of tensors");
  return table;
}

std::string EncodeTables(std::span<const std::string> tables) {
  PayloadWriter writer;
  writer.Int(static_cast<uint32_t>(tables.size()));
  for (const std::string& table : tables) writer.Text(table);
  return writer.bytes();
}

absl::StatusOr<std::vector<RankTable>> DecodeTables(std::string_view bytes) {
  PayloadReader reader(bytes);
  std::vector<RankTable> tables;
  const auto count = reader.Int<uint32_t>();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    OUTLAST_ASSIGN_OR_RETURN(RankTable table, DecodeTable(reader.Text()));
    tables.push_back(std::move(table));
  }
  if (!reader.ok()) return Malformed("tables of tensors");
  return tables;
}

namespace {

// JSON has no infinity.
double TolerableSeconds(const CheckpointerOptions& options) {
  return std::min(absl::ToDoubleSeconds(options.tolerable_loss),
                  std::numeric_limits<double>::max());
}

nlohmann::json JsonOf(const HookOptions& hooks) {
  nlohmann::json programs = nlohmann::json::array();
  for (const HookProgram& program : hooks.programs) {
    programs.push_back({{"name", program.name},
                        {"command", program.command},
                        {"deadline_s", absl::ToDoubleSeconds(program.deadline)}});
  }
  return {{"non_finite", hooks.non_finite == HookOptions::NonFinite::kVeto},
          {"non_finite_skip", hooks.non_finite_skip},
          {"programs", std::move(programs)}};
}

std::optional<std::vector<std::string>> TextsOf(const nlohmann::json& list) {
  if (!list.is_array()) return std::nullopt;
  std::vector<std::string> texts;
  for (const nlohmann::json& one : list) {
    if (!one.is_string()) return std::nullopt;
    texts.push_back(one);
  }
  return texts;
}

absl::StatusOr<HookOptions> HooksOf(const nlohmann::json& json) {
  const auto malformed = [] { return Malformed("hooks of a checkpointer"); };
  const nlohmann::json none;
  const auto member = [&](const nlohmann::json& in, const char* key) -> const nlohmann::json& {
    return in.is_object() && in.contains(key) ? in[key] : none;
  };
  const auto skip = TextsOf(member(json, "non_finite_skip"));
  const nlohmann::json& programs = member(json, "programs");
  if (!member(json, "non_finite").is_boolean() || !skip || !programs.is_array()) return malformed();
  HookOptions hooks;
  if (json["non_finite"]) hooks.non_finite = HookOptions::NonFinite::kVeto;
  hooks.non_finite_skip = *skip;
  for (const nlohmann::json& one : programs) {
    const auto command = TextsOf(member(one, "command"));
    if (!member(one, "name").is_string() || !command || !member(one, "deadline_s").is_number())
      return malformed();
    hooks.programs.push_back(
        {one["name"], *command, absl::Seconds(one["deadline_s"].get<double>())});
  }
  OUTLAST_RETURN_IF_ERROR(CheckHookOptions(hooks));
  return hooks;
}

}  // namespace

std::string EncodeOptions(const CheckpointerOptions& options) {
  const nlohmann::json json = {
      {"uri", options.uri},
      {"every", options.every.steps()},
      {"disk_bytes_per_second", options.disk_bytes_per_second},
      {"scrub_bytes_per_second", options.scrub_bytes_per_second},
      {"tolerable_loss_s", TolerableSeconds(options)},
      {"keep_last", options.keep_last},
      {"keep_every", options.keep_every},
      {"remote",
       {{"uri", options.remote.uri},
        {"every", options.remote.every.steps()},
        {"keep_last", options.remote.keep_last},
        {"keep_every", options.remote.keep_every},
        {"bytes_per_second", options.remote.bytes_per_second},
        {"stop_limit_s", absl::ToDoubleSeconds(options.remote.stop_limit)}}},
      {"hooks", JsonOf(options.hooks)},
      {"fresh", options.start == CheckpointerOptions::Start::kFresh},
      {"job", options.job},
      {"buffers", options.buffers},
      {"extras_bytes", static_cast<uint64_t>(options.extras_bytes)}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::StatusOr<CheckpointerOptions> DecodeOptions(std::string_view text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  using Json = nlohmann::json;
  const auto has_in = [](const Json& in, const char* key, bool (Json::*is)() const noexcept) {
    return in.contains(key) && (in[key].*is)();
  };
  const auto has = [&](const char* key, bool (Json::*is)() const noexcept) {
    return has_in(json, key, is);
  };
  if (!json.is_object() || !has("uri", &Json::is_string) ||
      !has("every", &Json::is_number_integer) ||
      !has("disk_bytes_per_second", &Json::is_number_unsigned) ||
      !has("scrub_bytes_per_second", &Json::is_number_unsigned) ||
      !has("tolerable_loss_s", &Json::is_number) || !has("keep_last", &Json::is_number_integer) ||
      !has("keep_every", &Json::is_number_integer) || !has("fresh", &Json::is_boolean) ||
      !has("job", &Json::is_string) || !has("buffers", &Json::is_number_integer) ||
      !has("extras_bytes", &Json::is_number_unsigned) || json["extras_bytes"] > kMaxExtrasBytes ||
      !has("remote", &Json::is_object)) {
    return Malformed("options of a checkpointer");
  }
  const Json& remote = json["remote"];
  if (!has_in(remote, "uri", &Json::is_string) ||
      !has_in(remote, "every", &Json::is_number_integer) ||
      !has_in(remote, "keep_last", &Json::is_number_integer) ||
      !has_in(remote, "keep_every", &Json::is_number_integer) ||
      !has_in(remote, "bytes_per_second", &Json::is_number_unsigned) ||
      !has_in(remote, "stop_limit_s", &Json::is_number)) {
    return Malformed("remote options of a checkpointer");
  }
  CheckpointerOptions options;
  if (!json.contains("hooks")) return Malformed("options of a checkpointer");
  OUTLAST_ASSIGN_OR_RETURN(options.hooks, HooksOf(json["hooks"]));
  options.remote.uri = remote["uri"];
  options.remote.every = remote["every"] > 0 ? Every::Steps(remote["every"]) : Every::Auto();
  options.remote.keep_last = remote["keep_last"];
  options.remote.keep_every = remote["keep_every"];
  options.remote.bytes_per_second = remote["bytes_per_second"];
  options.remote.stop_limit = absl::Seconds(remote["stop_limit_s"].get<double>());
  options.uri = json["uri"];
  options.every = json["every"] > 0 ? Every::Steps(json["every"]) : Every::Auto();
  options.disk_bytes_per_second = json["disk_bytes_per_second"];
  options.scrub_bytes_per_second = json["scrub_bytes_per_second"];
  options.tolerable_loss = absl::Seconds(json["tolerable_loss_s"].get<double>());
  options.keep_last = json["keep_last"];
  options.keep_every = json["keep_every"];
  options.start =
      json["fresh"] ? CheckpointerOptions::Start::kFresh : CheckpointerOptions::Start::kResume;
  options.job = json["job"];
  options.buffers = json["buffers"];
  options.extras_bytes = json["extras_bytes"];
  return options;
}

std::string RestoreChoice::Encode() const {
  PayloadWriter writer;
  writer.Int(static_cast<uint8_t>(source))
      .Int(step)
      .Int(generation)
      .Int(buffer)
      .Int(turn)
      .Int(served_by)
      .Int(served_turn)
      .Text(folder)
      .Text(error)
      .Int(static_cast<uint32_t>(mates.size()));
  for (const uint32_t rank : mates) writer.Int(rank);
  return writer.bytes();
}

absl::StatusOr<RestoreChoice> RestoreChoice::Decode(std::string_view payload) {
  PayloadReader reader(payload);
  RestoreChoice choice;
  const auto source = reader.Int<uint8_t>();
  choice.step = reader.Int<int64_t>();
  choice.generation = reader.Int<uint64_t>();
  choice.buffer = reader.Int<uint32_t>();
  choice.turn = reader.Int<uint32_t>();
  choice.served_by = reader.Int<uint32_t>();
  choice.served_turn = reader.Int<uint32_t>();
  choice.folder = std::string(reader.Text());
  choice.error = std::string(reader.Text());
  const auto mates = reader.Int<uint32_t>();
  for (uint32_t i = 0; i < mates && reader.ok(); ++i)
    choice.mates.push_back(reader.Int<uint32_t>());
  if (!reader.ok() || source > static_cast<uint8_t>(RestoreSource::kPeer))
    return Malformed("choice of a restore");
  choice.source = static_cast<RestoreSource>(source);
  return choice;
}

}  // namespace outlast
