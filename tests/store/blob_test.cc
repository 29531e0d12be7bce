// The Blob contract against the embedded stores, and what is theirs alone.
#include "outlast/store/blob.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "outlast/base/plugins.h"
#include "outlast/base/status.h"
#include "outlast/testing/blob_contract.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class BlobContractTest : public ::testing::TestWithParam<testing::BlobContractCase> {};

TEST_P(BlobContractTest, IsKeptInMemory) {
  const auto blob = MakeMemoryBlob();
  EXPECT_EQ(GetParam().check(*blob), absl::OkStatus());
}

TEST_P(BlobContractTest, IsKeptByAFolder) {
  const TempFolder folder;
  const auto blob = MakeFolderBlob("file://" + folder.path() + "/store").value();
  EXPECT_EQ(GetParam().check(*blob), absl::OkStatus());
}

INSTANTIATE_TEST_SUITE_P(Embedded, BlobContractTest, ::testing::ValuesIn(testing::BlobContract()),
                         [](const auto& one) { return one.param.name; });

TEST(FolderBlob, LeavesNoEmptyFoldersAndNoTemporaryFiles) {
  const TempFolder folder;
  const auto blob = MakeFolderBlob(folder.path()).value();
  ASSERT_TRUE(PutSmall(*blob, "a/b/c", "x", PutMode::kCreate).ok());
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path() + "/a/b"), {}), 1);
  ASSERT_TRUE(blob->Remove("a/b/c", {}).ok());
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(FolderBlob, SaysSoWhenItCannotList) {
  const TempFolder folder;
  const auto blob = MakeFolderBlob(folder.path() + "/store").value();
  fs::remove_all(folder.path() + "/store");
  const auto listed = blob->List("", "", 10, {});
  EXPECT_FALSE(listed.ok());
  EXPECT_THAT(std::string(MessageOf(listed.status())), HasSubstr(folder.path()));
}

// What a killed Put leaves is no object.
TEST(FolderBlob, DoesNotListWhatAKilledPutLeft) {
  const TempFolder folder;
  const auto blob = MakeFolderBlob(folder.path()).value();
  std::ofstream(folder.path() + "/.outlast-put-0123456789abcdef") << "half";
  EXPECT_TRUE(ListAll(*blob, "").value().empty());
}

TEST(FolderBlob, SweepsWhatAKilledPutLeftADayAgo) {
  const TempFolder folder;
  const auto blob = MakeFolderBlob(folder.path()).value();
  const std::string old = folder.path() + "/.outlast-put-old",
                    fresh = folder.path() + "/.outlast-put-fresh";
  std::ofstream(old) << "half";
  std::ofstream(fresh) << "half";
  fs::last_write_time(old, fs::file_time_type::clock::now() - std::chrono::hours(25));
  ASSERT_TRUE(PutSmall(*blob, "a", "x", PutMode::kCreate).ok());
  EXPECT_FALSE(fs::exists(old));
  EXPECT_TRUE(fs::exists(fresh));
}

TEST(FolderBlob, FollowsNoSymlink) {
  const TempFolder folder;
  const auto blob = MakeFolderBlob(folder.path()).value();
  fs::create_symlink("/etc/passwd", folder.path() + "/a");
  EXPECT_TRUE(ListAll(*blob, "").value().empty());
  EXPECT_FALSE(GetSmall(*blob, "a", 1 << 20).ok());
}

TEST(GetSmall, RefusesALargerOneBeforeItIsRead) {
  const auto blob = MakeMemoryBlob();
  ASSERT_TRUE(PutSmall(*blob, "a", "12345", PutMode::kCreate).ok());
  EXPECT_EQ(GetSmall(*blob, "a", 4).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetSmall(*blob, "a", 5).value(), "12345");
}

TEST(Plugins, MakeWhatTheSchemeNames) {
  const TempFolder folder;
  Plugins plugins;
  ASSERT_TRUE(RegisterStores(plugins).ok());
  EXPECT_EQ(plugins.Make<Blob>("file://" + folder.path()).value()->uri(),
            "file://" + folder.path());
  EXPECT_EQ(plugins.Make<Blob>(folder.path()).value()->uri(), "file://" + folder.path());
  EXPECT_EQ(plugins.Make<Blob>("memory://").value()->uri(), "memory://");
}

TEST(Plugins, NameTheKnownSchemesWhenOneIsUnknown) {
  Plugins plugins;
  ASSERT_TRUE(RegisterStores(plugins).ok());
  const auto made = plugins.Make<Blob>("gs://bucket");
  EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(MessageOf(made.status())),
              HasSubstr("'gs', a path, file://, memory:// wanted"));
}

TEST(Plugins, TakeASchemeOnce) {
  Plugins plugins;
  ASSERT_TRUE(RegisterStores(plugins).ok());
  EXPECT_EQ(RegisterStores(plugins).code(), absl::StatusCode::kAlreadyExists);
}

// "slow+memory://": the maker of "slow" makes what follows.
TEST(Plugins, NestBySchemesWithAPlus) {
  Plugins plugins;
  ASSERT_TRUE(RegisterStores(plugins).ok());
  std::string inner;
  ASSERT_TRUE(plugins.Of<Blob>()
                  .Add("slow",
                       [&](const std::string& uri, const Plugins& all) {
                         inner = uri.substr(uri.find('+') + 1);
                         return all.Make<Blob>(inner);
                       })
                  .ok());
  EXPECT_TRUE(plugins.Make<Blob>("slow+memory://x").ok());
  EXPECT_EQ(inner, "memory://x");
}

}  // namespace
}  // namespace outlast
