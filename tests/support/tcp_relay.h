// A stretch of network that can be cut: listens on a loopback address of its own and carries bytes
// to a target and back. What is cut stays connected, as with a network that loses all packets:
// bytes wait, and pass when it is healed.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <list>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/socket.h"
#include "outlast/base/fd.h"

namespace outlast::testing {

class TcpRelay {
 public:
  enum class Way { kNone, kTowards, kBack, kBoth };

  // `host`: where it listens; `target`: HOST:PORT. Both numbers.
  TcpRelay(const std::string& host, const std::string& target)
      : target_(NumericAddress(HostPort::Parse(target).value()).value()),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        listener_(ListenOn(NumericAddress({host, 0}).value()).value()),
        address_(SocketAddress::Local(listener_.get()).value().host_port().text()) {
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "relay");
      Run();
    });
  }
  ~TcpRelay() {
    is_over_ = true;
    Wake();
    if (thread_.joinable()) thread_.join();
  }

  const std::string& address() const { return address_; }
  // Which way nothing passes from now on.
  void Cut(Way way) {
    cut_ = way;
    Wake();
  }
  void Heal() { Cut(Way::kNone); }
  // Both ways, once the target has sent so much more.
  void CutAfter(int64_t bytes_back) { back_left_ = bytes_back; }
  bool is_cut() const { return cut_ != Way::kNone; }

 private:
  // Bytes of one connection in one direction.
  struct Stream {
    std::string waiting;
    bool is_at_end = false;
    int64_t carried = 0;
  };
  struct Connection {
    UniqueFd near, far;
    Stream towards, back;
  };

  void Wake() const {
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof one);
  }
  bool Passes(Way way) const {
    const Way cut = cut_;
    return cut != Way::kBoth && cut != way;
  }

  void Accept() {
    auto near = AcceptOn(listener_.get());
    auto far = StartConnect(target_);
    if (near.ok() && far.ok()) connections_.push_back({*std::move(near), *std::move(far), {}, {}});
  }

  // False: this direction's reader or writer is gone.
  static bool Carry(int from, int to, Stream& stream) {
    std::array<char, 16384> block;
    if (stream.waiting.empty() && !stream.is_at_end) {
      const ssize_t got = recv(from, block.data(), block.size(), MSG_DONTWAIT);
      if (got < 0) return errno == EAGAIN || errno == EINTR || errno == ENOTCONN;
      if (got == 0) {
        stream.is_at_end = true;
        shutdown(to, SHUT_WR);
        return true;
      }
      stream.waiting.assign(block.data(), static_cast<size_t>(got));
      stream.carried += got;
    }
    if (stream.waiting.empty()) return true;
    const ssize_t put =
        send(to, stream.waiting.data(), stream.waiting.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0) return errno == EAGAIN || errno == EINTR || errno == ENOTCONN;
    stream.waiting.erase(0, static_cast<size_t>(put));
    return true;
  }

  void CountBack(int64_t bytes) {
    if (bytes == 0 || back_left_ <= 0) return;
    back_left_ -= bytes;
    if (back_left_ <= 0) cut_ = Way::kBoth;
  }

  void Run() {
    while (!is_over_) {
      // Who connects meanwhile waits in the backlog.
      const int listener = cut_ == Way::kBoth ? -1 : listener_.get();
      std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}, {listener, POLLIN, 0}};
      const bool towards = Passes(Way::kTowards), back = Passes(Way::kBack);
      for (const Connection& one : connections_) {
        const auto events = [](bool reads, const Stream& in, bool writes, const Stream& out) {
          return static_cast<short>((reads && in.waiting.empty() && !in.is_at_end ? POLLIN : 0) |
                                    (writes && !out.waiting.empty() ? POLLOUT : 0));
        };
        // What is cut both ways is not looked at: its end would be seen again and again.
        const short near = events(towards, one.towards, back, one.back);
        const short far = events(back, one.back, towards, one.towards);
        polled.push_back({near == 0 ? -1 : one.near.get(), near, 0});
        polled.push_back({far == 0 ? -1 : one.far.get(), far, 0});
      }
      if (poll(polled.data(), polled.size(), -1) < 0) continue;
      uint64_t ignored = 0;
      (void)!read(wake_.get(), &ignored, sizeof ignored);
      for (auto one = connections_.begin(); one != connections_.end();) {
        const bool lives =
            (!Passes(Way::kTowards) || Carry(one->near.get(), one->far.get(), one->towards)) &&
            (!Passes(Way::kBack) || Carry(one->far.get(), one->near.get(), one->back)) &&
            !(one->towards.is_at_end && one->back.is_at_end);
        CountBack(std::exchange(one->back.carried, 0));
        one = lives ? std::next(one) : connections_.erase(one);
      }
      if (polled[1].revents != 0) Accept();
    }
  }

  const SocketAddress target_;
  const UniqueFd wake_;
  const UniqueFd listener_;
  const std::string address_;
  std::list<Connection> connections_;
  std::atomic<Way> cut_ = Way::kNone;
  std::atomic<int64_t> back_left_ = 0;  // until the cut; 0: none is meant
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
};

}  // namespace outlast::testing
