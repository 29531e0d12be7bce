// Copies of what workers write, on the launcher's own standard output and error, and the launcher's
// own lines.
//
// Workers write straight to files; a thread follows the files (inotify, no polling) and copies
// whole lines, each behind its prefix "[<rank>] ". The files are the buffer, so memory is bounded:
// a reader that falls more than kMaxLagBytes behind skips ahead to a line's start, and a line says
// how many bytes were not shown. Nothing here can block or end a worker or the agent: a console
// that is slow, stopped or closed only loses its copies.
//
// Bytes are passed on as they are: broken UTF-8, NUL, colours. A line ends at \n, \r\n, or a bare
// \r (a progress bar; it stays a \r). A last line without an end gets \n. A line is shown once it
// is whole; one over kMaxLineBytes is cut.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/base/fd.h"
#include "outlast/base/mutex.h"

namespace outlast {

// Where lines go: a descriptor that is never waited on. A pipe or terminal is opened anew without
// blocking, so that the flag does not reach the processes that share it.
class ConsoleSink {
 public:
  static constexpr size_t kMaxPendingBytes = 256 << 10;

  explicit ConsoleSink(int fd);

  bool is_dead() const { return dead_; }
  bool has_pending() const { return !pending_.empty(); }
  bool has_room() const { return pending_.size() < kMaxPendingBytes; }
  int fd() const { return fd_; }

  void Append(std::string_view bytes) {
    if (!dead_) pending_.append(bytes);
  }
  // Writes what goes without waiting; the count of bytes.
  size_t Flush();

 private:
  ssize_t WriteSome(std::string_view bytes) const;

  UniqueFd own_;
  int fd_;
  bool is_socket_ = false;
  bool may_block_ = false;  // could not be opened anew: small writes after poll
  bool dead_ = false;
  std::string pending_;
};

// Cuts one file into lines for a sink. Not safe for concurrent use.
class LineFollower {
 public:
  static constexpr int64_t kChunkBytes = 64 << 10;
  static constexpr int64_t kMaxLineBytes = 4 << 20;
  static constexpr int64_t kMaxLagBytes = 8 << 20;

  LineFollower(UniqueFd file, std::string prefix)
      : file_(std::move(file)), prefix_(std::move(prefix)) {}

  // Leaves out what is there by now.
  void SkipPresent() { start_ = scanned_ = Size(); }

  // Appends whole lines to `sink` while it has room. True: there may be more to copy now.
  bool Copy(ConsoleSink& sink);
  // No more will be written: the last line counts as whole. Once Copy has returned false, it is
  // done.
  void SetFinal() { final_ = true; }
  bool is_done() const { return done_; }
  // True between the parts of a long line: nothing else may go to the sink.
  bool is_inside_line() const { return long_line_end_ > start_; }
  uint64_t dropped_bytes() const { return dropped_; }
  // Gives up what was not shown yet.
  void DropRest();

 private:
  int64_t Size() const;
  std::string_view Read(int64_t offset);
  void SkipIfFarBehind(int64_t size);
  bool CopyLongLine(ConsoleSink& sink);
  bool FindLongLine(int64_t size);
  size_t CopyLines(std::string_view text, bool at_end, ConsoleSink& sink);

  UniqueFd file_;
  std::string prefix_;
  std::string buffer_;
  bool final_ = false, done_ = false;
  int64_t start_ = 0;          // of the first line that was not shown
  int64_t scanned_ = 0;        // no line ends before here
  int64_t long_line_end_ = 0;  // past start_: where the line that is being copied in parts ends
  bool mid_skip_ = false;      // after a skip: up to the next line's start
  uint64_t dropped_ = 0;
};

// Safe for concurrent use. One thread, joined by Stop.
class Console {
 public:
  // The descriptors are borrowed. Ignores SIGPIPE for the whole process.
  static absl::StatusOr<std::unique_ptr<Console>> Start(int output_fd, int error_fd);
  ~Console();

  enum class Stream { kOutput, kError };
  enum class From { kBeginning, kNow };
  // Copies `path`. The key is the caller's, for Retire.
  void Follow(uint64_t key, const std::string& path, std::string prefix, Stream stream,
              From from = From::kBeginning);
  // Nobody writes the key's files any more: copies what is left, then closes them.
  void Retire(uint64_t key);
  // One line of our own on standard error.
  void Say(std::string_view line);

  // Shows what is left, as long as it goes on: gives up after `stall` without a byte written. May
  // be called twice.
  void Stop(absl::Duration stall = absl::Seconds(2));

 private:
  struct File {
    uint64_t key;
    std::string path;
    LineFollower lines;
    ConsoleSink* sink;
    int watch;
    bool changed = true;
  };

  Console(UniqueFd inotify, UniqueFd wake, int output_fd, int error_fd);
  void Post(std::function<void()> work);
  void Loop();
  void TakePosted();
  void TakeChanges();
  bool CopyRound();
  bool CopyFile(File& file);
  void Close(std::list<File>::iterator file);
  void BoundRetired();
  bool has_backlog();
  // Whether a file but `except` has copied only a part of a line to `sink`.
  bool is_inside_line(const ConsoleSink* sink, const File* except) const;

  UniqueFd inotify_;
  UniqueFd wake_;
  ConsoleSink output_;
  std::unique_ptr<ConsoleSink> own_error_;  // null: output and error are one terminal or file
  ConsoleSink& error_;
  // The thread's:
  std::list<File> files_;
  std::string own_lines_;
  bool stopping_ = false;
  int64_t last_written_ = 0;
  int64_t stall_nanos_ = 0;

  Mutex mutex_;
  std::vector<std::function<void()>> posted_ ABSL_GUARDED_BY(mutex_);
  size_t said_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace outlast
