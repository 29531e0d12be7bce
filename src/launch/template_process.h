// The guardian's template (run/template_wire.h): starts it, asks it for forks, and gives up on it
// when it does not answer as it should; then it is killed, and started again after a pause of 1, 2,
// 4 ... 60 s. While nobody waits it asks for forks ahead, one a slot: these are *parked* until a
// birth comes.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/channel.h"
#include "launch/birth.h"
#include "launch/guardian.h"

namespace outlast {

// Holds a fork back.
class Gate {
 public:
  Gate(UniqueFd end, std::string word, std::vector<UniqueFd> fds)
      : end_(std::move(end)), word_(std::move(word)), fds_(std::move(fds)) {}
  // Lets it go; destroyed before, the fork ends. One that is gone already is reaped.
  void Open();

 private:
  Channel end_;
  std::string word_;
  std::vector<UniqueFd> fds_;
};

// Nothing here waits.
class TemplateProcess {
 public:
  // `orders`: what the guardian's workers have in common, borrowed. `birth`: environment and
  // standard files of the template.
  TemplateProcess(const GuardianCommand& orders, std::string program,
                  std::vector<std::string> arguments, Birth birth);

  // What has come of births and of the template since the last call.
  struct News {
    struct Forked {
      Birth birth;  // without its descriptors
      pid_t pid;
      Gate gate;
    };
    std::vector<Forked> forked;
    std::vector<Birth> refused;      // to be spawned otherwise
    std::vector<std::string> notes;  // for people
    bool is_ready = false;           // it said so
  };
  News TakeNews() { return std::exchange(news_, {}); }

  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  pid_t pid() const { return pid_; }  // 0: none runs
  int fd() const { return channel_.fd(); }
  // Steady time of the next Tick that is due, or kNever.
  int64_t due_nanos() const;
  bool is_ready() const { return is_ready_ && channel_.fd() >= 0; }
  // Forks were asked for that are not answered: a child that nobody knows may be one of them.
  bool is_asked() const { return !asked_.empty(); }
  // How many forks may be parked.
  void SetSlots(size_t slots) { slots_ = slots; }
  std::vector<pid_t> ParkedPids() const;

  // kUnavailable: it cannot be asked.
  absl::Status Fork(Birth& birth, const std::string& tag);
  // A birth that is asked for and is not wanted any more. False: none such.
  bool Cancel(int slot, uint64_t incarnation);

  void OnReadable();
  void OnEnded(int code, int signal);  // it was reaped
  void OnForkEnded(pid_t pid);         // one that may have been parked
  void Tick();

 private:
  struct Asked {
    std::optional<Birth> birth;  // none: to be parked
    std::string tag;
    UniqueFd gate;
    int64_t deadline;
  };
  struct Parked {
    pid_t pid;
    UniqueFd gate;
  };

  void Start();
  absl::Status TryStart();
  void PauseThenStart();
  void Read(const Channel::Packet& packet);
  absl::Status Ask(Asked& asked);
  void TakeForked(uint64_t request, pid_t pid);
  void TellForked(Birth birth, const std::string& tag, pid_t pid, UniqueFd gate);
  bool wants_to_park() const;
  void Note(std::string line);
  void GiveUp(std::string why);
  void ReleaseAsked();

  const GuardianCommand& orders_;
  const pid_t guardian_;
  const std::string program_;
  const std::vector<std::string> arguments_;
  const Birth birth_;
  pid_t pid_ = 0;
  Channel channel_;
  UniqueFd failure_;  // the reading end of the exec pipe
  bool is_ready_ = false;
  bool is_given_up_ = false;  // killed by us, and it was said why
  int64_t start_at_ = 0;      // where none runs
  int64_t end_by_ = kNever;   // it closed its socket
  int64_t ready_at_ = 0;
  int64_t pause_ = 0;
  uint32_t version_ = 0;  // of the protocol
  uint64_t last_request_ = 0;
  std::map<uint64_t, Asked> asked_;
  size_t slots_ = 0;
  std::vector<Parked> parked_;
  int64_t park_at_ = kNever;  // the next
  std::string refusal_;       // that was told last
  News news_;
};

}  // namespace outlast
