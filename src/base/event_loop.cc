#include "base/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "outlast/base/clock.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

constexpr uint64_t kWakeSerial = 0;

}  // namespace

absl::StatusOr<std::unique_ptr<EventLoop>> EventLoop::Make() {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.is_open()) return ErrnoStatus(errno, "create an epoll");
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.is_open()) return ErrnoStatus(errno, "create an eventfd");
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWakeSerial}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0)
    return ErrnoStatus(errno, "watch an eventfd");
  return std::unique_ptr<EventLoop>(new EventLoop(std::move(epoll), std::move(wake)));
}

EventLoop::~EventLoop() = default;

absl::Status EventLoop::Watch(int fd, std::function<void()> ready) {
  const uint64_t serial = next_serial_++;
  epoll_event event{.events = EPOLLIN, .data = {.u64 = serial}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return ErrnoStatus(errno, "watch a descriptor");
  watched_[fd] = {serial, std::move(ready)};
  fd_of_serial_[serial] = fd;
  return absl::OkStatus();
}

absl::Status EventLoop::WatchWrites(int fd, bool wanted) {
  const auto found = watched_.find(fd);
  if (found == watched_.end())
    return absl::FailedPreconditionError("watch writes of a descriptor that is not watched");
  const uint32_t events = wanted ? uint32_t{EPOLLIN} | EPOLLOUT : uint32_t{EPOLLIN};
  epoll_event event{.events = events, .data = {.u64 = found->second.serial}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0)
    return ErrnoStatus(errno, "watch a descriptor");
  return absl::OkStatus();
}

void EventLoop::Unwatch(int fd) {
  const auto found = watched_.find(fd);
  if (found == watched_.end()) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  fd_of_serial_.erase(found->second.serial);
  watched_.erase(found);
}

EventLoop::TimerId EventLoop::RunAt(absl::Duration deadline, std::function<void()> due) {
  const TimerId id = next_serial_++;
  timers_[{deadline, id}] = std::move(due);
  deadline_of_timer_[id] = deadline;
  return id;
}

EventLoop::TimerId EventLoop::RunAfter(absl::Duration delay, std::function<void()> due) {
  return RunAt(Clock::Real().Uptime() + delay, std::move(due));
}

void EventLoop::Cancel(TimerId id) {
  const auto found = deadline_of_timer_.find(id);
  if (found == deadline_of_timer_.end()) return;
  timers_.erase({found->second, id});
  deadline_of_timer_.erase(found);
}

void EventLoop::Post(std::function<void()> work) {
  {
    MutexLock lock(mutex_);
    posted_.push_back(std::move(work));
  }
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);  // full means that a wake-up is pending already
}

void EventLoop::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  Post([] {});
}

int EventLoop::TimeoutMillis() const {
  if (timers_.empty()) return -1;
  const absl::Duration left = timers_.begin()->first.first - Clock::Real().Uptime();
  if (left <= absl::ZeroDuration()) return 0;
  return static_cast<int>(
             absl::ToInt64Milliseconds(std::min<absl::Duration>(left, absl::Hours(1)))) +
         1;
}

// Only those that are due now: a callback that arms itself again at once must not starve the
// descriptors.
void EventLoop::RunDueTimers() {
  const absl::Duration now = Clock::Real().Uptime();
  std::vector<std::pair<absl::Duration, TimerId>> due;
  for (const auto& [key, callback] : timers_) {
    if (key.first > now) break;
    due.push_back(key);
  }
  for (const auto& key : due) {
    auto node = timers_.extract(key);
    if (node.empty()) continue;  // an earlier one cancelled it
    deadline_of_timer_.erase(key.second);
    node.mapped()();
  }
}

void EventLoop::RunPosted() {
  uint64_t count;
  (void)!read(wake_.get(), &count, sizeof count);
  std::vector<std::function<void()>> work;
  {
    MutexLock lock(mutex_);
    work.swap(posted_);
  }
  for (auto& item : work) item();
}

void EventLoop::Run() {
  std::array<epoll_event, 64> events;
  while (true) {
    RunDueTimers();
    {
      MutexLock lock(mutex_);
      if (stopping_ && posted_.empty()) {
        stopping_ = false;
        return;
      }
    }
    const int count =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), TimeoutMillis());
    for (int i = 0; i < count; ++i) {
      const uint64_t serial = events[static_cast<size_t>(i)].data.u64;
      if (serial == kWakeSerial) {
        RunPosted();
        continue;
      }
      const auto fd = fd_of_serial_.find(serial);
      if (fd == fd_of_serial_.end()) continue;
      const auto ready = watched_.at(fd->second).ready;  // a copy: the callback may unwatch itself
      ready();
    }
  }
}

}  // namespace outlast
