#include "launch/console.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "launch/process.h"
#include "launch/run_dir.h"
#include "outlast/base/status.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using namespace std::string_view_literals;
using ::testing::HasSubstr;

class ConsoleTest : public ::testing::Test {
 protected:
  ConsoleTest() {
    output_ = UniqueFd(
        open((folder_ + "/console.out").c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    error_ = UniqueFd(
        open((folder_ + "/console.err").c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  }

  std::string PathOf(int rank) const { return folder_ + "/rank" + std::to_string(rank); }
  void Write(int rank, std::string_view bytes) const {
    std::ofstream(PathOf(rank), std::ios::app | std::ios::binary) << bytes;
  }
  std::string Shown() const { return ReadProcFile(folder_ + "/console.out", 512 << 20); }
  std::string Errors() const { return ReadProcFile(folder_ + "/console.err", 1 << 20); }

  const TempFolder temp_;
  const std::string folder_ = temp_.path();
  UniqueFd output_, error_;
};

TEST_F(ConsoleTest, PutsThePrefixBeforeEachLine) {
  auto console = Console::Start(output_.get(), error_.get()).value();
  Write(0, "one\ntwo\n");
  console->Follow(0, PathOf(0), "[0] ", Console::Stream::kOutput);
  console->Say("outlast: ours");
  console->Stop();
  EXPECT_EQ(Shown(), "[0] one\n[0] two\n");
  EXPECT_EQ(Errors(), "outlast: ours\n");
}

// Case O05, D19: bytes go through as they are, a line ends at \n, \r\n or \r, and the last one is
// completed.
TEST_F(ConsoleTest, PassesOnAnyBytes) {
  constexpr std::string_view kOdd = "\xff\xc3\x28 nul:\0 \x1b[31mred\x1b[0m\n"sv;
  const std::string odd(kOdd);
  Write(0, odd + "10%\r20%\r30%\r\n\n" + "last without end \xe2\x82");
  auto console = Console::Start(output_.get(), error_.get()).value();
  console->Follow(0, PathOf(0), "[0] ", Console::Stream::kOutput);
  console->Stop();
  EXPECT_EQ(Shown(),
            "[0] " + odd + "[0] 10%\r[0] 20%\r[0] 30%\r\n[0] \n[0] last without end \xe2\x82\n");
}

TEST_F(ConsoleTest, ShowsALongLineWholeAmongThoseOfOthers) {
  const std::string longest(1 << 20, 'x');
  Write(0, "before\n" + longest + "\nafter\n");
  for (int i = 0; i < 1000; ++i) Write(1, "line " + std::to_string(i) + "\n");
  auto console = Console::Start(output_.get(), error_.get()).value();
  console->Follow(0, PathOf(0), "[0] ", Console::Stream::kOutput);
  console->Follow(1, PathOf(1), "[1] ", Console::Stream::kOutput);
  console->Stop();
  const std::string shown = Shown();
  EXPECT_THAT(shown, HasSubstr("[0] before\n"));
  EXPECT_NE(shown.find("[0] " + longest + "\n"), std::string::npos);
  EXPECT_THAT(shown, HasSubstr("[0] after\n"));
  for (int i = 0; i < 1000; ++i)
    ASSERT_NE(shown.find("[1] line " + std::to_string(i) + "\n"), std::string::npos) << i;
}

TEST_F(ConsoleTest, CutsALineThatIsTooLong) {
  std::string longest(LineFollower::kMaxLineBytes + 1000, 'x');
  auto console = Console::Start(output_.get(), error_.get()).value();
  Write(0, longest);
  console->Follow(0, PathOf(0), "[0] ", Console::Stream::kOutput);
  console->Stop();
  EXPECT_LT(Shown().size(), longest.size() + 100);
  EXPECT_EQ(Shown().back(), '\n');
}

TEST_F(ConsoleTest, ShowsLinesWhileTheFileGrows) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  Write(0, "");
  auto console = Console::Start(writer.get(), error_.get()).value();
  console->Follow(0, PathOf(0), "[0] ", Console::Stream::kOutput);
  for (const char* line : {"first\n", "second\n"}) {
    Write(0, line);
    const std::string wanted = std::string("[0] ") + line;
    std::string found(wanted.size(), '\0');
    ASSERT_EQ(read(reader.get(), found.data(), found.size()),
              static_cast<ssize_t>(found.size()));  // blocks until it is there
    EXPECT_EQ(found, wanted);
  }
}

TEST_F(ConsoleTest, OutlivesAReaderThatHasGone) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  close(ends[0]);
  const UniqueFd writer(ends[1]);
  Write(0, "nobody hears\n");
  auto console = Console::Start(writer.get(), error_.get()).value();
  console->Follow(0, PathOf(0), "[0] ", Console::Stream::kOutput);
  console->Say("still here");
  console->Stop();
  EXPECT_THAT(Errors(), HasSubstr("still here\n"));
}

TEST_F(ConsoleTest, GivesUpOnAReaderThatDoesNotRead) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]), writer(ends[1]);
  Write(0, std::string(4 << 20, 'x') + "\n");
  auto console = Console::Start(writer.get(), error_.get()).value();
  console->Follow(0, PathOf(0), "[0] ", Console::Stream::kOutput);
  console->Stop(absl::Milliseconds(20));
}

TEST_F(ConsoleTest, SkipsAndCountsWhatAReaderCannotFollow) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  std::string block;
  while (block.size() < (1 << 20)) block += "a line of a flood\n";
  for (int i = 0; i < 32; ++i) Write(0, block);
  auto console = Console::Start(writer.get(), error_.get()).value();
  console->Follow(0, PathOf(0), "[0] ", Console::Stream::kOutput);
  console->Retire(0);
  std::string shown;
  std::thread drain([&] {
    char buffer[64 << 10];
    for (ssize_t count; (count = read(reader.get(), buffer, sizeof buffer)) > 0;)
      shown.append(buffer, static_cast<size_t>(count));
  });
  console->Stop();
  console.reset();
  writer.Reset();
  drain.join();
  EXPECT_LT(shown.size(), static_cast<size_t>(2 * LineFollower::kMaxLagBytes));
  EXPECT_EQ(shown.compare(0, 4, "[0] "), 0);
  size_t at = 0;
  while (at < shown.size()) {
    ASSERT_EQ(shown.compare(at, 22, "[0] a line of a flood\n"), 0) << at;  // no line is torn
    at += 22;
  }
  EXPECT_THAT(Errors(), HasSubstr("were not shown here; the file has them"));
}

// Case D23, D19.
TEST_F(ConsoleTest, CountsEveryLineOfManyFilesAndClosesThem) {
  auto console = Console::Start(output_.get(), error_.get()).value();
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = descriptors();
  for (int rank = 0; rank < 32; ++rank) {
    std::string text;
    for (int i = 0; i < 1000; ++i) text += "line\n";
    Write(rank, text);
    console->Follow(static_cast<uint64_t>(rank), PathOf(rank), "[" + std::to_string(rank) + "] ",
                    Console::Stream::kOutput);
    console->Retire(static_cast<uint64_t>(rank));
  }
  console->Follow(99, folder_ + "/never", "[99] ", Console::Stream::kOutput);
  console->Stop();
  const std::string shown = Shown();
  EXPECT_EQ(std::count(shown.begin(), shown.end(), '\n'), 32'000);
  EXPECT_THAT(Errors(), HasSubstr("never: cannot be followed"));
  EXPECT_EQ(descriptors(), before);
}

TEST(RunDir, HasAUniqueFolderALinkAndItsSubfolders) {
  const TempFolder temp;
  const std::string& parent = temp.path();
  const Id128 run_id = Id128::FromHex("abcd0000000000000000000000000000").value();
  const auto dir =
      RunDir::Create(parent + "/a/b", "job", absl::FromUnixSeconds(1'700'000'000), run_id).value();
  EXPECT_THAT(dir.path(), HasSubstr("/a/b/job-20231114T221320Z-abcd"));
  char target[256] = {};
  ASSERT_GT(readlink((parent + "/a/b/latest").c_str(), target, sizeof target), 0);
  EXPECT_STREQ(target, "job-20231114T221320Z-abcd");
  EXPECT_EQ(RunDir::Create(parent + "/a/b", "job", absl::FromUnixSeconds(1'700'000'000), run_id)
                .status()
                .code(),
            absl::StatusCode::kAlreadyExists);

  const auto logs = dir.OpenLogs(2, 7).value();
  EXPECT_EQ(logs.output_path, dir.path() + "/logs/g2/rank7.out");
  dir.AppendEvent("{}");
  ASSERT_TRUE(dir.WriteReport("{\"exit_code\": 0}").ok());
  EXPECT_EQ(ReadProcFile(dir.path() + "/report.json", 100), "{\"exit_code\": 0}");
}

TEST(RunDir, NamesTheFolderThatItCannotMake) {
  const auto dir = RunDir::Create("/proc/no/such", "job", absl::UnixEpoch(), Id128::Random());
  EXPECT_THAT(std::string(MessageOf(dir.status())), HasSubstr("/proc/no"));
}

TEST(LastLines, GivesTheEndOfAFile) {
  const std::string path = ::testing::TempDir() + "/last_lines_test";
  std::ofstream(path) << "one\ntwo\nthree\n\n";
  EXPECT_EQ(LastLines(path, 2, 100), "two\nthree");
  EXPECT_EQ(LastLines(path, 9, 100), "one\ntwo\nthree");
  EXPECT_EQ(LastLines(path, 9, 6), "hree");
  EXPECT_EQ(LastLines(path + "no", 9, 8), "");
}

}  // namespace
}  // namespace outlast
