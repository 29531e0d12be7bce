// A folder of a test's own.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>
#include <system_error>

namespace outlast {

// A fresh folder that goes with its test; of a test that failed it stays, for a look.
class TempFolder {
 public:
  // In $TMPDIR, else in /tmp.
  TempFolder() : TempFolder(std::filesystem::temp_directory_path().string()) {}
  explicit TempFolder(const std::string& base) : path_(base + "/outlast_test_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) abort();
  }
  ~TempFolder() {
    std::error_code ignored;
    if (!::testing::Test::HasFailure()) std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace outlast
