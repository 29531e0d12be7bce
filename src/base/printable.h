// Texts from files and trainers, for terminals.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>

namespace outlast {

// Each control character as '?': nothing of `text` steers the terminal.
inline std::string Printable(std::string_view text) {
  std::string out(text);
  std::replace_if(
      out.begin(), out.end(),
      [](char c) { return std::iscntrl(static_cast<unsigned char>(c)) != 0; }, '?');
  return out;
}

}  // namespace outlast
