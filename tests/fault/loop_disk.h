// A small ext4 disk of a test's own: an image file, mounted through a loop device. For root alone.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "outlast/base/fd.h"

namespace outlast::testing {

class LoopDisk {
 public:
  // Both in a folder that exists; `mount_point` is made.
  LoopDisk(std::string image, std::string mount_point)
      : image_(std::move(image)), mount_point_(std::move(mount_point)) {}
  ~LoopDisk() { Unmount(); }
  LoopDisk(const LoopDisk&) = delete;
  LoopDisk& operator=(const LoopDisk&) = delete;

  // A new, empty one of `mib` MiB. False: not allowed here.
  bool Make(int mib) {
    return Shell("truncate -s " + std::to_string(mib) + "M " + image_ +
                 " && mkfs.ext4 -q -F -b 4096 -m 0 " + image_) &&
           Mount();
  }
  // Of an image that is there. ext4 replays its journal first.
  bool Mount() {
    std::filesystem::create_directories(mount_point_);
    is_mounted_ = Shell("mount -o loop " + image_ + " " + mount_point_);
    return is_mounted_;
  }
  void Unmount() {
    Thaw();
    if (std::exchange(is_mounted_, false)) umount2(mount_point_.c_str(), MNT_DETACH);
  }

  // Who writes then waits in the kernel, and not even SIGKILL ends it.
  bool Freeze() {
    is_frozen_ = Control(FIFREEZE);
    return is_frozen_;
  }
  void Thaw() { EXPECT_TRUE(!std::exchange(is_frozen_, false) || Control(FITHAW)); }

  const std::string& image() const { return image_; }
  const std::string& path() const { return mount_point_; }

 private:
  static bool Shell(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
  }
  bool Control(unsigned long order) const {
    const UniqueFd fd(open(mount_point_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    return fd.is_open() && ioctl(fd.get(), order, 0) == 0;
  }

  const std::string image_, mount_point_;
  bool is_mounted_ = false;
  bool is_frozen_ = false;
};

}  // namespace outlast::testing
