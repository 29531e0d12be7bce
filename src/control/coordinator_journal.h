// Where a coordinator's records are kept.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "outlast/elastic/coordinator_state.h"

namespace outlast {

// Used by one thread. There is one coordinator at a time that has it; whoever is not it any more is
// told so by Append.
class CoordinatorJournal {
 public:
  virtual ~CoordinatorJournal() = default;
  // What it held when it was opened.
  virtual const CoordinatorState& state() const = 0;
  // What was cut off, for people; empty: nothing.
  virtual const std::string& torn() const = 0;
  // The coordinator that goes on from here has at least this incarnation.
  virtual uint64_t least_incarnation() const = 0;
  // One record, kept when it returns. kAborted: somebody else has the journal by now. After an
  // error nothing may be appended any more.
  virtual absl::Status Append(std::string_view bytes) = 0;
  // `base` in place of all that was appended (EncodeJournalBase). kAborted as above; after any
  // other error the journal is as it was, and goes on.
  virtual absl::Status Compact(std::string_view base) = 0;
};

}  // namespace outlast
