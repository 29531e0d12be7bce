// The file behind a coordinator's journal (outlast/elastic/journal.h has its format), held by one
// coordinator at a time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/coordinator_journal.h"
#include "outlast/base/fd.h"
#include "outlast/elastic/journal.h"

namespace outlast {

// FOLDER/coordinator.journal, which a compaction replaces by rename(2), and
// FOLDER/coordinator.lock, which names the job and is locked while this lives: by the open file, so
// a coordinator that was killed holds nothing.
class JournalFile final : public CoordinatorJournal {
 public:
  // Makes the folder if it is not there, and cuts a torn tail, which is added to
  // FOLDER/coordinator.journal.cut. kAlreadyExists: another coordinator has it; named.
  // kFailedPrecondition: it is another job's. kDataLoss: it is damaged, or no journal. Else the
  // file system's.
  static absl::StatusOr<JournalFile> Open(const std::string& folder, const std::string& job);

  const CoordinatorState& state() const override { return content_.state; }
  const std::string& torn() const override { return content_.torn; }
  uint64_t least_incarnation() const override { return 1; }
  // On disk when it returns. kAborted: somebody else has written to the file, or it is another file
  // by now.
  absl::Status Append(std::string_view bytes) override;
  absl::Status Compact(std::string_view base) override;

 private:
  JournalFile() = default;
  absl::Status Lock(const std::string& folder, const std::string& job);
  absl::Status CheckIsOurs() const;
  absl::Status CheckSize(uint64_t found) const;

  UniqueFd lock_;
  UniqueFd file_;
  std::string folder_, path_;
  JournalContent content_;
  uint64_t size_ = 0;
};

}  // namespace outlast
