#include "launch/http_answerer.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/socket.h"

namespace outlast {
namespace {

// No descriptor was left for a client: the listeners rest for so long.
constexpr absl::Duration kRest = absl::Seconds(1);
// How often a client that closed its end, and took no more bytes, is tried again.
constexpr absl::Duration kRetry = absl::Milliseconds(20);
constexpr size_t kMaxSurplus = 64 << 10;

bool EqualsIgnoringCase(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) ==
           std::tolower(static_cast<unsigned char>(y));
  });
}

std::string_view Trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// The next line, without its end; takes it from `text`.
std::string_view TakeLine(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  return line;
}

// Where the head ends, its empty line included; npos: not yet.
size_t EndOfHead(std::string_view bytes) {
  const size_t strict = bytes.find("\r\n\r\n");
  if (strict != std::string_view::npos) return strict + 4;
  const size_t loose = bytes.find("\n\n");
  return loose == std::string_view::npos ? loose : loose + 2;
}

std::string_view ReasonOf(int code) {
  switch (code) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Error";
  }
}

ParsedHttp Refused(int code, std::string why) {
  ParsedHttp parsed;
  parsed.refusal = {.code = code, .body = std::move(why) + "\n"};
  return parsed;
}

}  // namespace

ParsedHttp ParseHttp(std::string_view head) {
  const std::string_view line = TakeLine(head);
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last)
    return Refused(400, "no request line: METHOD PATH HTTP/1.1 wanted");
  const std::string_view method = line.substr(0, first);
  const std::string_view target = line.substr(first + 1, last - first - 1);
  const std::string_view version = line.substr(last + 1);
  if (!version.starts_with("HTTP/")) return Refused(400, "no request line: HTTP/1.1 wanted");
  if (!version.starts_with("HTTP/1.")) return Refused(505, "HTTP/1.1 wanted");
  if (method != "GET" && method != "HEAD") return Refused(405, "GET wanted");
  if (!target.starts_with('/') || target.find(' ') != std::string_view::npos)
    return Refused(400, "a path that begins with / wanted");
  ParsedHttp parsed;
  parsed.is_head_only = method == "HEAD";
  parsed.request.path = std::string(target.substr(0, target.find('?')));
  while (!head.empty()) {
    const std::string_view header = TakeLine(head);
    const size_t colon = header.find(':');
    if (colon == std::string_view::npos) continue;
    if (EqualsIgnoringCase(header.substr(0, colon), "accept"))
      parsed.request.accept = std::string(Trimmed(header.substr(colon + 1)));
  }
  return parsed;
}

std::string HttpBytes(const PageAnswer& response, bool with_body) {
  std::string bytes = fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}Cache-Control: no-store\r\n"
      "Connection: close\r\n\r\n",
      response.code, ReasonOf(response.code), response.content_type, response.body.size(),
      response.code == 405 ? "Allow: GET, HEAD\r\n" : "");
  if (with_body) bytes += response.body;
  return bytes;
}

struct HttpAnswerer::Client {
  UniqueFd fd;
  std::string head;   // read so far
  std::string bytes;  // to be written; empty: the request is not whole
  size_t written = 0;
  size_t surplus = 0;  // bytes behind the request
  EventLoop::TimerId deadline = 0;
  EventLoop::TimerId retry = 0;
  bool is_answered() const { return !bytes.empty() && written == bytes.size(); }
};

HttpAnswerer::HttpAnswerer(EventLoop& loop, std::function<PageAnswer(const PageRequest&)> answer,
                           HttpLimits limits)
    : loop_(loop), answer_(std::move(answer)), limits_(limits) {}

HttpAnswerer::~HttpAnswerer() {
  loop_.Cancel(resume_);
  while (!clients_.empty()) Close(clients_.begin()->first);
  for (const UniqueFd& listener : listeners_) loop_.Unwatch(listener.get());
}

absl::Status HttpAnswerer::Serve(UniqueFd listener) {
  const int fd = listener.get();
  OUTLAST_RETURN_IF_ERROR(loop_.Watch(fd, [this, fd] { Accept(fd); }));
  listeners_.push_back(std::move(listener));
  return absl::OkStatus();
}

// Connections that find no place stay in the kernel's queue; it is bounded too.
void HttpAnswerer::PauseAccepting(bool pause) {
  if (is_paused_ == pause) return;
  is_paused_ = pause;
  for (const UniqueFd& listener : listeners_) {
    const int fd = listener.get();
    loop_.Unwatch(fd);
    if (!pause) loop_.Watch(fd, [this, fd] { Accept(fd); }).IgnoreError();
  }
}

// One a call, so that many clients leave room for everything else on the loop.
void HttpAnswerer::Accept(int listener) {
  auto accepted = AcceptOn(listener);
  if (!accepted.ok()) {
    if (!absl::IsResourceExhausted(accepted.status())) return;
    PauseAccepting(true);
    loop_.Cancel(resume_);
    resume_ = loop_.RunAfter(kRest, [this] { PauseAccepting(false); });
    return;
  }
  const int fd = accepted->get();
  if (!loop_.Watch(fd, [this, fd] { OnReady(fd); }).ok()) return;
  auto client = std::make_unique<Client>();
  client->fd = *std::move(accepted);
  client->deadline = loop_.RunAfter(limits_.time, [this, fd] { Close(fd); });
  clients_[fd] = std::move(client);
  if (clients_.size() >= limits_.clients) PauseAccepting(true);
}

void HttpAnswerer::OnReady(int fd) {
  Client& client = *clients_.at(fd);
  if (client.bytes.empty()) return Read(client);
  if (TakeSurplus(client)) return;
  if (!client.is_answered()) Write(client);
}

void HttpAnswerer::Read(Client& client) {
  std::array<char, 4096> buffer;
  const ssize_t count = recv(client.fd.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count <= 0) return Close(client.fd.get());
  client.head.append(buffer.data(), static_cast<size_t>(count));
  const size_t end = EndOfHead(client.head);
  if (end == std::string::npos && client.head.size() <= limits_.head_bytes) return;
  if (end == std::string::npos || end > limits_.head_bytes) {
    client.bytes = HttpBytes({.code = 431, .body = "the request is too long\n"}, true);
  } else {
    Answer(client, std::string_view(client.head).substr(0, end));
  }
  Write(client);
}

// Takes what comes behind the request, so that it does not wake the loop again and again. True: the
// client is not to be looked at any more.
bool HttpAnswerer::TakeSurplus(Client& client) {
  const int fd = client.fd.get();
  std::array<char, 4096> buffer;
  const ssize_t count = recv(fd, buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count > 0) client.surplus += static_cast<size_t>(count);
  const bool has_closed_its_end = count == 0 && !client.is_answered();
  if (!has_closed_its_end) {
    if (count > 0 && client.surplus <= kMaxSurplus) return false;
    Close(fd);
    return true;
  }
  // It may still read; but its end of file would be ready for ever.
  loop_.Unwatch(fd);
  Retry(fd);
  return true;
}

void HttpAnswerer::Retry(int fd) {
  clients_.at(fd)->retry = loop_.RunAfter(kRetry, [this, fd] {
    Write(*clients_.at(fd));
    const auto client = clients_.find(fd);
    if (client == clients_.end()) return;
    if (client->second->is_answered()) return Close(fd);
    Retry(fd);
  });
}

void HttpAnswerer::Answer(Client& client, std::string_view head) {
  const ParsedHttp parsed = ParseHttp(head);
  const bool is_refused = parsed.refusal.code != 200;
  client.bytes =
      HttpBytes(is_refused ? parsed.refusal : answer_(parsed.request), !parsed.is_head_only);
}

void HttpAnswerer::Write(Client& client) {
  const int fd = client.fd.get();
  while (client.written < client.bytes.size()) {
    const ssize_t count = send(fd, client.bytes.data() + client.written,
                               client.bytes.size() - client.written, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return loop_.WatchWrites(fd, true).IgnoreError();
    if (count <= 0) return Close(fd);
    client.written += static_cast<size_t>(count);
  }
  // Closing over bytes that were not read (a long request) would reset the connection, and the
  // answer with it: the other end leaves first, or its time is up.
  loop_.WatchWrites(fd, false).IgnoreError();
  if (shutdown(fd, SHUT_WR) != 0) Close(fd);
}

void HttpAnswerer::Close(int fd) {
  const auto found = clients_.find(fd);
  if (found == clients_.end()) return;
  loop_.Cancel(found->second->deadline);
  loop_.Cancel(found->second->retry);
  loop_.Unwatch(fd);
  clients_.erase(found);
  if (clients_.size() < limits_.clients) PauseAccepting(false);
}

}  // namespace outlast
