// Bytes under keys, in a store that may be far away: a folder on another mount, an object store.
//
// A key is a path of names: "run/step-000000012000-7f3a91c2/MANIFEST.json". What was put is whole
// or not there: nobody ever sees half an object, whatever dies in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace outlast {

class Plugins;

// How long a call may go on, and whether it still should.
struct BlobCall {
  // From the call's begin, retries included; then kDeadlineExceeded.
  absl::Duration timeout = absl::Minutes(2);
  // Asked now and then, from any thread; true ends the call with kCancelled. Empty: never.
  std::function<bool()> is_cancelled;
};

struct BlobInfo {
  std::string key;
  uint64_t bytes = 0;
};

struct BlobPage {
  std::vector<BlobInfo> objects;  // by key, bytewise
  bool has_more = false;          // ask again after the last key
};

// Where an object's bytes come from.
struct BlobSource {
  uint64_t bytes = 0;
  // Fills `into` with the bytes from `offset` on, all of them. Called from several threads at once,
  // more than once for the same bytes when a part is sent again. Its error ends the put.
  std::function<absl::Status(uint64_t offset, std::span<std::byte> into)> read;

  // Of memory that stays as it is until the call returned.
  static BlobSource Of(std::string_view bytes);
};

enum class PutMode : uint8_t { kCreate, kReplace };

// Safe for concurrent use. All calls block on the store. A store that is slow, full or out of reach
// says so: kUnavailable (it was tried again within the call's time), kDeadlineExceeded,
// kResourceExhausted, kPermissionDenied; never kNotFound or an empty list.
class Blob {
 public:
  virtual ~Blob() = default;

  // Publishes the object; what OK was returned for outlives a crash of either side. kCreate: the
  // key must be free, and of several at once one wins; kAlreadyExists may also speak of the
  // caller's own bytes, whose answer was lost: compare them. Large objects go in parts, several at
  // a time.
  virtual absl::Status Put(const std::string& key, const BlobSource& source, PutMode mode,
                           const BlobCall& call) = 0;
  // Fills `into` with the bytes from `offset` on. kNotFound; kInvalidArgument: the object ends
  // before. Large ranges come in parts, several at a time.
  virtual absl::Status Get(const std::string& key, uint64_t offset, std::span<std::byte> into,
                           const BlobCall& call) = 0;
  // kNotFound.
  virtual absl::StatusOr<BlobInfo> Stat(const std::string& key, const BlobCall& call) = 0;
  // Objects whose key starts with `prefix` and is greater than `after`, at most `limit` (1..1000)
  // of them; a page may be shorter and have more behind it.
  virtual absl::StatusOr<BlobPage> List(const std::string& prefix, const std::string& after,
                                        int limit, const BlobCall& call) = 0;
  // OK as well when there is none.
  virtual absl::Status Remove(const std::string& key, const BlobCall& call) = 0;
  // The URI that it was made from, without anything secret.
  virtual std::string_view uri() const = 0;
};

// kInvalidArgument unless `key` is 1 to 900 bytes of UTF-8 without control characters, in names
// separated by single '/', none of them "." or ".." or longer than 200 bytes, and none starting
// with ".outlast-put-".
absl::Status CheckBlobKey(std::string_view key);

// All pages. `limit` keys at most, then kResourceExhausted.
absl::StatusOr<std::vector<BlobInfo>> ListAll(Blob& blob, const std::string& prefix,
                                              const BlobCall& call = {}, size_t limit = 10'000'000);
// A whole object of at most `cap` bytes. kResourceExhausted: larger, before it is read.
absl::StatusOr<std::string> GetSmall(Blob& blob, const std::string& key, uint64_t cap,
                                     const BlobCall& call = {});
absl::Status PutSmall(Blob& blob, const std::string& key, std::string_view bytes, PutMode mode,
                      const BlobCall& call = {});

// Objects in memory, for tests and for trying things out; they die with it.
std::unique_ptr<Blob> MakeMemoryBlob();
// Objects as files of a folder, which is made; also on another host's mount. Files go past the page
// cache where that is possible; a name is given by link(2) or rename(2) once all is durable.
absl::StatusOr<std::unique_ptr<Blob>> MakeFolderBlob(const std::string& path_or_file_uri);

// The embedded ones: "" (a path) and file:// (a folder), memory://.
absl::Status RegisterStores(Plugins& plugins);

}  // namespace outlast
