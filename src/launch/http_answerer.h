// Answers HTTP/1.1 GET requests on the agent's loop, and never makes it wait.
//
// A departure from the house's cpp-httplib, which answers each client in a thread that blocks: here
// a client costs the loop some microseconds whenever its socket is ready, and nothing while it is
// slow. Each connection is closed after its answer.
//
//   accept ──> reads a head of at most 8 KiB ──> answer() ──> writes ──> closed
//                 └──────────── 5 s in all, else closed ────────┘
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "outlast/base/fd.h"

namespace outlast {

struct PageRequest {
  std::string path;    // without what follows a '?'
  std::string accept;  // the header's value; empty: none
};

struct PageAnswer {
  int code = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

// Bytes of `head`, up to and without its empty line, as a request. Else the response that says what
// is wrong with it: 400, 405, 505. Pure.
struct ParsedHttp {
  bool is_head_only = false;  // HEAD
  PageRequest request;
  PageAnswer refusal;  // code 200: none
};
ParsedHttp ParseHttp(std::string_view head);

// The bytes of an answer. `with_body`: not for HEAD.
std::string HttpBytes(const PageAnswer& response, bool with_body);

struct HttpLimits {
  size_t clients = 64;  // connections at once; more wait in the listener's queue
  size_t head_bytes = 8 << 10;
  absl::Duration time = absl::Seconds(5);  // from accept to the last byte taken
};

// Belongs to the loop's thread. Its destruction closes everything.
class HttpAnswerer {
 public:
  // `answer` is called on the loop's thread, once a request.
  HttpAnswerer(EventLoop& loop, std::function<PageAnswer(const PageRequest&)> answer,
               HttpLimits limits = {});
  ~HttpAnswerer();

  // Takes a listening, non-blocking stream socket.
  absl::Status Serve(UniqueFd listener);
  size_t clients() const { return clients_.size(); }

 private:
  struct Client;

  void Accept(int listener);
  void OnReady(int fd);
  void Read(Client& client);
  bool TakeSurplus(Client& client);
  void Retry(int fd);
  void Answer(Client& client, std::string_view head);
  void Write(Client& client);
  void Close(int fd);
  void PauseAccepting(bool pause);

  EventLoop& loop_;
  const std::function<PageAnswer(const PageRequest&)> answer_;
  const HttpLimits limits_;
  std::vector<UniqueFd> listeners_;
  std::map<int, std::unique_ptr<Client>> clients_;  // by descriptor
  bool is_paused_ = false;
  EventLoop::TimerId resume_ = 0;
};

}  // namespace outlast
