#include "store/late_names.h"

#include <sys/vfs.h>

#include <algorithm>
#include <cstdint>

#include "store/folder.h"

namespace outlast {
namespace {

// NFS shows new names after at most acdirmax (60 s as delivered, 3 s after a change that it saw).
constexpr absl::Duration kNetworkWait = absl::Seconds(10);
constexpr absl::Duration kLongestPause = absl::Milliseconds(250);

// statfs(2), and the file systems' own sources.
bool IsOverANetwork(uint32_t type) {
  switch (type) {
    case 0x6969:      // NFS
    case 0x0bd00bd0:  // Lustre
    case 0x65735546:  // FUSE: sshfs, s3fs, GlusterFS, GPFS clients ...
    case 0x00c36400:  // Ceph
    case 0x47504653:  // GPFS
    case 0x19830326:  // BeeGFS
    case 0xff534d42:  // CIFS
    case 0xfe534d42:  // SMB2
    case 0x01021997:  // 9P
      return true;
    default:
      return false;
  }
}

}  // namespace

absl::Duration LateNames::WaitOf(const std::string& folder) {
  struct statfs facts;
  if (statfs(folder.c_str(), &facts) != 0) return absl::ZeroDuration();
  return IsOverANetwork(static_cast<uint32_t>(facts.f_type)) ? kNetworkWait : absl::ZeroDuration();
}

bool LateNames::Pause(const std::string& folder) {
  const absl::Duration now = clock_.Uptime();
  until_ = std::min(until_, now + wait_);
  if (now >= until_) return false;
  clock_.SleepFor(std::min(pause_, until_ - now));
  pause_ = std::min(2 * pause_, kLongestPause);
  // Makes an NFS client ask its server anew, also about names that it knows to be missing.
  (void)ListFolder(folder);
  return true;
}

}  // namespace outlast
