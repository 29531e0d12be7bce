#include "run/peer_keys.h"

#include <algorithm>
#include <iterator>

#include "base/channel.h"
#include "base/error.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr absl::Duration kLongestGet = absl::Hours(24 * 7);

enum class KeyWord : uint8_t { kPut = 1, kGet = 2, kAnswer = 3 };

PayloadWriter Begin(KeyWord word, uint64_t generation, uint64_t number) {
  PayloadWriter payload;
  payload.Int(static_cast<uint8_t>(word)).Int(generation).Int(number);
  return payload;
}

absl::Status TooMany(std::string_view key, size_t most) {
  return Error(absl::StatusCode::kResourceExhausted,
               "key '{}': {} requests wait for an answer already", key, most);
}

}  // namespace

PeerKeys::PeerKeys(EventLoop& loop, Peers* peers, std::string node, Ears ears)
    : loop_(loop), peers_(peers), node_(std::move(node)), ears_(std::move(ears)) {
  if (peers_ == nullptr) return;
  peers_->Listen(
      kPeerKeys,
      {.on_message = [this](const std::string& from,
                            const std::string& bytes) { OnMessage(from, bytes); },
       .on_up = [this](const std::string& peer) { OnUp(peer); },
       .on_down = [this](const std::string& peer, const std::string&) { OnDown(peer); }});
}

PeerKeys::~PeerKeys() {
  Leave();
  if (peers_ != nullptr) peers_->Listen(kPeerKeys, {});
}

void PeerKeys::Enter(const CommitGeneration& commit) {
  Leave();
  is_open_ = true;
  generation_ = commit.generation;
  lead_ = commit.job == nullptr ? std::string() : commit.job->map.runs.front().node;
  store_ = std::make_unique<GenerationStore>();
  lead_is_up_ = false;
}

void PeerKeys::Leave() {
  is_open_ = false;
  for (const Waiting& waiting : std::exchange(waiting_, {})) loop_.Cancel(waiting.timer);
  for (const auto& [number, asked] : std::exchange(asked_, {})) loop_.Cancel(asked.timer);
}

void PeerKeys::Put(int slot, uint64_t request, std::string_view key, std::string_view value) {
  if (!is_open_) return;
  if (is_lead()) return Store({"", slot, request}, key, value);
  Ask({.slot = slot,
       .request = request,
       .key = std::string(key),
       .is_put = true,
       .value = std::string(value)});
}

void PeerKeys::Get(int slot, uint64_t request, std::string_view key, absl::Duration timeout) {
  if (!is_open_) return;
  timeout = std::clamp(timeout, absl::ZeroDuration(), kLongestGet);
  if (is_lead()) return Find({"", slot, request}, key, timeout);
  Ask({.slot = slot,
       .request = request,
       .key = std::string(key),
       .is_put = false,
       .value = {},
       .timeout = timeout,
       .deadline = Clock::Real().Uptime() + timeout});
}

void PeerKeys::Forget(int slot) {
  TakeIf([&](const Waiting& one) { return one.asker.node.empty() && one.asker.slot == slot; });
  std::erase_if(asked_, [&](const auto& one) {
    if (one.second.slot != slot) return false;
    loop_.Cancel(one.second.timer);
    return true;
  });
}

absl::Status PeerKeys::TooLate(std::string_view key, absl::Duration timeout) const {
  return Error(absl::StatusCode::kDeadlineExceeded,
               "key '{}' of generation {}: nobody put it within {}", key, generation_,
               absl::FormatDuration(timeout));
}

// --- The lead ---

// Takes what waits out of the queue, and its timers with it.
template <typename Condition>
std::vector<PeerKeys::Waiting> PeerKeys::TakeIf(const Condition& condition) {
  const auto taken = std::stable_partition(waiting_.begin(), waiting_.end(),
                                           [&](const Waiting& one) { return !condition(one); });
  std::vector<Waiting> result(std::make_move_iterator(taken),
                              std::make_move_iterator(waiting_.end()));
  waiting_.erase(taken, waiting_.end());
  for (const Waiting& one : result) loop_.Cancel(one.timer);
  return result;
}

void PeerKeys::Store(const Asker& asker, std::string_view key, std::string_view value) {
  const absl::Status put = store_->Put(key, value);
  Reply(asker, put, {});
  if (!put.ok()) return;
  for (const Waiting& one : TakeIf([&](const Waiting& waits) { return waits.key == key; }))
    Reply(one.asker, absl::OkStatus(), value);
}

void PeerKeys::Find(const Asker& asker, std::string_view key, absl::Duration timeout) {
  TakeIf([&](const Waiting& one) { return one.asker == asker; });  // asked again
  if (const std::string* value = store_->Find(key); value != nullptr)
    return Reply(asker, absl::OkStatus(), *value);
  const auto of_same = std::count_if(waiting_.begin(), waiting_.end(), [&](const Waiting& one) {
    return one.asker.node == asker.node && one.asker.slot == asker.slot;
  });
  const size_t most = asker.node.empty() ? kMostWaitingKeys : kMostWaitingKeysOfNode;
  if (static_cast<size_t>(of_same) >= most) return Reply(asker, TooMany(key, most), {});
  const EventLoop::TimerId timer =
      loop_.RunAfter(timeout, [this, asker, timeout] { GiveUp(asker, timeout); });
  waiting_.push_back({asker, std::string(key), timer});
}

void PeerKeys::GiveUp(const Asker& asker, absl::Duration timeout) {
  for (const Waiting& one : TakeIf([&](const Waiting& waits) { return waits.asker == asker; })) {
    // A follower has a timer of its own, and knows how long its worker wanted to wait.
    if (asker.node.empty()) Reply(asker, TooLate(one.key, timeout), {});
  }
}

void PeerKeys::Reply(const Asker& asker, const absl::Status& status, std::string_view value) {
  if (asker.node.empty()) return ears_.answer(asker.slot, asker.request, status, value);
  PayloadWriter answer = Begin(KeyWord::kAnswer, generation_, asker.request);
  answer.Int(static_cast<int32_t>(status.code())).Text(status.ok() ? value : MessageOf(status));
  // One that cannot be sent is asked for again, or the asker's deadline passes.
  (void)peers_->Send(asker.node, kPeerKeys, answer.bytes());
}

// --- A follower ---

void PeerKeys::Ask(Asked asked) {
  const auto of_same = std::count_if(
      asked_.begin(), asked_.end(), [&](const auto& one) { return one.second.slot == asked.slot; });
  if (static_cast<size_t>(of_same) >= kMostWaitingKeys)
    return ears_.answer(asked.slot, asked.request, TooMany(asked.key, kMostWaitingKeys), {});
  const uint64_t number = ++last_number_;
  if (!asked.is_put) {
    asked.timer = loop_.RunAt(asked.deadline, [this, number] {
      const Asked& late = asked_.at(number);
      AnswerAsked(number, TooLate(late.key, late.timeout), {});
    });
  }
  asked_.emplace(number, std::move(asked));
  if (lead_is_up_) SendAsked(number);
}

void PeerKeys::SendAsked(uint64_t number) {
  const auto found = asked_.find(number);
  if (found == asked_.end()) return;
  const Asked& asked = found->second;
  PayloadWriter message =
      Begin(asked.is_put ? KeyWord::kPut : KeyWord::kGet, generation_, number).Text(asked.key);
  if (asked.is_put) {
    message.Text(asked.value);
  } else {
    message.Int(absl::ToInt64Nanoseconds(asked.deadline - Clock::Real().Uptime()));
  }
  const absl::Status sent = peers_->Send(lead_, kPeerKeys, message.bytes());
  if (!sent.ok()) AnswerAsked(number, sent, {});
}

void PeerKeys::AnswerAsked(uint64_t number, const absl::Status& status, std::string_view value) {
  const auto asked = asked_.extract(number);
  if (asked.empty()) return;  // answered before, or its process is gone
  loop_.Cancel(asked.mapped().timer);
  ears_.answer(asked.mapped().slot, asked.mapped().request, status, value);
}

// --- Peers ---

void PeerKeys::OnUp(const std::string& node) {
  if (!is_open_ || is_lead() || node != lead_) return;
  lead_is_up_ = true;
  std::vector<uint64_t> numbers;
  for (const auto& [number, asked] : asked_) numbers.push_back(number);
  for (const uint64_t number : numbers) SendAsked(number);
}

void PeerKeys::OnDown(const std::string& node) {
  if (node == lead_) lead_is_up_ = false;
}

void PeerKeys::OnMessage(const std::string& node, std::string_view bytes) {
  PayloadReader reader(bytes);
  const auto word = static_cast<KeyWord>(reader.Int<uint8_t>());
  const auto generation = reader.Int<uint64_t>();
  const auto number = reader.Int<uint64_t>();
  int32_t code = 0;
  if (word == KeyWord::kAnswer) code = reader.Int<int32_t>();
  const std::string_view text = reader.Text();
  std::string_view value;
  absl::Duration timeout;
  if (word == KeyWord::kPut) value = reader.Text();
  if (word == KeyWord::kGet) timeout = absl::Nanoseconds(reader.Int<int64_t>());
  const bool is_answer = word == KeyWord::kAnswer;
  if (!reader.ok() || word < KeyWord::kPut || word > KeyWord::kAnswer) {
    return ears_.on_refused(node, Error(absl::StatusCode::kInvalidArgument,
                                        "{} bytes about keys that are no message", bytes.size()));
  }
  if (!is_open_ || generation != generation_ || is_lead() == is_answer) return;
  timeout = std::clamp(timeout, absl::ZeroDuration(), kLongestGet);
  switch (word) {
    case KeyWord::kPut:
      return Store({node, 0, number}, text, value);
    case KeyWord::kGet:
      return Find({node, 0, number}, text, timeout);
    case KeyWord::kAnswer:
      if (code == 0) return AnswerAsked(number, absl::OkStatus(), text);
      return AnswerAsked(number, Error(static_cast<absl::StatusCode>(code), "{}", text), {});
  }
}

}  // namespace outlast
