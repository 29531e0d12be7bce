#include "checkpoint/buffer_count.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <string>

#include "base/machine_memory.h"
#include "outlast/checkpoint/checkpointer.h"
#include "outlast/run/run.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(BufferCountFor, IsThreeWhereTheyFitInHalfOfTheMemory) {
  EXPECT_EQ(BufferCountFor(0, {.buffers = 10, .state = 10, .memory = 60}).value(), 3);
  EXPECT_EQ(BufferCountFor(0, {.buffers = 10, .state = 10, .memory = 59}).value(), 2);
  EXPECT_EQ(BufferCountFor(0, {.buffers = 10, .state = 10, .memory = 30}).value(), 2);
  EXPECT_EQ(BufferCountFor(3, {.buffers = 10, .state = 10, .memory = 40}).value(), 3) << "asked";
  EXPECT_EQ(BufferCountFor(2, {.buffers = 10, .state = 10, .memory = 1000}).value(), 2) << "asked";
  EXPECT_EQ(BufferCountFor(0, {.buffers = 10, .state = 10, .memory = 0}).value(), 2) << "unknown";
}

// dlrover#941: a limit of memory that nobody had compared with.
TEST(BufferCountFor, RefusesWhatCannotBeWithAllSizes) {
  for (const int wanted : {0, 2}) {
    const auto count = BufferCountFor(wanted, {.buffers = 10, .state = 9, .memory = 28});
    EXPECT_EQ(count.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(std::string(count.status().message()),
              "2 snapshots of this node's ranks: 29 bytes wanted, 10 for each and 9 for their "
              "state; the machine, or its control group, has 28");
  }
  EXPECT_THAT(std::string(BufferCountFor(3, {10, 9, 38}).status().message()),
              AllOf(HasSubstr("39 bytes wanted"), HasSubstr("buffers = 2")));
}

// Twice the machine's memory, of which nothing is ever touched.
TEST(Checkpointer, RefusesAStateWhoseSnapshotsTheMachineCannotHold) {
  TempFolder folder;
  const uint64_t bytes = 2 * MachineMemoryBytes();
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const Shape shape{static_cast<int64_t>(bytes)};
  const StateView state{
      {{"w", DType::kU8, shape, {}, shape, {static_cast<std::byte*>(memory), bytes}}}, {}};
  const auto run = outlast::Run::Join().value();
  const auto checkpoints = Checkpointer::Open(*run, {.uri = folder / "root"}).value();

  const absl::Status status = run->ForEachGeneration(
      [&](Generation&) -> absl::Status { return checkpoints->Restore(state).status(); });

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(MachineMemoryBytes())));
  munmap(memory, bytes);
}

}  // namespace
}  // namespace outlast
