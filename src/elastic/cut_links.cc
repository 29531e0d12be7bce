#include "outlast/elastic/cut_links.h"

#include <algorithm>

namespace outlast {

std::vector<std::string> JudgeCutLinks(const CutLinks& links) {
  if (links.cut.empty()) return {};
  const bool most_are_cut = links.cut.size() > 1 && 2 * links.cut.size() > links.followers.size();
  const bool others_were_blamed =
      std::any_of(links.blamed_yet.begin(), links.blamed_yet.end(), [&](const std::string& node) {
        return std::find(links.cut.begin(), links.cut.end(), node) == links.cut.end();
      });
  if (most_are_cut || others_were_blamed) return {links.lead};
  return links.cut;
}

}  // namespace outlast
