#include "adapters/http.h"

#include <curl/curl.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "base/error.h"

namespace outlast {
namespace {

constexpr size_t kMaxBody = size_t{64} << 20;
constexpr size_t kMaxHeaders = 1000;

// libcurl brings two dozen libraries, which cost a process 6 ms to load: so it is loaded when the
// first client is made, and a run that names no remote store does without.
struct Curl {
  decltype(&curl_global_init) global_init = nullptr;
  decltype(&curl_easy_init) easy_init = nullptr;
  decltype(&curl_easy_reset) easy_reset = nullptr;
  decltype(&curl_easy_setopt) easy_setopt = nullptr;
  decltype(&curl_easy_perform) easy_perform = nullptr;
  decltype(&curl_easy_getinfo) easy_getinfo = nullptr;
  decltype(&curl_easy_strerror) easy_strerror = nullptr;
  decltype(&curl_easy_cleanup) easy_cleanup = nullptr;
  decltype(&curl_slist_append) slist_append = nullptr;
  decltype(&curl_slist_free_all) slist_free_all = nullptr;
  std::string error;  // why it could not be loaded
};

// What the dynamic linker says of its last failure; `name` where it says nothing.
std::string LastDlError(const char* name) {
  const char* const why = dlerror();
  return why != nullptr ? why : name;
}

Curl LoadCurl() {
  Curl curl;
  void* const library = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    curl.error = LastDlError("libcurl.so.4");
    return curl;
  }
  const auto find = [&](const char* name, auto& function) {
    void* const found = dlsym(library, name);
    if (found == nullptr && curl.error.empty()) curl.error = LastDlError(name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  find("curl_global_init", curl.global_init);
  find("curl_easy_init", curl.easy_init);
  find("curl_easy_reset", curl.easy_reset);
  find("curl_easy_setopt", curl.easy_setopt);
  find("curl_easy_perform", curl.easy_perform);
  find("curl_easy_getinfo", curl.easy_getinfo);
  find("curl_easy_strerror", curl.easy_strerror);
  find("curl_easy_cleanup", curl.easy_cleanup);
  find("curl_slist_append", curl.slist_append);
  find("curl_slist_free_all", curl.slist_free_all);
  if (curl.global_init != nullptr) curl.global_init(CURL_GLOBAL_DEFAULT);
  return curl;
}

const Curl& TheCurl() {
  static const Curl curl = LoadCurl();
  return curl;
}

struct Transfer {
  CURL* handle = nullptr;
  const HttpRequest* request = nullptr;
  HttpResponse response;
  bool too_large = false;
};

size_t TakeBody(char* data, size_t, size_t bytes, void* context) {
  auto& transfer = *static_cast<Transfer*>(context);
  long status = 0;
  TheCurl().easy_getinfo(transfer.handle, CURLINFO_RESPONSE_CODE, &status);
  const std::span<std::byte> into = transfer.request->into;
  if (status / 100 == 2 && !into.empty()) {
    if (bytes > into.size() - transfer.response.received) return transfer.too_large = true, 0;
    std::memcpy(into.data() + transfer.response.received, data, bytes);
    transfer.response.received += bytes;
    return bytes;
  }
  if (bytes > kMaxBody - transfer.response.body.size()) return transfer.too_large = true, 0;
  transfer.response.body.append(data, bytes);
  return bytes;
}

size_t TakeHeader(char* data, size_t, size_t bytes, void* context) {
  auto& transfer = *static_cast<Transfer*>(context);
  const std::string_view line(data, bytes);
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || transfer.response.headers.size() > kMaxHeaders)
    return bytes;
  std::string name(line.substr(0, colon));
  std::ranges::transform(name, name.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  });
  const size_t begin = line.find_first_not_of(" \t", colon + 1);
  const size_t end = line.find_last_not_of(" \t\r\n");
  transfer.response.headers[name] =
      begin == std::string_view::npos || end < begin ? "" : line.substr(begin, end - begin + 1);
  return bytes;
}

int AskOn(void* context, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  const auto& request = *static_cast<Transfer*>(context)->request;
  return request.is_cancelled && request.is_cancelled() ? 1 : 0;
}

absl::StatusCode CodeOf(CURLcode code) {
  switch (code) {
    case CURLE_OPERATION_TIMEDOUT:
      return absl::StatusCode::kUnavailable;  // the caller knows whether its time is up
    case CURLE_ABORTED_BY_CALLBACK:
      return absl::StatusCode::kCancelled;
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
      return absl::StatusCode::kFailedPrecondition;
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
      return absl::StatusCode::kInvalidArgument;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

void SetUp(CURL* handle, Transfer& transfer, curl_slist* headers) {
  const HttpRequest& request = *transfer.request;
  const auto set = [handle](CURLoption option, auto value) {
    TheCurl().easy_setopt(handle, option, value);
  };
  TheCurl().easy_reset(handle);  // connections are kept
  set(CURLOPT_URL, request.url.c_str());
  set(CURLOPT_NOSIGNAL, 1L);
  set(CURLOPT_NETRC, static_cast<long>(CURL_NETRC_IGNORED));
#if LIBCURL_VERSION_NUM >= 0x075500
  set(CURLOPT_PROTOCOLS_STR, "http,https");
#else
  set(CURLOPT_PROTOCOLS, static_cast<long>(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
  set(CURLOPT_HTTPHEADER, headers);
  set(CURLOPT_CONNECTTIMEOUT_MS, 10'000L);
  set(CURLOPT_TIMEOUT_MS, std::max<long>(1, static_cast<long>(absl::ToInt64Milliseconds(
                                                std::min(request.timeout, absl::Hours(24))))));
  set(CURLOPT_LOW_SPEED_LIMIT, 1L);
  set(CURLOPT_LOW_SPEED_TIME, 30L);
  set(CURLOPT_BUFFERSIZE, 512L << 10);
  set(CURLOPT_UPLOAD_BUFFERSIZE, 1024L << 10);
  set(CURLOPT_WRITEFUNCTION, &TakeBody);
  set(CURLOPT_WRITEDATA, &transfer);
  set(CURLOPT_HEADERFUNCTION, &TakeHeader);
  set(CURLOPT_HEADERDATA, &transfer);
  set(CURLOPT_NOPROGRESS, 0L);
  set(CURLOPT_XFERINFOFUNCTION, &AskOn);
  set(CURLOPT_XFERINFODATA, &transfer);
  if (request.method == "HEAD") {
    set(CURLOPT_NOBODY, 1L);
  } else if (request.method == "PUT" || request.method == "POST") {
    set(CURLOPT_POST, 1L);
    set(CURLOPT_CUSTOMREQUEST, request.method.c_str());
    set(CURLOPT_POSTFIELDS,
        request.body.empty() ? "" : reinterpret_cast<const char*>(request.body.data()));
    set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
  } else if (request.method != "GET") {
    set(CURLOPT_CUSTOMREQUEST, request.method.c_str());
  }
}

}  // namespace

HttpClient::HttpClient() = default;

HttpClient::~HttpClient() {
  MutexLock lock(mutex_);
  for (void* handle : idle_) TheCurl().easy_cleanup(handle);
}

void* HttpClient::Take() {
  MutexLock lock(mutex_);
  if (idle_.empty()) return TheCurl().easy_init();
  void* handle = idle_.back();
  idle_.pop_back();
  return handle;
}

void HttpClient::Keep(void* handle) {
  MutexLock lock(mutex_);
  idle_.push_back(handle);
}

absl::StatusOr<HttpResponse> HttpClient::Perform(const HttpRequest& request) {
  if (!TheCurl().error.empty()) {
    return Error(absl::StatusCode::kFailedPrecondition, "libcurl could not be loaded: {}",
                 TheCurl().error);
  }
  // What curl would add by itself was not signed, or costs a round trip.
  curl_slist* list = TheCurl().slist_append(nullptr, "Expect:");
  list = TheCurl().slist_append(list, "Content-Type:");
  for (const auto& [name, value] : request.headers)
    list = TheCurl().slist_append(list, fmt::format("{}: {}", name, value).c_str());
  const std::unique_ptr<curl_slist, decltype(&curl_slist_free_all)> headers(
      list, TheCurl().slist_free_all);
  void* handle = Take();
  if (handle == nullptr) return Error(absl::StatusCode::kResourceExhausted, "no curl handle");
  Transfer transfer{handle, &request, {}, false};
  SetUp(handle, transfer, list);
  const CURLcode code = TheCurl().easy_perform(handle);
  long status = 0;
  TheCurl().easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &status);
  Keep(handle);
  const std::string place =
      fmt::format("{} {}", request.method, request.url.substr(0, request.url.find('?')));
  if (transfer.too_large)
    return Error(absl::StatusCode::kUnavailable, "{}: more bytes came than were asked for", place);
  if (code != CURLE_OK) return Error(CodeOf(code), "{}: {}", place, TheCurl().easy_strerror(code));
  transfer.response.status = static_cast<int>(status);
  return std::move(transfer.response);
}

}  // namespace outlast
