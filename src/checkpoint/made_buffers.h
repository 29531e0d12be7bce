// What the save service makes of the ranks' tables, on the root's thread or anew from what a former
// keeper left.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/save_service.h"

namespace outlast {

struct SaveService::MadeBuffers {
  int world = 0;
  std::string plan;
  // By slot.
  std::vector<RankTable> rank_tables;
  std::vector<Assignment> assignments;
  std::vector<std::vector<Buffer>> buffers;
  UniqueFd tables_fd, table_fd;
  std::unique_ptr<SealTable> table;
};

}  // namespace outlast
