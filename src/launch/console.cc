#include "launch/console.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>

#include "base/error.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr size_t kMaxSaidBytes = 1 << 20;
constexpr size_t kMaxRetired = 64;

bool AreOneFile(int a, int b) {
  struct stat first {
  }, second{};
  return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

}  // namespace

// --- ConsoleSink ---

ConsoleSink::ConsoleSink(int fd) : fd_(fd) {
  struct stat info {};
  if (fstat(fd, &info) != 0) {
    dead_ = true;  // closed by whoever started us
    return;
  }
  is_socket_ = S_ISSOCK(info.st_mode);
  if (!S_ISFIFO(info.st_mode) && !S_ISCHR(info.st_mode)) return;
  own_ = UniqueFd(open(fmt::format("/proc/self/fd/{}", fd).c_str(),
                       O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  may_block_ = !own_.is_open();
  if (own_.is_open()) fd_ = own_.get();
}

ssize_t ConsoleSink::WriteSome(std::string_view bytes) const {
  if (is_socket_) return send(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (may_block_) {
    pollfd writable{fd_, POLLOUT, 0};
    if (poll(&writable, 1, 0) <= 0) {
      errno = EAGAIN;
      return -1;
    }
    bytes = bytes.substr(0, PIPE_BUF);  // what a writable pipe takes at once
  }
  return write(fd_, bytes.data(), bytes.size());
}

size_t ConsoleSink::Flush() {
  size_t done = 0;
  while (done < pending_.size()) {
    const ssize_t written = WriteSome(std::string_view(pending_).substr(done));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) break;
    if (written < 0) {
      dead_ = true;  // the reader has gone, or the disk is full: no more copies
      pending_.clear();
      return done;
    }
    done += static_cast<size_t>(written);
  }
  pending_.erase(0, done);
  return done;
}

// --- LineFollower ---

int64_t LineFollower::Size() const {
  struct stat info {};
  return fstat(file_.get(), &info) == 0 ? info.st_size : 0;
}

std::string_view LineFollower::Read(int64_t offset) {
  buffer_.resize(kChunkBytes);
  ssize_t count;
  do {
    count = pread(file_.get(), buffer_.data(), buffer_.size(), offset);
  } while (count < 0 && errno == EINTR);
  return std::string_view(buffer_).substr(0, static_cast<size_t>(std::max<ssize_t>(count, 0)));
}

void LineFollower::SkipIfFarBehind(int64_t size) {
  if (is_inside_line() ||
      size - start_ <= kMaxLagBytes + kMaxLineBytes * (scanned_ > start_ ? 1 : 0))
    return;
  const int64_t target = size - kMaxLagBytes / 2;
  dropped_ += static_cast<uint64_t>(target - start_);
  start_ = scanned_ = target;
  mid_skip_ = true;
}

void LineFollower::DropRest() {
  dropped_ += static_cast<uint64_t>(std::max<int64_t>(Size() - start_, 0));
  done_ = true;
}

// Shows the whole lines of `text`, the bytes at start_; how many bytes they are.
size_t LineFollower::CopyLines(std::string_view text, bool at_end, ConsoleSink& sink) {
  size_t line = 0;
  while (line < text.size()) {
    size_t end = text.find_first_of("\n\r", line);
    if (end != std::string_view::npos && text[end] == '\r') {
      if (end + 1 == text.size() && !at_end) break;  // a \n may follow
      if (end + 1 < text.size() && text[end + 1] == '\n') ++end;
    }
    if (end == std::string_view::npos && !at_end) break;
    const bool is_cut = end == std::string_view::npos;
    const size_t next = is_cut ? text.size() : end + 1;
    sink.Append(prefix_);
    sink.Append(text.substr(line, next - line));
    if (is_cut) sink.Append("\n");
    line = next;
  }
  return line;
}

// Looks for the end of a line that is longer than a chunk. False: it is not whole yet.
bool LineFollower::FindLongLine(int64_t size) {
  scanned_ = std::max(scanned_, start_);
  while (scanned_ < size && scanned_ - start_ < kMaxLineBytes) {
    const std::string_view text = Read(scanned_);
    if (text.empty()) break;
    const size_t end = text.find_first_of("\n\r");
    if (end != std::string_view::npos) {
      long_line_end_ = scanned_ + static_cast<int64_t>(end) + 1;
      return true;
    }
    scanned_ += static_cast<int64_t>(text.size());
  }
  if (scanned_ - start_ < kMaxLineBytes && !final_) return false;
  long_line_end_ = scanned_;
  return true;
}

bool LineFollower::CopyLongLine(ConsoleSink& sink) {
  std::string_view text = Read(start_);
  text = text.substr(0, static_cast<size_t>(long_line_end_ - start_));
  if (text.empty()) {  // truncated meanwhile
    long_line_end_ = start_;
    return false;
  }
  sink.Append(text);
  start_ += static_cast<int64_t>(text.size());
  if (start_ == long_line_end_ && text.back() != '\n' && text.back() != '\r') sink.Append("\n");
  return true;
}

bool LineFollower::Copy(ConsoleSink& sink) {
  if (done_) return false;
  const int64_t size = Size();
  if (size < start_) start_ = scanned_ = size;  // the worker truncated its file
  if (sink.is_dead()) {
    DropRest();
    start_ = scanned_ = long_line_end_ = size;
    done_ = final_;
    return false;
  }
  if (!sink.has_room()) return true;
  if (is_inside_line()) return CopyLongLine(sink);
  if (size == start_) {  // as of most workers: no buffer for them
    done_ = final_;
    return false;
  }
  SkipIfFarBehind(size);
  std::string_view text = Read(start_);
  if (mid_skip_) {
    const size_t end = text.find('\n');
    const size_t skipped = end == std::string_view::npos ? text.size() : end + 1;
    dropped_ += skipped;
    start_ += static_cast<int64_t>(skipped);
    mid_skip_ = end == std::string_view::npos;
    return skipped > 0;
  }
  const bool at_end = final_ && start_ + static_cast<int64_t>(text.size()) >= size;
  const size_t copied = CopyLines(text, at_end, sink);
  start_ += static_cast<int64_t>(copied);
  if (copied > 0) return true;
  if (text.size() == static_cast<size_t>(kChunkBytes) && FindLongLine(size)) {
    sink.Append(prefix_);
    return true;
  }
  done_ = final_ && text.empty();
  return false;
}

// --- Console ---

absl::StatusOr<std::unique_ptr<Console>> Console::Start(int output_fd, int error_fd) {
  signal(SIGPIPE, SIG_IGN);  // `| head -1` must end neither us nor the job
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.is_open()) return ErrnoStatus(errno, "create an eventfd");
  UniqueFd inotify(inotify_init1(
      IN_CLOEXEC | IN_NONBLOCK));  // refused (too many users): copies come at the end only
  std::unique_ptr<Console> console(
      new Console(std::move(inotify), std::move(wake), output_fd, error_fd));
  console->thread_ = std::thread([self = console.get()] {
    pthread_setname_np(pthread_self(), "console");
    self->Loop();
  });
  return console;
}

Console::Console(UniqueFd inotify, UniqueFd wake, int output_fd, int error_fd)
    : inotify_(std::move(inotify)),
      wake_(std::move(wake)),
      output_(output_fd),
      own_error_(AreOneFile(output_fd, error_fd) ? nullptr
                                                 : std::make_unique<ConsoleSink>(error_fd)),
      error_(own_error_ != nullptr ? *own_error_ : output_) {}

Console::~Console() { Stop(); }

void Console::Post(std::function<void()> work) {
  {
    MutexLock lock(mutex_);
    posted_.push_back(std::move(work));
  }
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
}

void Console::Follow(uint64_t key, const std::string& path, std::string prefix, Stream stream,
                     From from) {
  Post([this, key, path, prefix = std::move(prefix), stream, from] {
    UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    ConsoleSink* sink = stream == Stream::kOutput ? &output_ : &error_;
    if (!file.is_open()) {
      own_lines_ += fmt::format("outlast: {}: cannot be followed: {}\n", path,
                                ErrnoStatus(errno, "open").ToString());
      return;
    }
    const int watch =
        inotify_.is_open() ? inotify_add_watch(inotify_.get(), path.c_str(), IN_MODIFY) : -1;
    files_.push_back({key, path, LineFollower(std::move(file), prefix), sink, watch});
    if (from == From::kNow) files_.back().lines.SkipPresent();
  });
}

void Console::Retire(uint64_t key) {
  Post([this, key] {
    for (File& file : files_) {
      if (file.key != key) continue;
      file.lines.SetFinal();
      file.changed = true;
    }
    BoundRetired();
  });
}

void Console::Say(std::string_view line) {
  {
    MutexLock lock(mutex_);
    if (said_bytes_ > kMaxSaidBytes) return;  // nobody reads
    said_bytes_ += line.size();
  }
  Post([this, text = std::string(line) + "\n"] { own_lines_ += text; });
}

void Console::Stop(absl::Duration stall) {
  if (!thread_.joinable()) return;
  Post([this, stall] {
    stopping_ = true;
    last_written_ = MonotonicNanos();
    stall_nanos_ = absl::ToInt64Nanoseconds(stall);
    for (File& file : files_) {
      file.lines.SetFinal();
      file.changed = true;
    }
  });
  thread_.join();
}

// With a console that nobody reads, files of dead workers would pile up.
void Console::BoundRetired() {
  if (files_.size() <= kMaxRetired) return;
  size_t left = files_.size() - kMaxRetired;
  for (auto file = files_.begin(); file != files_.end() && left > 0; ++file, --left) {
    if (file->changed && !file->sink->has_room()) file->lines.DropRest();
  }
}

void Console::TakePosted() {
  uint64_t count;
  (void)!read(wake_.get(), &count, sizeof count);
  std::vector<std::function<void()>> work;
  {
    MutexLock lock(mutex_);
    work.swap(posted_);
  }
  for (auto& item : work) item();
}

void Console::TakeChanges() {
  alignas(inotify_event) std::array<char, 16 << 10> buffer;
  ssize_t count;
  while (inotify_.is_open() && (count = read(inotify_.get(), buffer.data(), buffer.size())) > 0) {
    for (ssize_t at = 0; at < count;) {
      const auto* event = reinterpret_cast<const inotify_event*>(buffer.data() + at);
      for (File& file : files_) {
        if (file.watch == event->wd || (event->mask & IN_Q_OVERFLOW) != 0) file.changed = true;
      }
      at += static_cast<ssize_t>(sizeof *event + event->len);
    }
  }
}

void Console::Close(std::list<File>::iterator file) {
  if (file->lines.dropped_bytes() > 0 && !error_.is_dead()) {
    own_lines_ += fmt::format("outlast: {} bytes of {} were not shown here; the file has them\n",
                              file->lines.dropped_bytes(), file->path);
  }
  if (file->watch >= 0) inotify_rm_watch(inotify_.get(), file->watch);
  files_.erase(file);
}

bool Console::is_inside_line(const ConsoleSink* sink, const File* except) const {
  for (const File& file : files_) {
    if (&file != except && file.sink == sink && file.lines.is_inside_line()) return true;
  }
  return false;
}

// True: the file has more to copy and its sink has room for it.
bool Console::CopyFile(File& file) {
  if (is_inside_line(file.sink, &file)) return false;
  file.changed = file.lines.Copy(*file.sink);
  return file.changed && file.sink->has_room();
}

bool Console::CopyRound() {
  bool more = false;
  for (auto file = files_.begin(); file != files_.end();) {
    const auto current = file++;
    if (current->changed && CopyFile(*current)) more = true;
    if (current->lines.is_done()) Close(current);
  }
  if (!own_lines_.empty() && !is_inside_line(&error_, nullptr)) {
    error_.Append(own_lines_);
    own_lines_.clear();
    MutexLock lock(mutex_);
    said_bytes_ = 0;
  }
  return more;
}

bool Console::has_backlog() {
  for (const File& file : files_) {
    if (file.changed) return true;
  }
  return output_.has_pending() || error_.has_pending() || !own_lines_.empty();
}

void Console::Loop() {
  while (true) {
    TakePosted();
    TakeChanges();
    const bool more = CopyRound();
    if (output_.Flush() + error_.Flush() > 0) last_written_ = MonotonicNanos();
    if (stopping_ && !has_backlog()) return;
    const bool waits_for_reader = output_.has_pending() || error_.has_pending();
    const int64_t stall_left = last_written_ + stall_nanos_ - MonotonicNanos();
    if (stopping_ && waits_for_reader && stall_left <= 0) return;
    if (!waits_for_reader && (more || has_backlog())) continue;
    pollfd waits[4] = {{wake_.get(), POLLIN, 0},
                       {inotify_.get(), POLLIN, 0},
                       {output_.has_pending() ? output_.fd() : -1, POLLOUT, 0},
                       {error_.has_pending() ? error_.fd() : -1, POLLOUT, 0}};
    poll(waits, 4, stopping_ ? static_cast<int>(stall_left / 1'000'000) + 1 : -1);
  }
}

}  // namespace outlast
