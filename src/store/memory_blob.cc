#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"
#include "outlast/store/blob.h"

namespace outlast {
namespace {

absl::Status WhyNotNow(const BlobCall& call, std::string_view what) {
  if (call.is_cancelled && call.is_cancelled())
    return Error(absl::StatusCode::kCancelled, "{}: cancelled", what);
  if (call.timeout <= absl::ZeroDuration())
    return Error(absl::StatusCode::kDeadlineExceeded, "{}: no time is left", what);
  return absl::OkStatus();
}

class MemoryBlob final : public Blob {
 public:
  absl::Status Put(const std::string& key, const BlobSource& source, PutMode mode,
                   const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(CheckBlobKey(key));
    OUTLAST_RETURN_IF_ERROR(WhyNotNow(call, key));
    std::string content(source.bytes, '\0');
    OUTLAST_RETURN_IF_ERROR(source.read(0, std::as_writable_bytes(std::span(content))));
    MutexLock lock(mutex_);
    if (mode == PutMode::kCreate && objects_.contains(key))
      return Error(absl::StatusCode::kAlreadyExists, "memory:///{}: the key is taken", key);
    objects_[key] = std::make_shared<const std::string>(std::move(content));
    return absl::OkStatus();
  }

  absl::Status Get(const std::string& key, uint64_t offset, std::span<std::byte> into,
                   const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(WhyNotNow(call, key));
    OUTLAST_ASSIGN_OR_RETURN(const auto content, Find(key));
    if (offset > content->size() || into.size() > content->size() - offset) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "memory:///{}: {} bytes from {} wanted, it has {}", key, into.size(), offset,
                   content->size());
    }
    if (!into.empty()) std::memcpy(into.data(), content->data() + offset, into.size());
    return absl::OkStatus();
  }

  absl::StatusOr<BlobInfo> Stat(const std::string& key, const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(WhyNotNow(call, key));
    OUTLAST_ASSIGN_OR_RETURN(const auto content, Find(key));
    return BlobInfo{key, content->size()};
  }

  absl::StatusOr<BlobPage> List(const std::string& prefix, const std::string& after, int limit,
                                const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(WhyNotNow(call, prefix));
    BlobPage page;
    MutexLock lock(mutex_);
    auto at = after < prefix ? objects_.lower_bound(prefix) : objects_.upper_bound(after);
    for (; at != objects_.end() && at->first.starts_with(prefix); ++at) {
      if (std::ssize(page.objects) == limit) {
        page.has_more = true;
        break;
      }
      page.objects.push_back({at->first, at->second->size()});
    }
    return page;
  }

  absl::Status Remove(const std::string& key, const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(WhyNotNow(call, key));
    MutexLock lock(mutex_);
    objects_.erase(key);
    return absl::OkStatus();
  }

  std::string_view uri() const override { return "memory://"; }

 private:
  absl::StatusOr<std::shared_ptr<const std::string>> Find(const std::string& key) {
    MutexLock lock(mutex_);
    const auto found = objects_.find(key);
    if (found == objects_.end())
      return Error(absl::StatusCode::kNotFound, "memory:///{}: no such object", key);
    return found->second;
  }

  Mutex mutex_;
  std::map<std::string, std::shared_ptr<const std::string>> objects_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Blob> MakeMemoryBlob() { return std::make_unique<MemoryBlob>(); }

}  // namespace outlast
