// The little that this module needs around nlohmann's parser: what it does not check, and text that
// must stay as it was given.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace outlast {

bool IsUtf8(std::string_view text);

// `text`, which is UTF-8, as a JSON string with its quotes.
std::string Quoted(std::string_view text);
void AppendQuoted(std::string_view text, std::string& json);

// Deepest nesting of objects and arrays; brackets in strings do not count. For text of unknown
// quality, before it is parsed.
int NestingOf(std::string_view json);
// Objects and arrays that are still open at the end of `json`, a beginning of a text.
int OpenAt(std::string_view json);
// The index after the value that begins at `at`. For text of unknown quality: the end at the
// latest.
size_t EndOfValue(std::string_view json, size_t at);

// True for bytes that nlohmann's parser passes over but JSON forbids: a byte order mark, or a NUL
// (which ends its input).
bool HasHiddenBytes(std::string_view json);

// The members of a JSON object that is known to be valid, as they stand in the text: key with
// quotes, value. Duplicates stay.
std::vector<std::pair<std::string_view, std::string_view>> RawMembers(std::string_view object);

std::string ToBase64(std::string_view bytes);
// nullopt unless `text` is what ToBase64 makes.
std::optional<std::string> FromBase64(std::string_view text);

}  // namespace outlast
