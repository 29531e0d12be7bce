#include "launch/top.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <ostream>

#include "base/error.h"
#include "launch/options.h"
#include "launch/status_text.h"
#include "launch/status_tool.h"
#include "outlast/base/clock.h"
#include "outlast/base/fd.h"

namespace outlast {
namespace {

constexpr absl::Duration kInterval = absl::Seconds(1);
// Reading the ledger may take at most this share of the time.
constexpr int kLedgerShare = 20;

void Print(std::string_view text) {
  WriteAll(STDOUT_FILENO, std::as_bytes(std::span(text))).IgnoreError();
}

// Keys come one by one and unseen, the cursor is hidden, and a second screen is shown; all as it
// was at the end.
class Terminal {
 public:
  Terminal() {
    has_keys_ = tcgetattr(STDIN_FILENO, &before_) == 0;
    if (has_keys_) {
      termios raw = before_;
      raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    }
    Print("\x1b[?1049h\x1b[?25l");
  }
  ~Terminal() {
    Print("\x1b[?25h\x1b[?1049l");
    if (has_keys_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  bool has_keys() const { return has_keys_; }

  winsize size() const {
    winsize size{};
    ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    if (size.ws_col == 0) size.ws_col = 80;
    if (size.ws_row == 0) size.ws_row = 24;
    return size;
  }

 private:
  termios before_{};
  bool has_keys_ = false;
};

// SIGINT, SIGTERM and SIGHUP, as something to read.
class Signals {
 public:
  Signals() {
    sigset_t wanted;
    sigemptyset(&wanted);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGWINCH}) sigaddset(&wanted, signal);
    sigprocmask(SIG_BLOCK, &wanted, &before_);
    fd_ = UniqueFd(signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~Signals() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  int fd() const { return fd_.get(); }
  // True: one of them asks for the end. A new size of the terminal only wakes.
  bool AskForEnd() const {
    signalfd_siginfo info{};
    bool ends = false;
    while (read(fd_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info))
      ends = ends || info.ssi_signo != SIGWINCH;
    return ends;
  }

 private:
  sigset_t before_{};
  UniqueFd fd_;
};

bool HasQuitKey() {
  char keys[64];
  const ssize_t count = read(STDIN_FILENO, keys, sizeof keys);
  return std::any_of(keys, keys + std::max<ssize_t>(count, 0),
                     [](char key) { return key == 'q' || key == 'Q'; });
}

// False: it is time to end.
bool WaitForNext(const Signals& signals, bool has_keys, int64_t until_ns) {
  while (true) {
    const int64_t left_ms = (until_ns - MonotonicNanos()) / 1'000'000;
    if (left_ms <= 0) return true;
    pollfd wait[2] = {{signals.fd(), POLLIN, 0}, {has_keys ? STDIN_FILENO : -1, POLLIN, 0}};
    if (poll(wait, 2, static_cast<int>(left_ms)) <= 0) continue;
    if (wait[0].revents != 0) return !signals.AskForEnd();
    if ((wait[1].revents & POLLIN) == 0 || HasQuitKey()) return false;
  }
}

// One picture: each line is cleared behind its end, and the screen below the last.
std::string Picture(const std::string& text) {
  std::string out = "\x1b[H";
  for (const char c : text) out += c == '\n' ? std::string("\x1b[K\n") : std::string(1, c);
  return out + "\x1b[J";
}

// Goodput costs a reading of the whole ledger, so it is read again only when that is cheap.
class Goodput {
 public:
  void AddTo(JobStatus& status) {
    const int64_t now = MonotonicNanos();
    if (now >= next_ns_) {
      AddLedger(status);
      last_ = status.goodput;
      next_ns_ = MonotonicNanos() + (MonotonicNanos() - now) * kLedgerShare;
    }
    status.goodput = last_;
  }

 private:
  std::optional<GoodputStatus> last_;
  int64_t next_ns_ = 0;
};

StatusStyle StyleFor(const JobStatus& status, const winsize& size) {
  const char* no_colour = std::getenv("NO_COLOR");
  StatusStyle style;
  style.colour = no_colour == nullptr || no_colour[0] == '\0' ? Colour::kYes : Colour::kNo;
  style.width = size.ws_col;
  // What stands above the ranks, their head, and the two lines below them.
  constexpr int kOtherLines = 14;
  const int room = std::max(1, size.ws_row - kOtherLines);
  style.max_ranks = std::min<int>(room, static_cast<int>(status.ranks.size()));
  return style;
}

}  // namespace

int WatchOnTerminal(const std::string& folder, std::ostream& err) {
  std::string last;
  absl::StatusOr<JobStatus> status = FindStatus(folder, kInterval);
  if (status.ok()) {
    const Signals signals;
    const Terminal terminal;
    Goodput goodput;
    for (int64_t due_ns = MonotonicNanos(); status.ok();) {
      goodput.AddTo(*status);
      const StatusStyle style = StyleFor(*status, terminal.size());
      last = StatusText(*status, style, Clock::Real().WallTime());
      Print(Picture(last + "\nq: quit\n"));
      due_ns = std::max(due_ns + absl::ToInt64Nanoseconds(kInterval), MonotonicNanos());
      if (status->is_over() || status->agent_state == "gone") break;
      if (!WaitForNext(signals, terminal.has_keys(), due_ns)) break;
      status = FindStatus(folder, kInterval);
    }
  }
  Print(last);
  if (status.ok()) return 0;
  err << fmt::format("outlast: top: {}\n", MessageOf(status.status()));
  return kExitRefused;
}

}  // namespace outlast
