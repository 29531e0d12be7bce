#include "outlast/testing/blob_contract.h"

#include <atomic>
#include <cstring>
#include <thread>

#include "base/error.h"

namespace outlast::testing {
namespace {

absl::Status Expect(bool holds, std::string_view what) {
  return holds ? absl::OkStatus() : Error(absl::StatusCode::kInternal, "contract: {}", what);
}

absl::Status ExpectCode(const absl::Status& found, absl::StatusCode wanted, std::string_view what) {
  if (found.code() == wanted) return absl::OkStatus();
  return Error(absl::StatusCode::kInternal, "contract: {}: found '{}' (code {}), code {} wanted",
               what, MessageOf(found), static_cast<int>(found.code()), static_cast<int>(wanted));
}

absl::Status ExpectContent(Blob& blob, const std::string& key, std::string_view wanted) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string found, GetSmall(blob, key, 1 << 20));
  return Expect(found == wanted, fmt::format("{} holds '{}', '{}' wanted", key, found, wanted));
}

absl::Status GivesBackWhatWasPut(Blob& blob) {
  for (const std::string key : {"GivesBack/a", "GivesBack/deep/er/b.json",
                                "GivesBack/with space+&=", "GivesBack/ünïcode", "GivesBack/a-b"}) {
    OUTLAST_RETURN_IF_ERROR(PutSmall(blob, key, "of " + key, PutMode::kCreate));
    OUTLAST_RETURN_IF_ERROR(ExpectContent(blob, key, "of " + key));
    OUTLAST_ASSIGN_OR_RETURN(const BlobInfo info, blob.Stat(key, {}));
    OUTLAST_RETURN_IF_ERROR(Expect(info.bytes == key.size() + 3, "Stat tells the bytes"));
  }
  OUTLAST_RETURN_IF_ERROR(PutSmall(blob, "GivesBack/empty", "", PutMode::kCreate));
  return ExpectContent(blob, "GivesBack/empty", "");
}

absl::Status ReplacesWhole(Blob& blob) {
  OUTLAST_RETURN_IF_ERROR(PutSmall(blob, "Replaces/a", "a longer text", PutMode::kReplace));
  OUTLAST_RETURN_IF_ERROR(PutSmall(blob, "Replaces/a", "short", PutMode::kReplace));
  return ExpectContent(blob, "Replaces/a", "short");
}

absl::Status CreatesNothingOverAnother(Blob& blob) {
  OUTLAST_RETURN_IF_ERROR(PutSmall(blob, "Creates/a", "first", PutMode::kCreate));
  OUTLAST_RETURN_IF_ERROR(ExpectCode(PutSmall(blob, "Creates/a", "second", PutMode::kCreate),
                                     absl::StatusCode::kAlreadyExists, "a taken key"));
  return ExpectContent(blob, "Creates/a", "first");
}

absl::Status LetsOneOfManyCreate(Blob& blob) {
  constexpr int kRounds = 20, kThreads = 8;
  for (int round = 0; round < kRounds; ++round) {
    const std::string key = fmt::format("LetsOne/{}", round);
    std::atomic<int> created{0}, refused{0}, winner{-1};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        const absl::Status put =
            PutSmall(blob, key, fmt::format("of thread {}", i), PutMode::kCreate);
        if (put.ok()) winner = i;
        created += put.ok() ? 1 : 0;
        refused += absl::IsAlreadyExists(put) ? 1 : 0;
      });
    }
    for (std::thread& thread : threads) thread.join();
    OUTLAST_RETURN_IF_ERROR(Expect(created == 1 && refused == kThreads - 1,
                                   fmt::format("{} of {} created '{}', {} were refused",
                                               created.load(), kThreads, key, refused.load())));
    OUTLAST_RETURN_IF_ERROR(ExpectContent(blob, key, fmt::format("of thread {}", winner.load())));
  }
  return absl::OkStatus();
}

absl::Status GivesAnyRange(Blob& blob) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += fmt::format("{:05}", i);
  OUTLAST_RETURN_IF_ERROR(PutSmall(blob, "Range/a", text, PutMode::kCreate));
  for (const auto& [offset, bytes] : std::vector<std::pair<size_t, size_t>>{
           {0, 1}, {0, 5000}, {4999, 1}, {17, 1234}, {5000, 0}}) {
    std::string part(bytes, '\0');
    OUTLAST_RETURN_IF_ERROR(
        blob.Get("Range/a", offset, std::as_writable_bytes(std::span(part)), {}));
    OUTLAST_RETURN_IF_ERROR(
        Expect(part == text.substr(offset, bytes), fmt::format("{} bytes from {}", bytes, offset)));
  }
  std::string past(2, '\0');
  for (const uint64_t offset : {4999, 5000, 9000}) {
    OUTLAST_RETURN_IF_ERROR(
        ExpectCode(blob.Get("Range/a", offset, std::as_writable_bytes(std::span(past)), {}),
                   absl::StatusCode::kInvalidArgument, fmt::format("2 bytes from {}", offset)));
  }
  return absl::OkStatus();
}

absl::Status SaysNotFound(Blob& blob) {
  std::string into(1, '\0');
  OUTLAST_RETURN_IF_ERROR(ExpectCode(blob.Stat("NotFound/a", {}).status(),
                                     absl::StatusCode::kNotFound, "Stat of no object"));
  OUTLAST_RETURN_IF_ERROR(
      ExpectCode(blob.Get("NotFound/a", 0, std::as_writable_bytes(std::span(into)), {}),
                 absl::StatusCode::kNotFound, "Get of no object"));
  OUTLAST_RETURN_IF_ERROR(blob.Remove("NotFound/a", {}));
  OUTLAST_ASSIGN_OR_RETURN(const BlobPage page, blob.List("NotFound/", "", 10, {}));
  return Expect(page.objects.empty() && !page.has_more, "an empty listing");
}

absl::Status RemovesForGood(Blob& blob) {
  OUTLAST_RETURN_IF_ERROR(PutSmall(blob, "Removes/a", "x", PutMode::kCreate));
  OUTLAST_RETURN_IF_ERROR(blob.Remove("Removes/a", {}));
  OUTLAST_RETURN_IF_ERROR(
      ExpectCode(blob.Stat("Removes/a", {}).status(), absl::StatusCode::kNotFound, "removed"));
  return PutSmall(blob, "Removes/a", "y", PutMode::kCreate);
}

absl::Status ListsInOrderPageByPage(Blob& blob) {
  constexpr int kObjects = 1050;  // more than a page of an object store
  std::vector<std::string> wanted;
  for (int i = 0; i < kObjects; ++i) wanted.push_back(fmt::format("Lists/{:04}/x", i));
  std::atomic<int> next{0};
  std::atomic<bool> failed{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n; (n = next++) < kObjects;)
        if (!PutSmall(blob, wanted[static_cast<size_t>(n)], "x", PutMode::kReplace).ok())
          failed = true;
    });
  }
  for (std::thread& thread : threads) thread.join();
  OUTLAST_RETURN_IF_ERROR(Expect(!failed, "all were put"));
  OUTLAST_RETURN_IF_ERROR(PutSmall(blob, "Listsother", "x", PutMode::kReplace));
  OUTLAST_ASSIGN_OR_RETURN(const auto all, ListAll(blob, "Lists/"));
  OUTLAST_RETURN_IF_ERROR(
      Expect(all.size() == kObjects, fmt::format("{} of {} are listed", all.size(), kObjects)));
  for (size_t i = 0; i < all.size(); ++i)
    OUTLAST_RETURN_IF_ERROR(Expect(all[i].key == wanted[i] && all[i].bytes == 1, all[i].key));
  OUTLAST_ASSIGN_OR_RETURN(const BlobPage page, blob.List("Lists/", wanted[9], 5, {}));
  return Expect(page.has_more && page.objects.size() == 5 && page.objects[0].key == wanted[10],
                "5 after the tenth");
}

absl::Status OrdersKeysByBytes(Blob& blob) {
  const std::vector<std::string> wanted = {"Orders/a", "Orders/a-b", "Orders/a/c", "Orders/b"};
  for (const std::string& key : {wanted[3], wanted[1], wanted[2]})
    OUTLAST_RETURN_IF_ERROR(PutSmall(blob, key, "x", PutMode::kReplace));
  OUTLAST_ASSIGN_OR_RETURN(const auto all, ListAll(blob, "Orders/"));
  std::string found;
  for (const BlobInfo& info : all) found += info.key + " ";
  return Expect(found == "Orders/a-b Orders/a/c Orders/b ", found);
}

absl::Status RefusesKeysThatLeaveTheStore(Blob& blob) {
  for (const std::string key : {"", "/a", "a/", "a//b", "../a", "a/../b", "a/.", "a\nb"}) {
    OUTLAST_RETURN_IF_ERROR(ExpectCode(PutSmall(blob, key, "x", PutMode::kReplace),
                                       absl::StatusCode::kInvalidArgument, "key '" + key + "'"));
  }
  return absl::OkStatus();
}

std::byte ByteAt(uint64_t offset) {
  return static_cast<std::byte>((offset * 2654435761U >> 13) ^ offset);
}

absl::Status TakesLargeObjects(Blob& blob) {
  constexpr uint64_t kBytes = (uint64_t{37} << 20) + 12'345;
  const BlobSource source{kBytes, [](uint64_t offset, std::span<std::byte> into) {
                            for (size_t i = 0; i < into.size(); ++i) into[i] = ByteAt(offset + i);
                            return absl::OkStatus();
                          }};
  OUTLAST_RETURN_IF_ERROR(blob.Put("Large/a", source, PutMode::kCreate, {}));
  OUTLAST_RETURN_IF_ERROR(ExpectCode(blob.Put("Large/a", source, PutMode::kCreate, {}),
                                     absl::StatusCode::kAlreadyExists, "a large one again"));
  std::vector<std::byte> content(kBytes);
  OUTLAST_RETURN_IF_ERROR(blob.Get("Large/a", 0, content, {}));
  for (uint64_t i = 0; i < kBytes; ++i)
    if (content[i] != ByteAt(i)) return Expect(false, fmt::format("byte {} differs", i));
  return absl::OkStatus();
}

absl::Status PutsNothingWhenTheSourceFails(Blob& blob) {
  for (const uint64_t bytes : {uint64_t{100}, uint64_t{40} << 20}) {
    const BlobSource source{bytes, [](uint64_t offset, std::span<std::byte>) {
                              return offset == 0 || offset >= (uint64_t{16} << 20)
                                         ? absl::DataLossError("of the source")
                                         : absl::OkStatus();
                            }};
    OUTLAST_RETURN_IF_ERROR(ExpectCode(blob.Put("Fails/a", source, PutMode::kReplace, {}),
                                       absl::StatusCode::kDataLoss, "the source's error"));
    OUTLAST_RETURN_IF_ERROR(ExpectCode(blob.Stat("Fails/a", {}).status(),
                                       absl::StatusCode::kNotFound, "nothing was put"));
  }
  OUTLAST_ASSIGN_OR_RETURN(const auto all, ListAll(blob, "Fails/"));
  return Expect(all.empty(), "nothing is listed");
}

absl::Status EndsInTime(Blob& blob) {
  const BlobCall late{.timeout = absl::ZeroDuration(), .is_cancelled = {}};
  const BlobCall cancelled{.timeout = absl::Minutes(1), .is_cancelled = [] { return true; }};
  std::string into(1, '\0');
  const auto bytes = std::as_writable_bytes(std::span(into));
  for (const auto& [call, code] : {std::pair(&late, absl::StatusCode::kDeadlineExceeded),
                                   std::pair(&cancelled, absl::StatusCode::kCancelled)}) {
    OUTLAST_RETURN_IF_ERROR(
        ExpectCode(PutSmall(blob, "InTime/a", "x", PutMode::kReplace, *call), code, "Put"));
    OUTLAST_RETURN_IF_ERROR(ExpectCode(blob.Get("InTime/a", 0, bytes, *call), code, "Get"));
    OUTLAST_RETURN_IF_ERROR(ExpectCode(blob.Stat("InTime/a", *call).status(), code, "Stat"));
    OUTLAST_RETURN_IF_ERROR(ExpectCode(blob.List("", "", 10, *call).status(), code, "List"));
    OUTLAST_RETURN_IF_ERROR(ExpectCode(blob.Remove("InTime/a", *call), code, "Remove"));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<BlobContractCase> BlobContract() {
  return {{"GivesBackWhatWasPut", GivesBackWhatWasPut},
          {"ReplacesWhole", ReplacesWhole},
          {"CreatesNothingOverAnother", CreatesNothingOverAnother},
          {"LetsOneOfManyCreate", LetsOneOfManyCreate},
          {"GivesAnyRange", GivesAnyRange},
          {"SaysNotFound", SaysNotFound},
          {"RemovesForGood", RemovesForGood},
          {"ListsInOrderPageByPage", ListsInOrderPageByPage},
          {"OrdersKeysByBytes", OrdersKeysByBytes},
          {"RefusesKeysThatLeaveTheStore", RefusesKeysThatLeaveTheStore},
          {"TakesLargeObjects", TakesLargeObjects},
          {"PutsNothingWhenTheSourceFails", PutsNothingWhenTheSourceFails},
          {"EndsInTime", EndsInTime}};
}

}  // namespace outlast::testing
