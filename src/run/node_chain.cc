#include "run/node_chain.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr size_t kPiece = 256 << 10;  // at once from one connection, so that both ways move
constexpr size_t kAhead = 512 << 10;  // how far the first stage adds before it has sent
constexpr size_t kFloat = sizeof(float);
constexpr int kLongestPollMs = 50;

absl::Status Lost(const ChainLink& link, std::string_view how) {
  return Error(absl::StatusCode::kUnavailable, "the connection to rank {}: {}", link.rank, how);
}

absl::Status Broken(const ChainLink& link, int error, bool* is_unheard) {
  *is_unheard = *is_unheard || error == ETIMEDOUT;
  return Lost(link, error == ETIMEDOUT ? "nothing was heard of its machine any more"
                                       : std::strerror(error));
}

bool IsForNow(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

// One way through one stage: a word, then bytes. Positions count both.
struct NodeChain::Flow {
  const ChainLink* in = nullptr;   // null: it begins here
  const ChainLink* out = nullptr;  // null: it ends here
  std::span<std::byte> bytes;
  ChainWord word;
  size_t word_bytes = sizeof(ChainWord);
  // 0 <= sent <= ready <= got <= total
  size_t got = 0;
  size_t ready = 0;
  size_t sent = 0;
  // Moves `ready` on, as far as can be now.
  std::function<absl::Status(Flow&)> advance;

  size_t total() const { return word_bytes + bytes.size(); }
  bool is_done() const { return got == total() && ready == total() && sent == total(); }
  // Bytes [from, to), as far as they lie together.
  std::span<std::byte> Piece(size_t from, size_t to) {
    if (from < word_bytes)
      return std::as_writable_bytes(std::span(&word, 1))
          .subspan(from, std::min(to, word_bytes) - from);
    return bytes.subspan(from - word_bytes, to - from);
  }
  absl::Status Receive(bool* is_unheard);
  absl::Status Send(bool* is_unheard);
};

absl::Status NodeChain::Flow::Receive(bool* is_unheard) {
  if (in == nullptr || got == total()) return absl::OkStatus();
  for (const size_t most = std::min(total(), got + kPiece); got < most;) {
    const std::span<std::byte> piece = Piece(got, most);
    const ssize_t count = recv(in->fd.get(), piece.data(), piece.size(), MSG_DONTWAIT);
    if (count == 0) return Lost(*in, "closed");
    if (count < 0 && IsForNow(errno)) break;
    if (count < 0) return Broken(*in, errno, is_unheard);
    got += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

absl::Status NodeChain::Flow::Send(bool* is_unheard) {
  if (out == nullptr) sent = ready;
  while (sent < ready) {
    const std::span<std::byte> piece = Piece(sent, ready);
    const int more = sent < word_bytes && ready > word_bytes ? MSG_MORE : 0;
    const ssize_t count =
        send(out->fd.get(), piece.data(), piece.size(), MSG_DONTWAIT | MSG_NOSIGNAL | more);
    if (count < 0 && IsForNow(errno)) break;
    if (count < 0) return Broken(*out, errno, is_unheard);
    sent += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

NodeChain::NodeChain(std::vector<ChainStage> stages) : stages_(std::move(stages)) {}

void NodeChain::ShutdownAll(int how) {
  for (const ChainStage& stage : stages_) {
    if (stage.previous.fd.is_open()) shutdown(stage.previous.fd.get(), how);
    if (stage.next.fd.is_open()) shutdown(stage.next.fd.get(), how);
  }
}

void NodeChain::Shutdown() { ShutdownAll(SHUT_RDWR); }
void NodeChain::Finish() { ShutdownAll(SHUT_WR); }

absl::Status NodeChain::Carry(std::vector<Flow>& flows, const Wait& wait) {
  while (true) {
    bool moved = false, done = true;
    for (Flow& flow : flows) {
      const size_t before = flow.got + flow.ready + flow.sent;
      OUTLAST_RETURN_IF_ERROR(flow.Receive(&is_unheard_));
      OUTLAST_RETURN_IF_ERROR(flow.advance(flow));
      OUTLAST_RETURN_IF_ERROR(flow.Send(&is_unheard_));
      moved |= flow.got + flow.ready + flow.sent != before;
      done &= flow.is_done();
    }
    if (done) return absl::OkStatus();
    if (moved) continue;

    std::vector<pollfd> polled;
    for (const Flow& flow : flows) {
      if (flow.in != nullptr && flow.got < flow.total())
        polled.push_back({.fd = flow.in->fd.get(), .events = POLLIN});
      if (flow.sent < flow.ready) polled.push_back({.fd = flow.out->fd.get(), .events = POLLOUT});
    }
    const int64_t left_ns = wait.deadline_ns - MonotonicNanos();
    if (left_ns <= 0) return absl::DeadlineExceededError("");
    const int64_t most_ms = std::min<int64_t>(left_ns / 1'000'000 + 1, kLongestPollMs);
    if (poll(polled.data(), polled.size(), static_cast<int>(most_ms)) == 0)
      OUTLAST_RETURN_IF_ERROR(wait.check());
  }
}

// All stages are told: whoever has not said anything on a connection in this call says this.
absl::Status NodeChain::Differ(std::vector<Flow>& flows, const ChainWord& word, ChainWord* mine) {
  for (const Flow& flow : flows) {
    if (flow.out != nullptr && flow.sent == 0)
      (void)!send(flow.out->fd.get(), &word, sizeof word, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  *mine = word;
  return absl::InvalidArgumentError("the ranks called different things");
}

absl::Status NodeChain::Reduce(ChainWord* mine, std::span<std::byte> total, const Add& add,
                               const Wait& wait) {
  std::vector<Flow> flows(2 * stages_.size());
  if (mine->differs != 0) {
    for (size_t i = 0; i < stages_.size(); ++i) {
      if (stages_[i].next.fd.is_open()) flows[2 * i].out = &stages_[i].next;
      if (stages_[i].previous.fd.is_open()) flows[2 * i + 1].out = &stages_[i].previous;
    }
    return Differ(flows, *mine, mine);
  }
  for (size_t i = 0; i < stages_.size(); ++i) {
    const ChainStage& stage = stages_[i];
    const ChainLink* const previous = stage.previous.fd.is_open() ? &stage.previous : nullptr;
    const ChainLink* const next = stage.next.fd.is_open() ? &stage.next : nullptr;
    Flow& down = flows[2 * i];
    Flow& up = flows[2 * i + 1];
    down = {.in = previous, .out = next, .bytes = total};
    up = {.in = next, .out = previous, .bytes = total};

    down.advance = [&, number = stage.number](Flow& flow) -> absl::Status {
      if (flow.in == nullptr) flow.got = std::min(flow.total(), flow.sent + kAhead);
      if (flow.ready == 0) {
        if (flow.got < sizeof(ChainWord)) return absl::OkStatus();
        if (flow.in == nullptr) flow.word = *mine;
        if (flow.word.magic != mine->magic || flow.word.call != mine->call)
          return Lost(*flow.in, fmt::format("what came is no word of call {}", mine->call));
        if (flow.word.differs == 0 && flow.word.signature != mine->signature) {
          flow.word.differs = 1;
          flow.word.other_signature = mine->signature;
          flow.word.other_rank = mine->rank;
          flow.word.other_function = mine->function;
        }
        if (flow.word.differs != 0) return Differ(flows, flow.word, mine);
        flow.ready = sizeof(ChainWord);
      }
      const size_t from = flow.ready - sizeof(ChainWord);
      const size_t count = (flow.got - flow.ready) / kFloat * kFloat;
      if (count > 0) add(number, from, flow.bytes.subspan(from, count));
      flow.ready += count;
      return absl::OkStatus();
    };
    up.advance = [sum = &down, &flows, mine, this](Flow& flow) -> absl::Status {
      if (flow.in == nullptr) flow.got = sum->ready;  // the last stage: its sum is the total
      if (flow.ready == 0) {
        if (flow.got < sizeof(ChainWord)) return absl::OkStatus();
        if (flow.in == nullptr) flow.word = sum->word;
        if (flow.word.magic != mine->magic || flow.word.call != mine->call)
          return Lost(*flow.in, fmt::format("what came is no word of call {}", mine->call));
        if (flow.word.differs != 0) return Differ(flows, flow.word, mine);
      }
      flow.ready = flow.got;
      return absl::OkStatus();
    };
  }
  return Carry(flows, wait);
}

absl::Status NodeChain::Spread(std::span<std::byte> bytes, int root, const Wait& wait) {
  std::vector<Flow> flows;
  for (const ChainStage& stage : stages_) {
    const ChainLink* const previous = stage.previous.fd.is_open() ? &stage.previous : nullptr;
    const ChainLink* const next = stage.next.fd.is_open() ? &stage.next : nullptr;
    const auto pass = [](Flow& flow) -> absl::Status {
      flow.ready = flow.got;
      return absl::OkStatus();
    };
    if (stage.number >= root)
      flows.push_back({.in = stage.number > root ? previous : nullptr, .out = next});
    if (stage.number <= root)
      flows.push_back({.in = stage.number < root ? next : nullptr, .out = previous});
    for (Flow& flow : flows) {
      flow.bytes = bytes;
      flow.word_bytes = 0;
      flow.advance = pass;
      if (flow.in == nullptr) flow.got = bytes.size();
    }
  }
  return Carry(flows, wait);
}

}  // namespace outlast
