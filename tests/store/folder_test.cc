#include "store/folder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <fstream>
#include <functional>
#include <sstream>

#include "outlast/base/memory.h"
#include "outlast/base/status.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

class FolderTest : public ::testing::Test {
 protected:
  std::string At(const std::string& name) const { return path_ + "/" + name; }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    const std::vector<FolderEntry> entries = ListFolder(path_).value();
    for (const FolderEntry& entry : entries) names.push_back(entry.name);
    return names;
  }

  const TempFolder temp_;
  const std::string path_ = temp_.path();
};
using FolderDeathTest = FolderTest;

Mapping Pattern(size_t bytes) {
  Mapping memory = Mapping::Anonymous((bytes + 4095) / 4096 * 4096 + 4096).value();
  for (size_t i = 0; i < bytes; ++i) memory.data()[i] = static_cast<std::byte>(i * 31 + (i >> 12));
  return memory;
}

std::string Content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string_view Text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Lets each call of the given numbers fail with `error_number` in this process, for ever.
void Refuse(std::initializer_list<int> calls, int error_number) {
  std::vector<sock_filter> program;
  program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
  for (const int call : calls) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1));
    program.push_back(
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error_number)));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    abort();
}

// Runs `body` in a child process; what it says comes back.
std::string InChild(const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) abort();
  const pid_t child = fork();
  if (child == 0) {
    const std::string said = body();
    if (write(ends[1], said.data(), said.size()) < 0) _exit(1);
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char buffer[512];
  for (ssize_t count; (count = read(ends[0], buffer, sizeof buffer)) > 0;)
    said.append(buffer, static_cast<size_t>(count));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? said : "the child died: " + said;
}

TEST_F(FolderTest, CreatesAFileWholeAndNeverOverOne) {
  ASSERT_TRUE(CreateWhole(path_, "a", "one").ok());

  EXPECT_EQ(CreateWhole(path_, "a", "two").code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReadSmall(At("a"), 3).value(), "one");
  EXPECT_THAT(Names(),
              ::testing::ElementsAre("a"));  // no temporary file is left, also not by the failure
}

TEST_F(FolderTest, ReplacesAFileWhole) {
  ASSERT_TRUE(ReplaceWhole(path_, "a", "one").ok());
  ASSERT_TRUE(ReplaceWhole(path_, "a", "two").ok());

  EXPECT_EQ(ReadSmall(At("a"), 3).value(), "two");
  EXPECT_THAT(Names(), ::testing::ElementsAre("a"));
}

TEST_F(FolderTest, PublishesByRenameWhereLinksAreRefused) {
  const std::string said = InChild([&]() -> std::string {
    Refuse({SYS_link, SYS_linkat}, EPERM);
    const absl::Status first = CreateWhole(path_, "a", "one");
    return first.ToString() + " " + std::string(MessageOf(CreateWhole(path_, "a", "two")));
  });
  EXPECT_THAT(said, ::testing::StartsWith("OK rename"));
  EXPECT_THAT(said, HasSubstr("File exists"));
  EXPECT_EQ(ReadSmall(At("a"), 3).value(), "one");
}

TEST_F(FolderTest, PublishesByPlainRenameWhereNothingElseIsKnown) {
  const std::string said = InChild([&]() -> std::string {
    Refuse({SYS_link, SYS_linkat, SYS_renameat2}, EINVAL);
    const absl::Status first = CreateWhole(path_, "a", "one");
    return first.ToString() + " " + std::string(MessageOf(CreateWhole(path_, "a", "two")));
  });
  EXPECT_THAT(said, ::testing::StartsWith("OK rename"));
  EXPECT_EQ(ReadSmall(At("a"), 3).value(), "one");
}

TEST_F(FolderTest, ReadsNothingLargerThanTheCapAndFollowsNoSymlink) {
  ASSERT_TRUE(CreateWhole(path_, "a", "1234").ok());
  ASSERT_EQ(symlink("a", At("link").c_str()), 0);
  ASSERT_EQ(mkfifo(At("fifo").c_str(), 0600), 0);

  EXPECT_EQ(ReadSmall(At("a"), 3).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReadSmall(At("link"), 9).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadSmall(At("fifo"), 9).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadSmall(At("none"), 9).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(FolderTest, RemovesATreeButNotWhatItsSymlinksPointAt) {
  ASSERT_TRUE(MakeFolders(At("tree/inner")).ok());
  ASSERT_TRUE(CreateWhole(path_, "precious", "1").ok());
  ASSERT_EQ(symlink("../precious", At("tree/link").c_str()), 0);
  ASSERT_EQ(symlink("..", At("tree/inner/up").c_str()), 0);
  ASSERT_EQ(symlink("tree", At("alias").c_str()), 0);

  EXPECT_EQ(RemoveTree(At("alias")).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(RemoveTree(At("tree")).ok());
  EXPECT_THAT(Names(), ::testing::ElementsAre("alias", "precious"));
}

TEST_F(FolderTest, ListsKindsAndTellsAnErrorFromAnEmptyFolder) {
  ASSERT_TRUE(MakeFolder(At("folder")).ok());
  ASSERT_EQ(symlink("nowhere", At("link").c_str()), 0);

  const auto entries = ListFolder(path_).value();
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].kind, EntryKind::kFolder);
  EXPECT_EQ(entries[1].kind, EntryKind::kSymlink);
  EXPECT_EQ(ListFolder(At("none")).status().code(), absl::StatusCode::kNotFound);
}

class DirectWriterTest : public FolderTest, public ::testing::WithParamInterface<IoMode> {};

TEST_P(DirectWriterTest, WritesEveryLengthExactly) {
  for (const size_t bytes : {0u, 1u, 511u, 4095u, 4096u, 4097u, 3u << 20, (3u << 20) + 5}) {
    const Mapping memory = Pattern(bytes);
    const std::string path = At("f" + std::to_string(bytes));
    DirectWriter writer =
        DirectWriter::Create(path, bytes, {.mode = GetParam(), .block_bytes = 1 << 20}).value();
    ASSERT_TRUE(writer.Append(memory.bytes().first(bytes)).ok());
    ASSERT_TRUE(writer.Finish().ok());
    EXPECT_EQ(Content(path), Text(memory.bytes().first(bytes))) << bytes;
  }
}

TEST_P(DirectWriterTest, WritesMemoryThatIsNotAligned) {
  const Mapping memory = Pattern(100'000);
  const auto bytes = memory.bytes().subspan(13, 99'000);
  DirectWriter writer =
      DirectWriter::Create(At("f"), bytes.size(), {.mode = GetParam(), .block_bytes = 16384})
          .value();
  ASSERT_TRUE(writer.Append(bytes.first(32768)).ok());
  ASSERT_TRUE(writer.Append(bytes.subspan(32768)).ok());
  ASSERT_TRUE(writer.Finish().ok());
  EXPECT_EQ(Content(At("f")), Text(bytes));
}

TEST_P(DirectWriterTest, ReportsProgressAndStopsWhenItIsCancelled) {
  std::vector<uint64_t> progress;
  bool cancel = false;
  const Mapping memory = Pattern(16384);
  {
    DirectWriter writer =
        DirectWriter::Create(At("f"), 16384,
                             {.mode = GetParam(),
                              .block_bytes = 4096,
                              .on_progress = [&](uint64_t bytes) { progress.push_back(bytes); },
                              .cancelled = [&] { return cancel; }})
            .value();
    ASSERT_TRUE(writer.Append(memory.bytes().first(8192)).ok());
    cancel = true;
    EXPECT_EQ(writer.Append(memory.bytes().first(8192)).code(), absl::StatusCode::kCancelled);
  }
  EXPECT_EQ(progress, (std::vector<uint64_t>{4096, 8192}));
  EXPECT_THAT(Names(), ::testing::IsEmpty());  // what was not finished is gone
}

INSTANTIATE_TEST_SUITE_P(Modes, DirectWriterTest,
                         ::testing::Values(IoMode::kDirect, IoMode::kBuffered),
                         [](const auto& mode) {
                           return mode.param == IoMode::kDirect ? "Direct" : "Buffered";
                         });

TEST_F(FolderTest, WriterRefusesATakenNameAndWrongLengths) {
  ASSERT_TRUE(CreateWhole(path_, "taken", "1").ok());
  EXPECT_EQ(DirectWriter::Create(At("taken"), 1).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(DirectWriter::Create(At("f"), 1, {.block_bytes = 100}).status().code(),
            absl::StatusCode::kInvalidArgument);

  const Mapping memory = Pattern(8192);
  DirectWriter writer = DirectWriter::Create(At("f"), 8192).value();
  EXPECT_EQ(writer.Append(memory.bytes().first(8193)).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(writer.Append(memory.bytes().first(100)).ok());
  EXPECT_EQ(writer.Append(memory.bytes().first(100)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(writer.Finish().code(), absl::StatusCode::kInvalidArgument);
}

// Case O20: what a bad disk says reaches the caller, and no partial file stays under the final
// name.
TEST_F(FolderTest, WriterReportsEachErrorOfTheDiskAndLeavesNoFile) {
  const Mapping memory = Pattern(8192);
  struct Row {
    int call, error_number;
    std::string_view wanted;
  };
  for (const Row& row :
       {Row{SYS_fallocate, ENOSPC, "allocate"}, Row{SYS_fallocate, EDQUOT, "wanted 8192 bytes"},
        Row{SYS_pwrite64, EIO, "write"}, Row{SYS_ftruncate, EIO, "truncate"},
        Row{SYS_fdatasync, ENOSPC, "fdatasync"}, Row{SYS_fdatasync, EIO, "fdatasync"}}) {
    const std::string said = InChild([&]() -> std::string {
      Refuse({row.call}, row.error_number);
      auto writer = DirectWriter::Create(At("f"), 8192);
      if (!writer.ok()) return writer.status().ToString();
      absl::Status status = writer->Append(memory.bytes().first(8192));
      if (status.ok()) status = writer->Finish();
      { const DirectWriter gone = *std::move(writer); }
      return status.ToString();
    });
    EXPECT_THAT(said, HasSubstr(row.wanted));
    EXPECT_THAT(said, HasSubstr("errno " + std::to_string(row.error_number)));
    EXPECT_THAT(said, HasSubstr(At("f")));
    EXPECT_THAT(Names(), ::testing::IsEmpty()) << said;
  }
}

TEST_F(FolderTest, WriterGoesOnWithoutFallocate) {
  const Mapping memory = Pattern(8192);
  const std::string said = InChild([&]() -> std::string {
    Refuse({SYS_fallocate}, EOPNOTSUPP);
    DirectWriter writer = DirectWriter::Create(At("f"), 5000).value();
    const absl::Status status = writer.Append(memory.bytes().first(5000));
    return (status.ok() ? writer.Finish() : status).ToString();
  });
  EXPECT_EQ(said, "OK");
  EXPECT_EQ(Content(At("f")), Text(memory.bytes().first(5000)));
}

}  // namespace
}  // namespace outlast
