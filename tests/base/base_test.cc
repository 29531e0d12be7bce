// The small parts of base/ that need one or two tests each.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>

#include "outlast/base/clock.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/digest.h"
#include "outlast/base/fd.h"
#include "outlast/base/id.h"
#include "outlast/base/memory.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

TEST(Crc32c, MatchesThePublishedCheckValue) {
  // RFC 3720, appendix B.4, and the "check" of CRC-32C in the catalogue of parametrised CRC
  // algorithms.
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc32c(""), 0u);
}

TEST(Crc32c, OverPiecesEqualsTheWhole) {
  Crc32cStream stream;
  stream.Update(std::as_bytes(std::span("12345", 5)));
  stream.Update(std::as_bytes(std::span("6789", 4)));
  EXPECT_EQ(stream.value(), 0xe3069283u);
}

TEST(Digest, MatchesTheStandardsExample) {
  // FIPS 180-2, appendix B.1.
  EXPECT_EQ(ToHex(Sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(HmacSha256, HasTheValuesOfRfc4231) {
  EXPECT_EQ(ToHex(HmacSha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(ToHex(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(ToHex(HmacSha256(std::string(131, '\xaa'),
                             "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(IsEqualSecret, ComparesSizesAndBytes) {
  const Sha256Digest digest = Sha256("abc");
  Sha256Digest other = digest;
  EXPECT_TRUE(IsEqualSecret(digest, other));
  other[31] ^= std::byte{1};
  EXPECT_FALSE(IsEqualSecret(digest, other));
  EXPECT_FALSE(IsEqualSecret(digest, std::span(digest).first(31)));
}

TEST(Id128, ReadsBackItsHexAndRefusesAnythingElse) {
  const Id128 id = Id128::Random();
  EXPECT_EQ(Id128::FromHex(id.hex()).value(), id);
  EXPECT_NE(Id128::Random(), id);
  EXPECT_EQ(Id128::FromName("abc").hex(), "ba7816bf8f01cfea414140de5dae2223");
  EXPECT_EQ(Id128::FromHex("00").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Id128::FromHex(std::string(32, 'G')).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(UniqueFd, ClosesOnceAndMoves) {
  UniqueFd first(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int number = first.get();
  UniqueFd second = std::move(first);
  EXPECT_EQ(second.get(), number);
  second.Reset();
  EXPECT_EQ(fcntl(number, F_GETFD), -1);
}

TEST(SealedMemory, CannotBeShrunkOrGrown) {
  const UniqueFd fd = MakeSealedMemory("test", 8192).value();
  EXPECT_NE(ftruncate(fd.get(), 4096), 0);
  EXPECT_NE(ftruncate(fd.get(), 16384), 0);
  const Mapping mapping = Mapping::Shared(fd.get(), 8192).value();
  mapping.bytes()[8191] = std::byte{7};
  EXPECT_EQ(Mapping::SharedReadOnly(fd.get(), 8192).value().bytes()[8191], std::byte{7});
}

TEST(Mapping, RefusesZeroBytes) {
  EXPECT_EQ(Mapping::Anonymous(0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(CondVar, WaitForReturnsAfterItsTimeout) {
  Mutex mutex;
  CondVar never;
  MutexLock lock(mutex);
  const int64_t before = MonotonicNanos();
  never.WaitFor(mutex, absl::Milliseconds(2));
  EXPECT_GE(MonotonicNanos() - before, 1'000'000);
}

TEST(CondVar, WakesTheWaiter) {
  Mutex mutex;
  CondVar changed;
  bool ready = false;
  std::thread setter([&] {
    MutexLock lock(mutex);
    ready = true;
    changed.NotifyAll();
  });
  {
    MutexLock lock(mutex);
    while (!ready) changed.Wait(mutex);
    EXPECT_TRUE(ready);
  }
  setter.join();
}

}  // namespace
}  // namespace outlast
