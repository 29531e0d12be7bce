// What must be the same on all agents of a job, as they tell it each other: flags, with their
// values as text. A digest stands in for the rest of a value that is long, so equal terms are
// equal values, and a message can name the flag, what was found and what is wanted.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace outlast {

struct Term {
  std::string flag;  // "--max-restarts"; "the command"
  std::string value;
  bool operator==(const Term&) const = default;
};
using Terms = std::vector<Term>;

// `value` whole, or its first KiB and the SHA-256 of all of it.
Term MakeTerm(std::string flag, std::string_view value);

// The words of a command as a shell would be given them.
std::string QuotedCommand(const std::vector<std::string>& words);

// "--max-restarts 5, 3 wanted; -n 4, 2 wanted": flags that both have, with values that differ, in
// one line that any terminal may be shown. A flag that one side lacks is not judged. Empty: alike.
std::string TermsThatDiffer(const Terms& found, const Terms& wanted);

}  // namespace outlast
