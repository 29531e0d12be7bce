// Put and Get of a generation, behind the keeper. The keeper of rank 0's node, the lead, has the
// store. A follower's asks it over Peers, channel kPeerKeys:
//
//   follower -> lead   u8 1 (put), u64 generation, u64 number, Text key, Text value
//                      u8 2 (get), u64 generation, u64 number, Text key, i64 ns that it may wait
//   lead -> follower   u8 3 (answer), u64 generation, u64 number, i32 status code, Text value or
//   why
//
// A connection that breaks may lose what was under way: when it stands again the follower repeats
// what was not answered, with the time that is left. To be told twice changes nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "outlast/elastic/actions.h"
#include "run/generation_store.h"
#include "run/peers.h"

namespace outlast {

// Requests of one worker that are not answered yet, and of one follower at the lead.
inline constexpr size_t kMostWaitingKeys = 4096;
inline constexpr size_t kMostWaitingKeysOfNode = 65536;

// Belongs to its loop's thread. Answers come at once or later, at most one to a request.
class PeerKeys {
 public:
  struct Ears {
    std::function<void(int slot, uint64_t request, const absl::Status& status,
                       std::string_view value)>
        answer;
    // A peer sent what is no message.
    std::function<void(const std::string& node, const absl::Status& why)> on_refused =
        [](const std::string&, const absl::Status&) {};
  };
  // `peers` null: a job of one node. `node`: the name of this one. Both loop and peers must outlive
  // it.
  PeerKeys(EventLoop& loop, Peers* peers, std::string node, Ears ears);
  ~PeerKeys();

  // Its keys are empty, and nothing of older generations is heard any more.
  void Enter(const CommitGeneration& commit);
  // What waits is answered by nobody any more.
  void Leave();
  // Errors are those of GenerationStore::Put; kResourceExhausted: too many wait. Also for Get.
  void Put(int slot, uint64_t request, std::string_view key, std::string_view value);
  // kDeadlineExceeded: nobody put it within `timeout`.
  void Get(int slot, uint64_t request, std::string_view key, absl::Duration timeout);
  // The slot's process is gone.
  void Forget(int slot);

 private:
  // At the lead, a process here, or a follower's request.
  struct Asker {
    std::string node;  // empty: here
    int slot = 0;
    uint64_t request = 0;
    bool operator==(const Asker&) const = default;
  };
  struct Waiting {
    Asker asker;
    std::string key;
    EventLoop::TimerId timer;
  };
  // At a follower: what the lead was asked.
  struct Asked {
    int slot;
    uint64_t request;
    std::string key;
    bool is_put;
    std::string value;                                                 // of a Put
    absl::Duration timeout = {}, deadline = absl::InfiniteDuration();  // of a Get
    EventLoop::TimerId timer = 0;
  };

  bool is_lead() const { return lead_.empty() || lead_ == node_; }

  // The lead.
  void Store(const Asker& asker, std::string_view key, std::string_view value);
  void Find(const Asker& asker, std::string_view key, absl::Duration timeout);
  void Reply(const Asker& asker, const absl::Status& status, std::string_view value);
  void GiveUp(const Asker& asker, absl::Duration timeout);
  template <typename Condition>
  std::vector<Waiting> TakeIf(const Condition& condition);

  // A follower.
  void Ask(Asked asked);
  void SendAsked(uint64_t number);
  void AnswerAsked(uint64_t number, const absl::Status& status, std::string_view value);

  void OnMessage(const std::string& node, std::string_view bytes);
  void OnUp(const std::string& node);
  void OnDown(const std::string& node);
  absl::Status TooLate(std::string_view key, absl::Duration timeout) const;

  EventLoop& loop_;
  Peers* const peers_;
  const std::string node_;
  const Ears ears_;
  bool is_open_ = false;
  uint64_t generation_ = 0;
  std::string lead_;  // empty: of one node

  std::unique_ptr<GenerationStore> store_;
  std::vector<Waiting> waiting_;

  bool lead_is_up_ = false;
  uint64_t last_number_ = 0;
  std::map<uint64_t, Asked> asked_;
};

}  // namespace outlast
