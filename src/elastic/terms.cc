// The design had WELCOME carry a digest of the options, for agents to judge by. Texts in HELLO let
// the coordinator, which knows both sides, name the flag.
#include "outlast/elastic/terms.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "outlast/base/digest.h"

namespace outlast {
namespace {

constexpr size_t kMostBytes = 1024;  // of a value
constexpr size_t kShown = 60;        // of a value in a message
constexpr size_t kBefore = 20;       // of that, before the first difference

bool IsPlain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("_-./:=,+@%^").find(c) != std::string_view::npos;
}

std::string Quoted(const std::string& word) {
  if (!word.empty() && std::all_of(word.begin(), word.end(), IsPlain)) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// Without what would break the line, or a terminal.
std::string Printable(std::string_view text) {
  std::string shown;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      shown += "\\n";
    } else {
      shown += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
    }
  }
  return shown;
}

bool ContinuesCharacter(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

// The part of `value` around the place where it begins to differ.
std::string Around(const std::string& value, size_t differs) {
  size_t from = value.size() <= kShown || differs <= kBefore ? 0 : differs - kBefore;
  while (from > 0 && ContinuesCharacter(value[from])) --from;
  size_t to = std::min(value.size(), from + kShown);
  while (to < value.size() && ContinuesCharacter(value[to])) ++to;
  return fmt::format("{}{}{}", from > 0 ? "..." : "",
                     Printable(std::string_view(value).substr(from, to - from)),
                     to < value.size() ? "..." : "");
}

}  // namespace

Term MakeTerm(std::string flag, std::string_view value) {
  if (value.size() <= kMostBytes) return {std::move(flag), std::string(value)};
  const Sha256Digest digest = Sha256(value);
  return {std::move(flag), fmt::format("{} ... {} bytes, SHA-256 {}", value.substr(0, kMostBytes),
                                       value.size(), ToHex(std::span(digest)))};
}

std::string QuotedCommand(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + Quoted(word);
  return text;
}

std::string TermsThatDiffer(const Terms& found, const Terms& wanted) {
  std::string all;
  for (const Term& want : wanted) {
    const auto has = std::find_if(found.begin(), found.end(),
                                  [&](const Term& term) { return term.flag == want.flag; });
    if (has == found.end() || has->value == want.value) continue;
    const auto [at, other] =
        std::mismatch(has->value.begin(), has->value.end(), want.value.begin(), want.value.end());
    const auto differs = static_cast<size_t>(at - has->value.begin());
    all += fmt::format("{}{} {}, {} wanted", all.empty() ? "" : "; ", Printable(want.flag),
                       Around(has->value, differs), Around(want.value, differs));
  }
  return all;
}

}  // namespace outlast
