// Names that must be there and are not yet to be seen: on NFS, Lustre and the like what another
// host has made, and synced, may appear here seconds later.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/base/clock.h"

namespace outlast {

// Patience for all the names of one task together: from the first that is missing on, so that a
// folder that has lost many costs it once. For one thread.
class LateNames {
 public:
  explicit LateNames(absl::Duration wait, Clock& clock = Clock::Real())
      : wait_(wait), clock_(clock) {}

  // How long to wait by the file system of `folder`: 0 where a name that cannot be seen is not
  // there.
  static absl::Duration WaitOf(const std::string& folder);

  // What `look` returns, a Status or StatusOr, once that is something else than kNotFound;
  // kNotFound when the time is over. `folder` holds the name.
  template <typename Look>
  auto Await(const std::string& folder, const Look& look) {
    auto found = look();
    while (absl::IsNotFound(StatusOf(found)) && Pause(folder)) found = look();
    return found;
  }

 private:
  static const absl::Status& StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static const absl::Status& StatusOf(const absl::StatusOr<T>& value) {
    return value.status();
  }
  bool Pause(const std::string& folder);

  const absl::Duration wait_;
  Clock& clock_;
  absl::Duration until_ = absl::InfiniteDuration();  // not yet known
  absl::Duration pause_ = absl::Milliseconds(5);
};

}  // namespace outlast
