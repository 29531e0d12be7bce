// A simulated world of hosts, time and streams: everything that happens is an event in one queue,
// drawn from one seed, so a run can be repeated exactly.
//
// Hosts are numbers. What runs on a host is given to RunOn: it is dropped when the host has crashed
// meanwhile, and waits while the host is paused (SIGSTOP). A stream joins two hosts and keeps its
// order in each direction; between streams nothing is ordered. When it breaks, what was under way
// is lost, and each side hears of it at its own time: until then the stream is half open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <random>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace outlast::testing {

struct SimNetworkOptions {
  absl::Duration shortest = absl::Microseconds(100);  // one way
  absl::Duration longest = absl::Milliseconds(20);
  // One in so many messages; 0: none. A slow one holds up those behind it in its stream.
  uint32_t slow_one_in = 0;
  absl::Duration slow = absl::Seconds(2);
  uint32_t twice_one_in = 0;  // comes twice
  uint32_t lost_one_in = 0;   // is lost, and the stream breaks with it
  // A side hears within this that its stream is broken, or its peer paused, as by keepalive.
  absl::Duration longest_half_open = absl::Seconds(8);
};

// Not safe for concurrent use.
class SimNetwork {
 public:
  using Act = std::function<void()>;
  using Stream = uint64_t;

  SimNetwork(uint64_t seed, int hosts, SimNetworkOptions options);

  // --- Time ---
  absl::Duration now() const { return now_; }
  // Uniform in [0, limit).
  uint64_t Below(uint64_t limit) { return random_() % limit; }
  absl::Duration UpTo(absl::Duration longest);
  void After(absl::Duration delay, Act act);
  // As After; dropped when `host` crashes before, and put off while it is paused.
  void RunOn(int host, absl::Duration delay, Act act);
  // The next event; false when there is none until `end`.
  bool RunOne(absl::Duration end);

  // --- Hosts ---
  // All that was to run on it is dropped, and its streams break. It is up again at once: what
  // restarts on it is the caller's.
  void Crash(int host);
  void Pause(int host);
  void Resume(int host);
  bool is_paused(int host) const { return At(host).paused; }

  // --- Network ---
  // Nothing passes between the two until Heal; streams that are cut for longer than they may be
  // half open break.
  void Cut(int host, int other);
  void Heal();
  bool is_cut(int host, int other) const;
  // Asks for a stream; `up` or `failed` runs on `from`, `accepted` on `to` before.
  void Open(int from, int to, std::function<void(Stream)> up, Act failed,
            std::function<void(Stream)> accepted);
  // Runs `deliver` on the other end, in order, unless the stream breaks before.
  void Send(Stream stream, int from, const Act& deliver);
  // `host` hears `down` when the stream breaks; not when it closes the stream itself.
  void WhenDown(Stream stream, int host, Act down);
  void Close(Stream stream, int host);
  void Break(Stream stream);
  // A stream that is open at both ends, or 0.
  Stream AnyStream();

  void FaultsEnd();  // no more slow, doubled or lost messages

 private:
  struct Host {
    uint64_t epoch = 0;
    bool paused = false;
    std::vector<std::pair<uint64_t, Act>> put_off;  // with their epochs
  };
  struct End {
    int host = 0;
    uint64_t epoch = 0;
    bool open = false;
    absl::Duration clear;  // the next message to it comes not before
    Act down;
  };
  struct Link {
    End ends[2];
    bool broken = false;
    bool watched = false;  // something was sent to a paused end
  };
  struct Due {
    absl::Duration at;
    uint64_t order;
    Act act;
    bool operator<(const Due& other) const {
      return at != other.at ? at > other.at : order > other.order;
    }
  };

  Host& At(int host) { return hosts_[static_cast<size_t>(host)]; }
  const Host& At(int host) const { return hosts_[static_cast<size_t>(host)]; }
  bool Chance(uint32_t one_in) { return one_in != 0 && Below(one_in) == 0; }
  absl::Duration Delay();
  void RunNow(int host, uint64_t epoch, Act act);
  void Arrive(Stream stream, int side, const Act& deliver);
  void HearOfBreak(Stream stream, int side);

  SimNetworkOptions options_;
  std::mt19937_64 random_;
  absl::Duration now_ = absl::Seconds(1'000'000);
  uint64_t order_ = 0;
  std::priority_queue<Due> queue_;
  std::vector<Host> hosts_;
  std::vector<Link> links_;  // by stream - 1
  std::vector<std::pair<int, int>> cuts_;
};

}  // namespace outlast::testing
