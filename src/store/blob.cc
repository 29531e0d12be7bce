#include "outlast/store/blob.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "outlast/base/plugins.h"

namespace outlast {
namespace {

constexpr int kPage = 1000;

bool IsUtf8(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t more = lead < 0x80                   ? 0
                        : lead >= 0xc2 && lead < 0xe0 ? 1
                        : (lead & 0xf0) == 0xe0       ? 2
                        : lead >= 0xf0 && lead < 0xf5 ? 3
                                                      : 4;
    if (more == 4 || i + more >= text.size()) return false;
    for (size_t k = 1; k <= more; ++k)
      if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return false;
    i += more + 1;
  }
  return true;
}

std::string_view WhyNoKey(std::string_view key) {
  if (key.empty() || key.size() > 900) return "1 to 900 bytes wanted";
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (std::ranges::any_of(key, is_control) || !IsUtf8(key))
    return "UTF-8 without control characters wanted";
  for (size_t begin = 0; begin <= key.size();) {
    const size_t end = std::min(key.find('/', begin), key.size());
    const std::string_view name = key.substr(begin, end - begin);
    if (name.empty() || name == "." || name == "..") return "names separated by single '/' wanted";
    if (name.size() > 200) return "names of at most 200 bytes wanted";
    if (name.starts_with(".outlast-put-")) return "a name that is the store's own";
    begin = end + 1;
  }
  return {};
}

}  // namespace

BlobSource BlobSource::Of(std::string_view bytes) {
  return {bytes.size(), [bytes](uint64_t offset, std::span<std::byte> into) {
            if (!into.empty()) std::memcpy(into.data(), bytes.data() + offset, into.size());
            return absl::OkStatus();
          }};
}

absl::Status CheckBlobKey(std::string_view key) {
  const std::string_view why = WhyNoKey(key);
  if (why.empty()) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "key '{}': {}", key.substr(0, 1000), why);
}

absl::StatusOr<std::vector<BlobInfo>> ListAll(Blob& blob, const std::string& prefix,
                                              const BlobCall& call, size_t limit) {
  std::vector<BlobInfo> all;
  std::string after;
  while (true) {
    OUTLAST_ASSIGN_OR_RETURN(BlobPage page, blob.List(prefix, after, kPage, call));
    if (!page.objects.empty()) after = page.objects.back().key;
    std::ranges::move(page.objects, std::back_inserter(all));
    if (all.size() > limit) {
      return Error(absl::StatusCode::kResourceExhausted, "{}: more than {} objects under '{}'",
                   blob.uri(), limit, prefix);
    }
    if (!page.has_more) return all;
  }
}

absl::StatusOr<std::string> GetSmall(Blob& blob, const std::string& key, uint64_t cap,
                                     const BlobCall& call) {
  OUTLAST_ASSIGN_OR_RETURN(const BlobInfo info, blob.Stat(key, call));
  if (info.bytes > cap) {
    return Error(absl::StatusCode::kResourceExhausted, "{}/{}: {} bytes, at most {} wanted",
                 blob.uri(), key, info.bytes, cap);
  }
  std::string text(info.bytes, '\0');
  OUTLAST_RETURN_IF_ERROR(blob.Get(key, 0, std::as_writable_bytes(std::span(text)), call));
  return text;
}

absl::Status PutSmall(Blob& blob, const std::string& key, std::string_view bytes, PutMode mode,
                      const BlobCall& call) {
  return blob.Put(key, BlobSource::Of(bytes), mode, call);
}

absl::Status RegisterStores(Plugins& plugins) {
  auto& blobs = plugins.Of<Blob>();
  const auto folder = [](const std::string& uri, const Plugins&) { return MakeFolderBlob(uri); };
  OUTLAST_RETURN_IF_ERROR(blobs.Add("", folder));
  OUTLAST_RETURN_IF_ERROR(blobs.Add("file", folder));
  return blobs.Add("memory", [](const std::string&, const Plugins&) {
    return absl::StatusOr<std::unique_ptr<Blob>>(MakeMemoryBlob());
  });
}

}  // namespace outlast
