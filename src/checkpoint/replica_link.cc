#include "checkpoint/replica_link.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "base/event_loop.h"
#include "base/serial_thread.h"
#include "base/socket.h"
#include "outlast/base/clock.h"
#include "run/frame_socket.h"
#include "run/peer_dialer.h"
#include "run/peer_door.h"
#include "store/rate_limit.h"

namespace outlast {
namespace {

constexpr uint16_t kChannel = 3;
constexpr size_t kMostMessage = kMostReplicaExtra + (kMostReplicaChunks * 4) + 4096;
// Of one connection, in the socket's queue: enough to keep the kernel busy between two looks.
constexpr size_t kMostQueued = 4 << 20;
constexpr absl::Duration kLook = absl::Milliseconds(1);
constexpr absl::Duration kFarewell = absl::Seconds(1);
// The thread has a low priority, and a busy machine need not cost a transfer.
constexpr absl::Duration kLoss = absl::Seconds(10);
constexpr int kMostTries = 3;  // of a dial

enum class Kind : uint8_t { kHead = 1, kChunk = 2, kTaken = 3, kWant = 4, kNo = 5 };

PayloadWriter Begin(Kind kind) {
  PayloadWriter writer;
  writer.Int(kind);
  return writer;
}

// Sends one copy, as fast as the connection and the rate allow. Belongs to the loop's thread.
class Sender {
 public:
  // Null `bucket`: no limit.
  Sender(EventLoop& loop, FrameSocket& socket, TokenBucket* bucket,
         std::function<void()> on_progress)
      : loop_(loop), socket_(socket), bucket_(bucket), on_progress_(std::move(on_progress)) {}
  ~Sender() { loop_.Cancel(timer_); }

  void Send(std::shared_ptr<const Replica> copy, const std::optional<SnapshotKey>& keep) {
    copy_ = std::move(copy);
    next_ = 0;
    ReplicaHead head = copy_->head();
    head.keep = keep;
    socket_.Send(MakeFrame(kChannel, static_cast<char>(Kind::kHead) + Encode(head)));
    Pump();
  }
  bool is_busy() const { return copy_ != nullptr; }
  uint64_t bytes() const { return bytes_; }

 private:
  void Pump() {
    loop_.Cancel(std::exchange(timer_, 0));
    while (copy_) {
      if (socket_.queued_bytes() >= kMostQueued) return Later(kLook);
      const std::span<const std::byte> chunk = copy_->chunk(next_);
      if (bucket_ != nullptr && !is_paid_) {
        is_paid_ = true;
        const absl::Duration wait = bucket_->Take(chunk.size(), Clock::Real().Uptime());
        if (wait > absl::ZeroDuration()) return Later(wait);
      }
      is_paid_ = false;
      std::string payload = Begin(Kind::kChunk).Int(next_).bytes();
      payload.append(reinterpret_cast<const char*>(chunk.data()), chunk.size());
      bytes_ += chunk.size();
      if (++next_ == copy_->chunk_count()) copy_.reset();
      socket_.Send(MakeFrame(kChannel, std::move(payload)));
      on_progress_();
    }
  }
  void Later(absl::Duration wait) {
    timer_ = loop_.RunAfter(wait, [this] { Pump(); });
  }

  EventLoop& loop_;
  FrameSocket& socket_;
  TokenBucket* const bucket_;
  const std::function<void()> on_progress_;
  std::shared_ptr<const Replica> copy_;
  uint32_t next_ = 0;
  bool is_paid_ = false;
  uint64_t bytes_ = 0;
  EventLoop::TimerId timer_ = 0;
};

// Takes one copy after the other into the store.
class Receiver {
 public:
  Receiver(ReplicaStore& store, ReplicaUse use) : store_(store), use_(use) {}

  absl::Status OnHead(std::string_view bytes) {
    OUTLAST_ASSIGN_OR_RETURN(ReplicaHead head, DecodeReplicaHead(bytes));
    if (wanted_ && head.name != *wanted_)
      return absl::InvalidArgumentError("another copy than the one that was asked for");
    if (use_ == ReplicaUse::kRestore) head.keep = head.name.snapshot;
    OUTLAST_ASSIGN_OR_RETURN(filling_, store_.Begin(std::move(head), use_));
    return absl::OkStatus();
  }
  // True: the copy is whole, and in the store.
  absl::StatusOr<bool> OnChunk(std::string_view bytes) {
    PayloadReader reader(bytes);
    const auto index = reader.Int<uint32_t>();
    if (!reader.ok() || !filling_) return absl::InvalidArgumentError("a chunk of no copy");
    OUTLAST_RETURN_IF_ERROR(filling_->Put(index, std::as_bytes(std::span(reader.rest()))));
    bytes_ += reader.rest().size();
    if (!filling_->is_whole()) return false;
    OUTLAST_RETURN_IF_ERROR(store_.Commit(std::exchange(filling_, nullptr)));
    return true;
  }
  void Want(const ReplicaName& name) { wanted_ = name; }
  uint64_t bytes() const { return bytes_; }

 private:
  ReplicaStore& store_;
  const ReplicaUse use_;
  std::optional<ReplicaName> wanted_;
  std::shared_ptr<Replica> filling_;
  uint64_t bytes_ = 0;
};

class Link;

// What this agent began: a push or a fetch. Its connection ends with it.
class Transfer {
 public:
  struct What {
    bool is_push = false;
    std::string node, address;
    std::vector<ReplicaName> copies;
    std::optional<SnapshotKey> keep;
    ReplicaLink::Done done;
  };
  Transfer(Link& link, uint64_t id, What what);
  ~Transfer();
  void Start(const PeerIdentity& self);
  void Abort(const absl::Status& why) { End(why); }

 private:
  void OnUp(std::unique_ptr<FrameSocket> socket);
  void OnFailed(const absl::Status& why);
  void Next();
  void OnFrame(uint16_t channel, const std::string& payload);
  void Progress();
  void End(const absl::Status& outcome);

  Link& link_;
  const uint64_t id_;
  What what_;
  size_t at_ = 0;
  int failures_ = 0;
  bool is_over_ = false;
  uint64_t bytes_ = 0;
  std::unique_ptr<FrameSocket> socket_;
  std::unique_ptr<Sender> sender_;
  std::unique_ptr<Receiver> receiver_;
  std::unique_ptr<PeerDialer> dialer_;
  EventLoop::TimerId deadline_ = 0;
};

// Who came to this agent, proven.
struct Guest {
  PeerIdentity who;
  std::unique_ptr<FrameSocket> socket;
  std::unique_ptr<Sender> sender;
  std::unique_ptr<Receiver> receiver;
};

class Link final : public ReplicaLink {
 public:
  Link(ReplicaLinkOptions options, ReplicaStore& store, std::unique_ptr<EventLoop> loop,
       std::string address)
      : options_(std::move(options)),
        store_(store),
        address_(std::move(address)),
        loop_(std::move(loop)),
        thread_(
            std::make_unique<SerialThread>("outlast-copies", SerialThread::Priority::kBackground)) {
    peers_.job = options_.job;
    peers_.node = options_.node;
    peers_.token = options_.token;
    peers_.max_message_bytes = kMostMessage;
    peers_.loss = kLoss;
    peers_.greeting = kLoss;
    if (options_.bytes_per_second != 0) {
      bucket_.emplace(options_.bytes_per_second,
                      std::max<uint64_t>(options_.bytes_per_second / 10, kChunkBytes));
    }
  }
  ~Link() override {
    loop_->Post([this] {
      transfers_.clear();
      guests_.clear();
      farewells_.clear();
      door_.reset();
      ended_.clear();
      loop_->Stop();
    });
    thread_.reset();
  }

  void Run(UniqueFd listener) {
    thread_->Post([this, listener = std::make_shared<UniqueFd>(std::move(listener))] {
      door_ = std::make_unique<PeerDoor>(
          *loop_, peers_, std::move(*listener),
          PeerDoor::Ears{.on_proven =
                             [this](const PeerIdentity& who, std::unique_ptr<FrameSocket> socket) {
                               Admit(who, std::move(socket));
                             },
                         .on_refused =
                             [this](std::unique_ptr<FrameSocket> socket, const std::string& who,
                                    const absl::Status& why) {
                               Refuse(std::move(socket), who, MessageOf(why));
                             }});
      loop_->Run();
    });
  }

  std::string address() const override { return address_; }

  void Enter(const Id128& run_id, uint64_t generation, std::set<std::string> nodes) override {
    loop_->Post([this, run_id, generation, nodes = std::move(nodes)] {
      run_id_ = run_id;
      generation_ = generation;
      nodes_ = nodes;
      const absl::Status over =
          Error(absl::StatusCode::kAborted, "generation {} begins", generation);
      const std::vector<uint64_t> ids = KeysOf(transfers_);
      for (const uint64_t id : ids) transfers_.at(id)->Abort(over);
      guests_.clear();
    });
  }
  void Push(const std::string& node, const std::string& address, std::vector<ReplicaName> copies,
            std::optional<SnapshotKey> keep, Done done) override {
    Begin({true, node, address, std::move(copies), keep, std::move(done)});
  }
  void Fetch(const std::string& node, const std::string& address, std::vector<ReplicaName> copies,
             Done done) override {
    Begin({false, node, address, std::move(copies), std::nullopt, std::move(done)});
  }

  // Of the transfers; on the loop's thread.
  EventLoop& loop() { return *loop_; }
  ReplicaStore& store() { return store_; }
  const ReplicaLinkOptions& options() const { return options_; }
  const TcpPeersOptions& peers() const { return peers_; }
  TokenBucket* bucket() { return bucket_ ? &*bucket_ : nullptr; }
  // It is not destroyed under its own feet.
  void Forget(uint64_t id) {
    const auto found = transfers_.find(id);
    if (found == transfers_.end()) return;
    ended_.push_back(std::move(found->second));
    transfers_.erase(found);
    loop_->Post([this] { ended_.clear(); });
  }
  void Refuse(std::unique_ptr<FrameSocket> socket, const std::string& who, std::string_view why) {
    options_.say(fmt::format("copies: {}: {}", who, why));
    socket->SendWord(PeerWord::kRefused, WriteRefused(PeerRefusal::kRetry, why));
    Bid(std::move(socket));
  }
  // The last words still leave.
  void Bid(std::unique_ptr<FrameSocket> socket) {
    socket->Listen({});  // its ears may be gone
    socket->Finish();
    const uint64_t id = next_++;
    farewells_[id] = std::move(socket);
    loop_->RunAfter(kFarewell, [this, id] { farewells_.erase(id); });
  }

 private:
  template <typename Map>
  static std::vector<uint64_t> KeysOf(const Map& map) {
    std::vector<uint64_t> keys;
    for (const auto& [key, value] : map) keys.push_back(key);
    return keys;
  }

  void Begin(Transfer::What what) {
    loop_->Post([this, what = std::move(what)] {
      const uint64_t id = next_++;
      Transfer& transfer = *(transfers_[id] = std::make_unique<Transfer>(*this, id, what));
      transfer.Start({.job = options_.job,
                      .run_id = run_id_,
                      .generation = generation_,
                      .node = options_.node,
                      .lead = what.node});
    });
  }

  absl::Status CheckGuest(const PeerIdentity& who) const {
    if (who.run_id != run_id_)
      return Error(absl::StatusCode::kFailedPrecondition, "of run {}, this is run {}",
                   who.run_id.hex(), run_id_.hex());
    if (who.generation != generation_ || !nodes_.contains(who.node)) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "of generation {}, node '{}' is in generation {}", who.generation, options_.node,
                   generation_);
    }
    return absl::OkStatus();
  }

  void Admit(const PeerIdentity& who, std::unique_ptr<FrameSocket> socket) {
    if (const absl::Status status = CheckGuest(who); !status.ok()) {
      // The one is a moment ahead of the other: no line of it.
      socket->SendWord(PeerWord::kRefused, WriteRefused(PeerRefusal::kRetry, MessageOf(status)));
      return Bid(std::move(socket));
    }
    const uint64_t id = next_++;
    Guest& guest = guests_[id];
    guest.who = who;
    guest.socket = std::move(socket);
    guest.sender = std::make_unique<Sender>(*loop_, *guest.socket, nullptr, [] {});
    guest.receiver = std::make_unique<Receiver>(store_, ReplicaUse::kRound);
    guest.socket->Listen(
        {.on_frame = [this, id](uint16_t channel,
                                const std::string& payload) { OnFrame(id, channel, payload); },
         .on_end = [this, id](const absl::Status&) { Leave(id); }});
    guest.socket->SendWord(PeerWord::kWelcome, "");
  }

  void Leave(uint64_t id) {
    auto node = guests_.extract(id);
    if (node.empty()) return;
    node.mapped().sender.reset();
    Bid(std::move(node.mapped().socket));
  }

  void OnFrame(uint64_t id, uint16_t channel, const std::string& payload) {
    const auto found = guests_.find(id);
    if (found == guests_.end() || channel != kChannel || payload.empty()) return;
    Guest& guest = found->second;
    const std::string_view rest = std::string_view(payload).substr(1);
    absl::Status status;
    switch (static_cast<Kind>(payload[0])) {
      case Kind::kHead:
        status = guest.receiver->OnHead(rest);
        break;
      case Kind::kChunk: {
        const auto whole = guest.receiver->OnChunk(rest);
        status = whole.status();
        if (whole.ok() && *whole)
          guest.socket->Send(MakeFrame(kChannel, outlast::Begin(Kind::kTaken).bytes()));
        break;
      }
      case Kind::kWant:
        status = Serve(guest, rest);
        break;
      default:
        status = absl::InvalidArgumentError("no message about copies");
    }
    if (status.ok()) return;
    PayloadWriter no = outlast::Begin(Kind::kNo);
    no.Int(static_cast<int32_t>(status.code())).Text(MessageOf(status));
    guest.socket->Send(MakeFrame(kChannel, no.bytes()));
    Leave(id);
  }

  absl::Status Serve(Guest& guest, std::string_view bytes) {
    PayloadReader reader(bytes);
    ReplicaName name;
    name.rank = reader.Int<uint32_t>();
    name.snapshot.generation = reader.Int<uint64_t>();
    name.snapshot.step = reader.Int<int64_t>();
    if (!reader.ok() || guest.sender->is_busy())
      return absl::InvalidArgumentError("a copy is asked for out of turn");
    auto copy = store_.Find(name);
    if (!copy) {
      return Error(absl::StatusCode::kNotFound, "no copy of rank {}, step {} of generation {}",
                   name.rank, name.snapshot.step, name.snapshot.generation);
    }
    guest.sender->Send(std::move(copy), std::nullopt);
    return absl::OkStatus();
  }

  const ReplicaLinkOptions options_;
  ReplicaStore& store_;
  const std::string address_;
  TcpPeersOptions peers_;
  std::optional<TokenBucket> bucket_;
  std::unique_ptr<EventLoop> loop_;

  // The loop's thread alone.
  std::unique_ptr<PeerDoor> door_;
  Id128 run_id_;
  uint64_t generation_ = 0;
  std::set<std::string> nodes_;
  uint64_t next_ = 1;
  std::map<uint64_t, std::unique_ptr<Transfer>> transfers_;
  std::vector<std::unique_ptr<Transfer>> ended_;
  std::map<uint64_t, Guest> guests_;
  std::map<uint64_t, std::unique_ptr<FrameSocket>> farewells_;

  std::unique_ptr<SerialThread> thread_;  // runs the loop
};

Transfer::Transfer(Link& link, uint64_t id, What what)
    : link_(link), id_(id), what_(std::move(what)) {}

Transfer::~Transfer() { link_.loop().Cancel(deadline_); }

void Transfer::Start(const PeerIdentity& self) {
  Progress();
  if (what_.copies.empty()) return End(absl::OkStatus());
  dialer_ = std::make_unique<PeerDialer>(
      link_.loop(), link_.peers(),
      PeerDialer::Ears{
          .on_up = [this](std::unique_ptr<FrameSocket> socket) { OnUp(std::move(socket)); },
          .on_failed = [this](const absl::Status& why) { OnFailed(why); },
          .on_refused =
              [this](std::unique_ptr<FrameSocket> socket, const absl::Status& why) {
                if (socket)
                  link_.Refuse(std::move(socket), "node '" + what_.node + "'", MessageOf(why));
                OnFailed(why);
              }});
  dialer_->Dial(self, what_.address);
}

// A partner may enter the generation a moment later than this one.
void Transfer::OnFailed(const absl::Status& why) {
  if (is_over_ || ++failures_ < kMostTries) return;
  End(why);
}

void Transfer::OnUp(std::unique_ptr<FrameSocket> socket) {
  if (is_over_) return;
  socket_ = std::move(socket);
  socket_->Listen({.on_frame = [this](uint16_t channel,
                                      const std::string& payload) { OnFrame(channel, payload); },
                   .on_end = [this](const absl::Status& why) { End(why); }});
  sender_ =
      std::make_unique<Sender>(link_.loop(), *socket_, link_.bucket(), [this] { Progress(); });
  receiver_ = std::make_unique<Receiver>(link_.store(), ReplicaUse::kRestore);
  Next();
}

void Transfer::Next() {
  if (at_ == what_.copies.size()) return End(absl::OkStatus());
  const ReplicaName& name = what_.copies[at_];
  if (what_.is_push) {
    auto copy = link_.store().Find(name);
    if (!copy) {
      return End(Error(absl::StatusCode::kNotFound, "no copy of rank {}, step {}", name.rank,
                       name.snapshot.step));
    }
    return sender_->Send(std::move(copy), what_.keep);
  }
  receiver_->Want(name);
  socket_->Send(MakeFrame(kChannel, Begin(Kind::kWant)
                                        .Int(name.rank)
                                        .Int(name.snapshot.generation)
                                        .Int(name.snapshot.step)
                                        .bytes()));
}

void Transfer::OnFrame(uint16_t channel, const std::string& payload) {
  if (is_over_ || channel != kChannel || payload.empty()) return;
  Progress();
  const std::string_view rest = std::string_view(payload).substr(1);
  const auto kind = static_cast<Kind>(payload[0]);
  if (kind == Kind::kNo) {
    PayloadReader reader(rest);
    const auto code = static_cast<absl::StatusCode>(reader.Int<int32_t>());
    const std::string why(reader.Text());
    return End(MakeStatus(code == absl::StatusCode::kOk ? absl::StatusCode::kInternal : code,
                          fmt::format("node '{}': {}", what_.node, why)));
  }
  if (what_.is_push && kind == Kind::kTaken && !sender_->is_busy()) {
    ++at_;
    return Next();
  }
  if (!what_.is_push && kind == Kind::kHead) {
    if (const absl::Status head = receiver_->OnHead(rest); !head.ok()) End(head);
    return;
  }
  if (!what_.is_push && kind == Kind::kChunk) {
    const auto whole = receiver_->OnChunk(rest);
    if (!whole.ok()) return End(whole.status());
    if (!*whole) return;
    ++at_;
    return Next();
  }
  End(Error(absl::StatusCode::kInvalidArgument, "node '{}': its words are none about copies",
            what_.node));
}

void Transfer::Progress() {
  if (is_over_) return;
  link_.loop().Cancel(deadline_);
  deadline_ = link_.loop().RunAfter(link_.options().no_progress, [this] {
    End(Error(absl::StatusCode::kDeadlineExceeded, "node '{}': nothing moved for {}", what_.node,
              absl::FormatDuration(link_.options().no_progress)));
  });
}

void Transfer::End(const absl::Status& outcome) {
  if (std::exchange(is_over_, true)) return;
  link_.loop().Cancel(std::exchange(deadline_, 0));
  if (sender_) bytes_ += sender_->bytes();
  if (receiver_) bytes_ += receiver_->bytes();
  if (dialer_) dialer_->Stop();
  sender_.reset();
  if (socket_) link_.Bid(std::move(socket_));
  // A status that two threads share is a race to TSan, as Debian's Abseil counts unseen.
  what_.done(MakeStatus(outcome.code(), std::string(MessageOf(outcome))), bytes_);
  link_.Forget(id_);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ReplicaLink>> ReplicaLink::Start(ReplicaLinkOptions options,
                                                                ReplicaStore& store) {
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress at, NumericAddress({options.host, 0}));
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd listener, ListenOn(at));
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress bound, SocketAddress::Local(listener.get()));
  OUTLAST_ASSIGN_OR_RETURN(std::unique_ptr<EventLoop> loop, EventLoop::Make());
  auto link =
      std::make_unique<Link>(std::move(options), store, std::move(loop), bound.host_port().text());
  link->Run(std::move(listener));
  return link;
}

}  // namespace outlast
