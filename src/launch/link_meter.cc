#include "launch/link_meter.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/serial_thread.h"
#include "base/socket.h"
#include "outlast/base/clock.h"
#include "outlast/base/fd.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

constexpr size_t kMostBytes = 64 << 20;
constexpr size_t kPieceBytes = 256 << 10;
constexpr int kSendBuffer = 1 << 20;  // what may wait in the kernel when the time is over
constexpr absl::Duration kSendFor = absl::Milliseconds(300);
constexpr absl::Duration kPatience = absl::Seconds(2);  // of each wait: a call, one way's bytes
constexpr absl::Duration kGlance = absl::Milliseconds(50);
constexpr size_t kMostTickets = 16;

// What came one way. As it is on the wire; little endian.
struct Received {
  uint64_t bytes = 0;
  uint64_t nanoseconds = 0;
  double megabytes_per_second() const {
    return static_cast<double>(bytes) * 1e3 /
           static_cast<double>(std::max<uint64_t>(1, nanoseconds));
  }
};
static_assert(sizeof(Received) == 16);

// One end of a measurement: a connection, with a limit to each wait.
class Line {
 public:
  Line(UniqueFd fd, const std::atomic<bool>& is_over) : fd_(std::move(fd)), is_over_(is_over) {
    (void)setsockopt(fd_.get(), SOL_SOCKET, SO_SNDBUF, &kSendBuffer, sizeof kSendBuffer);
  }

  absl::Status WaitFor(short events, absl::Duration until) const {
    pollfd polled{.fd = fd_.get(), .events = events, .revents = 0};
    while (poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(kGlance))) <= 0) {
      if (is_over_) return absl::CancelledError("this agent ends");
      if (Clock::Real().Uptime() >= until)
        return Error(absl::StatusCode::kDeadlineExceeded, "no answer within {}",
                     absl::FormatDuration(kPatience));
    }
    return absl::OkStatus();
  }
  absl::Status Connected() const {
    OUTLAST_RETURN_IF_ERROR(WaitFor(POLLOUT, Clock::Real().Uptime() + kPatience));
    return SocketError(fd_.get());
  }
  absl::Status Write(std::span<const std::byte> bytes) const {
    // A few bytes into a fresh connection: they fit its buffer.
    const ssize_t count = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count == static_cast<ssize_t>(bytes.size())) return absl::OkStatus();
    return ErrnoStatus(count < 0 ? errno : EAGAIN, "measure a link");
  }
  absl::Status Read(std::span<std::byte> bytes) const {
    const absl::Duration until = Clock::Real().Uptime() + kPatience;
    while (!bytes.empty()) {
      OUTLAST_RETURN_IF_ERROR(WaitFor(POLLIN, until));
      const ssize_t count = recv(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (count == 0) return absl::UnavailableError("the other side hung up");
      if (count < 0 && errno != EAGAIN && errno != EINTR)
        return ErrnoStatus(errno, "measure a link");
      if (count > 0) bytes = bytes.subspan(static_cast<size_t>(count));
    }
    return absl::OkStatus();
  }

  // For its time or its bytes, whichever is over first; then the end.
  absl::Status Pour() const {
    const std::vector<std::byte> piece(kPieceBytes);
    const absl::Duration start = Clock::Real().Uptime();
    for (size_t sent = 0; sent < kMostBytes && Clock::Real().Uptime() < start + kSendFor;) {
      const ssize_t count =
          send(fd_.get(), piece.data(), piece.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count > 0) sent += static_cast<size_t>(count);
      if (count < 0 && errno == EAGAIN) {
        absl::Status room = WaitFor(POLLOUT, start + kSendFor);
        if (!room.ok() && !absl::IsDeadlineExceeded(room)) return room;
      } else if (count < 0 && errno != EINTR) {
        return ErrnoStatus(errno, "measure a link");
      }
    }
    shutdown(fd_.get(), SHUT_WR);
    return absl::OkStatus();
  }
  // From the first byte to the end, or as much as came in time.
  absl::StatusOr<Received> Drain() const {
    std::vector<std::byte> piece(kPieceBytes);
    absl::Duration start = Clock::Real().Uptime();
    const absl::Duration until = start + kPatience;
    Received received;
    while (true) {
      const absl::Status waited = WaitFor(POLLIN, until);
      if (absl::IsCancelled(waited)) return waited;
      const ssize_t count =
          waited.ok() ? recv(fd_.get(), piece.data(), piece.size(), MSG_DONTWAIT) : 0;
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      // Of a link that is too slow the other side did not wait for all.
      if (count < 0 && received.bytes > 0) return received;
      if (count < 0) return ErrnoStatus(errno, "measure a link");
      const absl::Duration now = Clock::Real().Uptime();
      if (received.bytes == 0) start = now;
      received.bytes += static_cast<uint64_t>(count);
      received.nanoseconds = static_cast<uint64_t>(absl::ToInt64Nanoseconds(now - start));
      if (count == 0 || now >= until) return received;
    }
  }

 private:
  const UniqueFd fd_;
  const std::atomic<bool>& is_over_;
};

template <typename Value>
std::span<std::byte> BytesOf(Value& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

}  // namespace

class LinkMeter::Impl {
 public:
  Impl(EventLoop& loop, UniqueFd listener, std::string address)
      : loop_(loop),
        listener_(std::move(listener)),
        address_(std::move(address)),
        caller_("outlast-links"),
        listens_([this] {
          pthread_setname_np(pthread_self(), "outlast-called");
          TakeCalls();
        }) {}
  ~Impl() {
    *is_gone_ = true;
    is_over_ = true;
    listens_.join();
  }

  const std::string& address() const { return address_; }
  void Expect(const Id128& ticket) {
    MutexLock lock(mutex_);
    tickets_.push_back(ticket);
    if (tickets_.size() > kMostTickets) tickets_.pop_front();
  }
  void Measure(const std::string& address, const Id128& ticket,
               std::function<void(const absl::StatusOr<LinkRate>&)> done) {
    caller_.Post([this, address, ticket, done = std::move(done), is_gone = is_gone_] {
      auto rate = Call(address, ticket);
      loop_.Post([rate = std::move(rate), done, is_gone] {
        if (!*is_gone) done(rate);
      });
    });
  }

 private:
  absl::StatusOr<LinkRate> Call(const std::string& address, const Id128& ticket) const {
    OUTLAST_ASSIGN_OR_RETURN(const HostPort at, HostPort::Parse(address));
    OUTLAST_ASSIGN_OR_RETURN(const SocketAddress number, NumericAddress(at));
    OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, StartConnect(number));
    const Line line(std::move(fd), is_over_);
    OUTLAST_RETURN_IF_ERROR(line.Connected());
    OUTLAST_RETURN_IF_ERROR(line.Write(std::as_bytes(std::span(&ticket, 1))));
    std::byte taken;
    const absl::Status answered = line.Read(std::span(&taken, 1));
    if (absl::IsUnavailable(answered)) return absl::PermissionDeniedError("the call was not taken");
    OUTLAST_RETURN_IF_ERROR(answered);
    OUTLAST_RETURN_IF_ERROR(line.Pour());
    Received there;
    OUTLAST_RETURN_IF_ERROR(line.Read(BytesOf(there)));
    OUTLAST_ASSIGN_OR_RETURN(const Received back, line.Drain());
    return LinkRate{there.megabytes_per_second(), back.megabytes_per_second()};
  }

  void TakeCalls() {
    pollfd polled{.fd = listener_.get(), .events = POLLIN, .revents = 0};
    while (!is_over_) {
      if (poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(kGlance))) <= 0) continue;
      if (auto fd = AcceptOn(listener_.get()); fd.ok()) TakeCall(*std::move(fd)).IgnoreError();
    }
  }
  // The caller sees what fails here by what it does not get.
  absl::Status TakeCall(UniqueFd fd) {
    const Line line(std::move(fd), is_over_);
    Id128 ticket;
    OUTLAST_RETURN_IF_ERROR(line.Read(BytesOf(ticket)));
    if (!IsExpected(ticket)) return absl::PermissionDeniedError("a stranger");
    const std::byte taken{1};
    OUTLAST_RETURN_IF_ERROR(line.Write(std::span(&taken, 1)));
    OUTLAST_ASSIGN_OR_RETURN(const Received there, line.Drain());
    OUTLAST_RETURN_IF_ERROR(line.Write(std::as_bytes(std::span(&there, 1))));
    return line.Pour();
  }
  // The caller may have been told a moment before this node was.
  bool IsExpected(const Id128& ticket) {
    for (const absl::Duration until = Clock::Real().Uptime() + kPatience / 2; !is_over_;) {
      {
        MutexLock lock(mutex_);
        if (const auto at = std::find(tickets_.begin(), tickets_.end(), ticket);
            at != tickets_.end()) {
          tickets_.erase(at);
          return true;
        }
      }
      if (Clock::Real().Uptime() >= until) return false;
      Clock::Real().SleepFor(absl::Milliseconds(10));
    }
    return false;
  }

  EventLoop& loop_;
  const UniqueFd listener_;
  const std::string address_;
  const std::shared_ptr<bool> is_gone_ = std::make_shared<bool>(false);  // the loop's thread
  std::atomic<bool> is_over_ = false;
  Mutex mutex_;
  std::deque<Id128> tickets_ ABSL_GUARDED_BY(mutex_);
  SerialThread caller_;
  std::thread listens_;
};

LinkMeter::LinkMeter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LinkMeter::~LinkMeter() = default;
const std::string& LinkMeter::address() const { return impl_->address(); }
void LinkMeter::Expect(const Id128& ticket) { impl_->Expect(ticket); }
void LinkMeter::Measure(const std::string& address, const Id128& ticket,
                        std::function<void(const absl::StatusOr<LinkRate>&)> done) {
  impl_->Measure(address, ticket, std::move(done));
}

absl::StatusOr<std::unique_ptr<LinkMeter>> LinkMeter::Start(EventLoop& loop,
                                                            const std::string& host) {
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress at, NumericAddress({host, 0}));
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd listener, ListenOn(at));
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress bound, SocketAddress::Local(listener.get()));
  return std::unique_ptr<LinkMeter>(
      new LinkMeter(std::make_unique<Impl>(loop, std::move(listener), bound.host_port().text())));
}

}  // namespace outlast
