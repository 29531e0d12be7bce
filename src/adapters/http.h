// One HTTP request at a time and thread, over connections that are kept. By libcurl.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/base/mutex.h"

namespace outlast {

struct HttpRequest {
  std::string method;  // GET, HEAD, PUT, POST, DELETE
  std::string url;
  std::vector<std::pair<std::string, std::string>> headers;
  std::span<const std::byte> body;
  // Where the body of a 2xx answer goes instead of HttpResponse::body, when not empty; a longer one
  // is kUnavailable.
  std::span<std::byte> into;
  absl::Duration timeout;
  std::function<bool()> is_cancelled;  // may be empty
};

struct HttpResponse {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
  size_t received = 0;  // bytes in `into`
};

// Safe for concurrent use.
class HttpClient {
 public:
  HttpClient();
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // Any answer is OK. kUnavailable: none came (no connection, cut, no byte for 30 s);
  // kDeadlineExceeded; kCancelled; kFailedPrecondition: the peer's certificate is not trusted.
  // Redirects are not followed.
  absl::StatusOr<HttpResponse> Perform(const HttpRequest& request);

 private:
  void* Take();
  void Keep(void* handle);

  Mutex mutex_;
  std::vector<void*> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace outlast
