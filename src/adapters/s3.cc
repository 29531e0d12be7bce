#include "outlast/adapters/s3.h"

#include <openssl/evp.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

#include "adapters/http.h"
#include "adapters/s3_options.h"
#include "adapters/sigv4.h"
#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/base/digest.h"
#include "outlast/base/id.h"
#include "outlast/base/memory.h"
#include "outlast/base/plugins.h"

namespace outlast {
namespace {

constexpr uint64_t kPartBytes = uint64_t{8} << 20;
constexpr uint64_t kMultipartFrom = 2 * kPartBytes;
constexpr uint64_t kMaxParts = 10'000;  // S3's own limit
constexpr size_t kThreads = 4;
constexpr absl::Duration kFirstPause = absl::Milliseconds(50);
constexpr absl::Duration kLongestPause = absl::Seconds(5);
constexpr int kMaxListing = 1000;

std::string Md5(std::span<const std::byte> bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  unsigned size = 0;
  if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_md5(), nullptr) != 1)
    return {};  // where a policy forbids MD5, ETags are not checked
  return ToHex(std::as_bytes(std::span(digest.data(), size)));
}

std::string NowForSigning() {
  return absl::FormatTime("%Y%m%dT%H%M%SZ", Clock::Real().WallTime(), absl::UTCTimeZone());
}

// The time of one call.
class CallTime {
 public:
  CallTime(const BlobCall& call, std::string place)
      : call_(call), place_(std::move(place)), deadline_(Clock::Real().Uptime() + call.timeout) {}

  const BlobCall& call() const { return call_; }
  absl::Duration left() const { return deadline_ - Clock::Real().Uptime(); }
  absl::Status Check() const {
    if (call_.is_cancelled && call_.is_cancelled())
      return Error(absl::StatusCode::kCancelled, "{}: cancelled", place_);
    if (left() > absl::ZeroDuration()) return absl::OkStatus();
    return Error(absl::StatusCode::kDeadlineExceeded, "{}: not done after {}", place_,
                 absl::FormatDuration(call_.timeout));
  }
  // Sleeps in short pieces, since a cancelled call must end soon.
  absl::Status Pause(absl::Duration pause) const {
    const absl::Duration until = Clock::Real().Uptime() + std::min(pause, left());
    while (Clock::Real().Uptime() < until) {
      OUTLAST_RETURN_IF_ERROR(Check());
      Clock::Real().SleepFor(std::min(absl::Milliseconds(50), until - Clock::Real().Uptime()));
    }
    return Check();
  }

 private:
  const BlobCall& call_;
  const std::string place_;
  const absl::Duration deadline_;
};

// Runs `work` for 0..count-1 on a few threads; the first error ends it all.
absl::Status InParallel(uint64_t count, const std::function<absl::Status(uint64_t)>& work) {
  std::atomic<uint64_t> next{0};
  Mutex mutex;
  absl::Status first;
  const auto run = [&] {
    for (uint64_t i; (i = next.fetch_add(1)) < count;) {
      const absl::Status status = work(i);
      if (status.ok()) continue;
      next = count;
      MutexLock lock(mutex);
      if (first.ok()) first = status;
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < std::min<uint64_t>(kThreads, count); ++i) {
    threads.emplace_back([&run] {
      pthread_setname_np(pthread_self(), "outlast-s3");
      run();
    });
  }
  run();
  for (std::thread& thread : threads) thread.join();
  return first;
}

// One request to the bucket.
struct Ask {
  std::string method;
  std::string key;  // with the prefix; empty: the bucket
  Pairs query;
  Pairs headers;
  std::span<const std::byte> body;
  std::span<std::byte> into;
};

struct S3Error {
  std::string code, message;
};

S3Error ErrorIn(const HttpResponse& response) {
  size_t from = 0;
  S3Error error;
  error.code = XmlText(response.body, "Code", &from).value_or("");
  from = 0;
  error.message = XmlText(response.body, "Message", &from).value_or("");
  return error;
}

absl::StatusCode CodeOf(int status, const S3Error& error) {
  if (error.code == "NoSuchBucket") return absl::StatusCode::kFailedPrecondition;
  if (error.code == "QuotaExceeded") return absl::StatusCode::kResourceExhausted;
  if (error.code == "SlowDown" || error.code == "RequestTimeout" || error.code == "ExpiredToken")
    return absl::StatusCode::kUnavailable;
  if (status >= 500) {
    return status == 501   ? absl::StatusCode::kUnimplemented
           : status == 507 ? absl::StatusCode::kResourceExhausted
                           : absl::StatusCode::kUnavailable;
  }
  switch (status) {
    case 401:
    case 403:
      return absl::StatusCode::kPermissionDenied;
    case 404:
      return absl::StatusCode::kNotFound;
    case 409:  // two at once: the other may fail yet
    case 408:
    case 429:
      return absl::StatusCode::kUnavailable;
    case 412:
      return absl::StatusCode::kAlreadyExists;
    default:
      return absl::StatusCode::kInvalidArgument;
  }
}

absl::Status StatusOf(const HttpResponse& response, const std::string& place) {
  if (response.status / 100 == 2) {
    // Completing an upload may say 200 first and fail then.
    if (response.body.find("<Error>") == std::string::npos) return absl::OkStatus();
    const S3Error error = ErrorIn(response);
    return Error(CodeOf(500, error), "{}: {} {}", place, error.code, error.message.substr(0, 300));
  }
  const S3Error error = ErrorIn(response);
  return Error(CodeOf(response.status, error), "{}: HTTP {}{}{}{}", place, response.status,
               error.code.empty() ? "" : " " + error.code, error.message.empty() ? "" : ": ",
               error.message.substr(0, 300));
}

std::string Unquoted(std::string text) {
  std::erase(text, '"');
  return text;
}

class S3Blob final : public Blob {
 public:
  S3Blob(std::string uri, S3Place place, S3Credentials credentials)
      : uri_(std::move(uri)), place_(std::move(place)), credentials_(std::move(credentials)) {}

  absl::Status Put(const std::string& key, const BlobSource& source, PutMode mode,
                   const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(CheckBlobKey(key));
    const CallTime time(call, Shown(key));
    if (source.bytes >= kMultipartFrom) return PutInParts(key, source, mode, time);
    OUTLAST_ASSIGN_OR_RETURN(Mapping block,
                             Mapping::Anonymous(std::max<uint64_t>(1, source.bytes)));
    const std::span<std::byte> bytes(block.data(), source.bytes);
    OUTLAST_RETURN_IF_ERROR(source.read(0, bytes));
    return PutChecked({.method = "PUT",
                       .key = place_.prefix + key,
                       .headers = Conditions(mode),
                       .body = bytes},
                      time)
        .status();
  }

  absl::Status Get(const std::string& key, uint64_t offset, std::span<std::byte> into,
                   const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(CheckBlobKey(key));
    const CallTime time(call, Shown(key));
    if (into.empty()) {
      OUTLAST_ASSIGN_OR_RETURN(const BlobInfo info, Stat(key, call));
      return offset <= info.bytes
                 ? absl::OkStatus()
                 : Error(absl::StatusCode::kInvalidArgument, "{}: byte {} wanted, it has {}",
                         Shown(key), offset, info.bytes);
    }
    const uint64_t parts = (into.size() + kPartBytes - 1) / kPartBytes;
    return InParallel(parts, [&](uint64_t part) {
      const uint64_t begin = part * kPartBytes;
      const auto piece = into.subspan(begin, std::min<uint64_t>(kPartBytes, into.size() - begin));
      return GetPiece(key, offset + begin, piece, time);
    });
  }

  absl::StatusOr<BlobInfo> Stat(const std::string& key, const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(CheckBlobKey(key));
    OUTLAST_ASSIGN_OR_RETURN(
        const HttpResponse response,
        Send({.method = "HEAD", .key = place_.prefix + key}, CallTime(call, Shown(key))));
    const auto length = response.headers.find("content-length");
    if (length == response.headers.end())
      return Error(absl::StatusCode::kUnavailable, "{}: no Content-Length came", Shown(key));
    return BlobInfo{key, std::strtoull(length->second.c_str(), nullptr, 10)};
  }

  absl::StatusOr<BlobPage> List(const std::string& prefix, const std::string& after, int limit,
                                const BlobCall& call) override {
    Ask ask{.method = "GET",
            .query = {{"list-type", "2"},
                      {"prefix", place_.prefix + prefix},
                      {"max-keys", std::to_string(std::clamp(limit, 1, kMaxListing))}}};
    if (!after.empty()) ask.query.emplace_back("start-after", place_.prefix + after);
    OUTLAST_ASSIGN_OR_RETURN(const HttpResponse response, Send(ask, CallTime(call, Shown(prefix))));
    return ParseListing(response.body, prefix);
  }

  absl::Status Remove(const std::string& key, const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(CheckBlobKey(key));
    const absl::Status removed =
        Send({.method = "DELETE", .key = place_.prefix + key}, CallTime(call, Shown(key))).status();
    return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
  }

  std::string_view uri() const override { return uri_; }

  absl::Status MakeBucket() {
    const BlobCall call;
    const std::string body =
        place_.region == "us-east-1"
            ? ""
            : fmt::format(
                  "<CreateBucketConfiguration><LocationConstraint>{}</LocationConstraint>"
                  "</CreateBucketConfiguration>",
                  XmlEscape(place_.region));
    return Send({.method = "PUT", .body = std::as_bytes(std::span(body))},
                CallTime(call, place_.bucket))
        .status();
  }

 private:
  std::string Shown(std::string_view key) const {
    return fmt::format("s3://{}/{}{}", place_.bucket, place_.prefix, key);
  }

  static Pairs Conditions(PutMode mode) {
    return mode == PutMode::kCreate ? Pairs{{"if-none-match", "*"}} : Pairs{};
  }

  S3Credentials credentials() {
    MutexLock lock(mutex_);
    return credentials_;
  }

  void LookForNewCredentials() {
    auto found = FindS3Credentials(ProcessEnvironment());
    if (!found.ok()) return;
    MutexLock lock(mutex_);
    credentials_ = *std::move(found);
  }

  absl::StatusOr<HttpResponse> SendOnce(const Ask& ask, const CallTime& time) {
    const S3Credentials who = credentials();
    SignedRequest to_sign;
    to_sign.method = ask.method;
    to_sign.path = place_.base_path + "/" + UriEncode(ask.key, Slashes::kKeep);
    to_sign.query = ask.query;
    to_sign.headers = ask.headers;
    to_sign.payload_hash =
        ToHex(Sha256({reinterpret_cast<const char*>(ask.body.data()), ask.body.size()}));
    const std::string date = NowForSigning();
    to_sign.headers.emplace_back("host", place_.host);
    to_sign.headers.emplace_back("x-amz-date", date);
    to_sign.headers.emplace_back("x-amz-content-sha256", to_sign.payload_hash);
    if (!who.session_token.empty())
      to_sign.headers.emplace_back("x-amz-security-token", who.session_token);
    HttpRequest request;
    request.method = ask.method;
    request.url = place_.origin + to_sign.path;
    if (!ask.query.empty()) request.url += "?" + CanonicalQuery(ask.query);
    request.headers = to_sign.headers;
    request.headers.emplace_back("authorization",
                                 Authorization(to_sign, who, date, place_.region, "s3"));
    request.body = ask.body;
    request.into = ask.into;
    request.timeout = time.left();
    request.is_cancelled = time.call().is_cancelled;
    OUTLAST_ASSIGN_OR_RETURN(HttpResponse response, client_.Perform(request));
    if (response.status / 100 != 2 && ErrorIn(response).code == "ExpiredToken")
      LookForNewCredentials();
    OUTLAST_RETURN_IF_ERROR(
        StatusOf(response, Shown(ask.key.substr(std::min(ask.key.size(), place_.prefix.size())))));
    if (response.received != ask.into.size())
      return ShortRange(Shown(ask.key.substr(place_.prefix.size())), ask, response);
    return response;
  }

  // Either the object ends before, or the answer was cut.
  static absl::Status ShortRange(const std::string& place, const Ask& ask,
                                 const HttpResponse& response) {
    const auto range = response.headers.find("content-range");  // "bytes 10-19/20"
    const bool is_cut = range == response.headers.end() ||
                        !range->second.ends_with(
                            fmt::format("-{}/{}", RangeBegin(range->second) + response.received - 1,
                                        RangeBegin(range->second) + response.received));
    return Error(is_cut ? absl::StatusCode::kUnavailable : absl::StatusCode::kInvalidArgument,
                 "{}: {} bytes came, {} wanted", place, response.received, ask.into.size());
  }
  static uint64_t RangeBegin(const std::string& range) {
    const size_t digit = range.find_first_of("0123456789");
    return digit == std::string::npos ? 0 : std::strtoull(range.c_str() + digit, nullptr, 10);
  }

  // Tries again what may pass, until the time is up. Pauses grow, and are drawn at random so that
  // many who were refused at once do not come back at once.
  absl::StatusOr<HttpResponse> Send(const Ask& ask, const CallTime& time) {
    absl::Duration longest = kFirstPause;
    while (true) {
      OUTLAST_RETURN_IF_ERROR(time.Check());
      auto response = SendOnce(ask, time);
      if (!absl::IsUnavailable(response.status())) return response;
      const absl::Duration pause = longest * (static_cast<double>(RandomU64() % 1000) / 1000);
      if (pause >= time.left()) return response;
      OUTLAST_RETURN_IF_ERROR(time.Pause(pause));
      longest = std::min(2 * longest, kLongestPause);
    }
  }

  // Puts a body; the server's ETag must be its MD5. Where the server encrypts by keys of its own it
  // is none: then the signed SHA-256 alone speaks.
  absl::StatusOr<std::string> PutChecked(const Ask& ask, const CallTime& time) {
    OUTLAST_ASSIGN_OR_RETURN(const HttpResponse response, Send(ask, time));
    const auto found = response.headers.find("etag");
    const std::string etag = found == response.headers.end() ? "" : found->second;
    const auto encryption = response.headers.find("x-amz-server-side-encryption");
    const bool is_md5 = encryption == response.headers.end() || encryption->second == "AES256";
    const std::string wanted = is_md5 ? Md5(ask.body) : "";
    if (!wanted.empty() && Unquoted(etag) != wanted) {
      return Error(absl::StatusCode::kDataLoss, "s3://{}/{}: stored with ETag {}, MD5 {} was sent",
                   place_.bucket, ask.key, etag, wanted);
    }
    return etag;
  }

  absl::Status GetPiece(const std::string& key, uint64_t offset, std::span<std::byte> piece,
                        const CallTime& time) {
    const auto response =
        Send({.method = "GET",
              .key = place_.prefix + key,
              .headers = {{"range", fmt::format("bytes={}-{}", offset, offset + piece.size() - 1)}},
              .into = piece},
             time);
    return response.status();
  }

  absl::Status PutInParts(const std::string& key, const BlobSource& source, PutMode mode,
                          const CallTime& time) {
    if (mode == PutMode::kCreate) {  // before all bytes have gone
      absl::Status taken = Stat(key, time.call()).status();
      if (taken.ok())
        return Error(absl::StatusCode::kAlreadyExists, "{}: the key is taken", Shown(key));
      if (!absl::IsNotFound(taken)) return taken;
    }
    const std::string full = place_.prefix + key;
    OUTLAST_ASSIGN_OR_RETURN(
        const HttpResponse begun,
        Send({.method = "POST", .key = full, .query = {{"uploads", ""}}}, time));
    size_t from = 0;
    const auto upload = XmlText(begun.body, "UploadId", &from);
    if (!upload) return Error(absl::StatusCode::kUnavailable, "{}: no UploadId came", Shown(key));
    absl::Status status = SendParts(full, *upload, source, mode, time);
    if (!status.ok()) {
      const BlobCall call{.timeout = absl::Seconds(10), .is_cancelled = {}};
      Send({.method = "DELETE", .key = full, .query = {{"uploadId", *upload}}},
           CallTime(call, Shown(key)))
          .status()
          .IgnoreError();
    }
    return status;
  }

  absl::Status SendParts(const std::string& full, const std::string& upload,
                         const BlobSource& source, PutMode mode, const CallTime& time) {
    constexpr uint64_t kMiB = uint64_t{1} << 20;
    const uint64_t least = (source.bytes + kMaxParts - 1) / kMaxParts;
    const uint64_t part_bytes = std::max(kPartBytes, (least + kMiB - 1) / kMiB * kMiB);
    const uint64_t parts = (source.bytes + part_bytes - 1) / part_bytes;
    std::vector<std::string> etags(parts);
    const auto send_part = [&](uint64_t part) -> absl::Status {
      OUTLAST_RETURN_IF_ERROR(time.Check());
      const uint64_t begin = part * part_bytes;
      const uint64_t bytes = std::min(part_bytes, source.bytes - begin);
      OUTLAST_ASSIGN_OR_RETURN(Mapping block, Mapping::Anonymous(bytes));
      const std::span<std::byte> body(block.data(), bytes);
      OUTLAST_RETURN_IF_ERROR(source.read(begin, body));
      OUTLAST_ASSIGN_OR_RETURN(
          etags[part],
          PutChecked({.method = "PUT",
                      .key = full,
                      .query = {{"partNumber", std::to_string(part + 1)}, {"uploadId", upload}},
                      .body = body},
                     time));
      return absl::OkStatus();
    };
    OUTLAST_RETURN_IF_ERROR(InParallel(parts, send_part));
    std::string list = "<CompleteMultipartUpload>";
    for (uint64_t part = 0; part < parts; ++part) {
      list += fmt::format("<Part><PartNumber>{}</PartNumber><ETag>{}</ETag></Part>", part + 1,
                          XmlEscape(etags[part]));
    }
    list += "</CompleteMultipartUpload>";
    absl::Status completed = Send({.method = "POST",
                                   .key = full,
                                   .query = {{"uploadId", upload}},
                                   .headers = Conditions(mode),
                                   .body = std::as_bytes(std::span(list))},
                                  time)
                                 .status();
    if (!absl::IsNotFound(completed)) return completed;
    // No such upload: an answer was lost, and this was the second try. The object tells.
    OUTLAST_ASSIGN_OR_RETURN(const HttpResponse stored,
                             Send({.method = "HEAD", .key = full}, time));
    const auto length = stored.headers.find("content-length");
    const bool is_whole =
        length != stored.headers.end() && length->second == std::to_string(source.bytes);
    return is_whole ? absl::OkStatus() : completed;
  }

  absl::StatusOr<BlobPage> ParseListing(std::string_view xml, const std::string& prefix) const {
    const auto malformed = [&](std::string_view what) {
      return Error(absl::StatusCode::kUnavailable, "list {}: no {} in the answer", Shown(prefix),
                   what);
    };
    size_t from = 0;
    const auto truncated = XmlText(xml, "IsTruncated", &from);
    if (!truncated) return malformed("IsTruncated");
    BlobPage page;
    page.has_more = *truncated == "true";
    from = 0;
    while ((from = xml.find("<Contents>", from)) != std::string_view::npos) {
      size_t at = from;
      const auto key = XmlText(xml, "Key", &at);
      at = from;
      const auto size = XmlText(xml, "Size", &at);
      if (!key || !size || !key->starts_with(place_.prefix)) return malformed("key and size");
      page.objects.push_back(
          {key->substr(place_.prefix.size()), std::strtoull(size->c_str(), nullptr, 10)});
      from += 1;
    }
    if (page.has_more && page.objects.empty()) return malformed("object on a page with more");
    return page;
  }

  const std::string uri_;
  const S3Place place_;
  HttpClient client_;
  Mutex mutex_;
  S3Credentials credentials_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<std::unique_ptr<S3Blob>> Make(const std::string& uri) {
  OUTLAST_ASSIGN_OR_RETURN(S3Place place, ParseS3Uri(uri, ProcessEnvironment()));
  OUTLAST_ASSIGN_OR_RETURN(S3Credentials credentials, FindS3Credentials(ProcessEnvironment()));
  return std::make_unique<S3Blob>(uri, std::move(place), std::move(credentials));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Blob>> MakeS3Blob(const std::string& uri) {
  OUTLAST_ASSIGN_OR_RETURN(std::unique_ptr<Blob> blob, Make(uri));
  return blob;
}

absl::Status MakeS3Bucket(const std::string& uri) {
  OUTLAST_ASSIGN_OR_RETURN(const auto blob, Make(uri));
  return blob->MakeBucket();
}

absl::Status RegisterS3(Plugins& plugins) {
  return plugins.Of<Blob>().Add(
      "s3", [](const std::string& uri, const Plugins&) { return MakeS3Blob(uri); });
}

}  // namespace outlast
