#include "outlast/base/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "base/error.h"

namespace outlast {
namespace {

TEST(Status, AnnotatePutsThePlaceBeforeTheMessageAndKeepsTheCode) {
  const absl::Status error = Error(absl::StatusCode::kDataLoss, "chunk {}", 7);
  const absl::Status annotated = Annotate(error, "shard 3");
  EXPECT_EQ(annotated.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(MessageOf(annotated), "shard 3: chunk 7");
  EXPECT_TRUE(Annotate(absl::OkStatus(), "anywhere").ok());
}

TEST(Status, ErrnoNamesTheObjectAndTellsWhatToDo) {
  const absl::Status full = ErrnoStatus(ENOSPC, "write /ckpt/a");
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(MessageOf(full)),
              ::testing::StartsWith("write /ckpt/a: No space left on device"));
  EXPECT_EQ(ErrnoStatus(ENOENT, "x").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrnoStatus(EROFS, "x").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ErrnoStatus(EIO, "x").code(), absl::StatusCode::kUnavailable);
}

absl::StatusOr<int> Half(int number) {
  if (number % 2 != 0) return Error(absl::StatusCode::kInvalidArgument, "{} is odd", number);
  return number / 2;
}

absl::StatusOr<int> Quarter(int number) {
  OUTLAST_ASSIGN_OR_RETURN(const int half, Half(number));
  OUTLAST_RETURN_IF_ERROR(Half(half).status());
  return half / 2;
}

TEST(Status, MacrosPassValuesOnAndReturnErrors) {
  EXPECT_EQ(Quarter(12).value(), 3);
  EXPECT_EQ(MessageOf(Quarter(6).status()), "3 is odd");
  EXPECT_EQ(MessageOf(Quarter(7).status()), "7 is odd");
}

}  // namespace
}  // namespace outlast
