// Streams over gRPC's callback API: a handful of threads, however many streams. No lock of ours is
// held while an ear is called, except each stream's own ear lock, which is what lets a stream be
// deaf from a moment on.
#include <absl/synchronization/mutex.h>
#include <grpc/support/log.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "control.grpc.pb.h"
#include "control/grpc/proto_frames.h"
#include "control/transport.h"

namespace outlast::control {
namespace {

using std::chrono::milliseconds;
using Lock = std::unique_lock<std::mutex>;

constexpr char kMethod[] = "/outlast.control.v1.Control/Attach";
constexpr size_t kMostQueuedBytes = 4 * kMaxFrameBytes;
constexpr milliseconds kFarewell(1000);

// A frame over the limit still arrives, so that both sides can be told its size; twice the limit
// does not.
constexpr int kGrpcMaxBytes = 2 * static_cast<int>(kMaxFrameBytes);

std::string JoinHostPort(const std::string& address, int port) {
  const bool is_v6 = address.find(':') != std::string::npos;
  return (is_v6 ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

std::string TooLong(size_t bytes) {
  return "a frame of " + std::to_string(bytes) + " bytes, at most " +
         std::to_string(kMaxFrameBytes) + " are allowed";
}

// "ipv6:%5B::1%5D:80" is [::1]:80.
std::string Readable(std::string peer) {
  const size_t scheme = peer.find(':');
  if (scheme != std::string::npos) peer.erase(0, scheme + 1);
  for (const auto& [code, text] : {std::pair("%5B", "["), std::pair("%5D", "]")}) {
    const size_t at = peer.find(code);
    if (at != std::string::npos) peer.replace(at, 3, text);
  }
  return peer;
}

// What stands between gRPC's words and the cause.
std::string Readable(const grpc::Status& status) {
  if (status.ok()) return "the coordinator closed the stream";
  const std::string& text = status.error_message();
  constexpr char kCause[] = "Failed to connect to remote host: ";
  const size_t at = text.rfind(kCause);
  return at == std::string::npos ? text : text.substr(at + sizeof(kCause) - 1);
}

// Frames that wait for the one that is being written.
class Outbox {
 public:
  // False: too much waits already.
  bool Push(const grpc::ByteBuffer& frame) {
    if (bytes_ + frame.Length() > kMostQueuedBytes) return false;
    bytes_ += frame.Length();
    queue_.push_back(frame);  // counts references
    return true;
  }
  bool empty() const { return queue_.empty(); }
  const grpc::ByteBuffer* front() const { return &queue_.front(); }
  void Pop() {
    bytes_ -= queue_.front().Length();
    queue_.pop_front();
  }
  void DropAllButFront() {
    while (queue_.size() > 1) {
      bytes_ -= queue_.back().Length();
      queue_.pop_back();
    }
  }

 private:
  std::deque<grpc::ByteBuffer> queue_;
  size_t bytes_ = 0;
};

template <typename Proto, typename Frame>
grpc::ByteBuffer Serialize(const Frame& frame) {
  Proto proto;
  ToProto(frame, proto);
  grpc::ByteBuffer bytes;
  bool own = false;
  (void)grpc::SerializationTraits<Proto>::Serialize(proto, &bytes, &own);
  return bytes;
}

// Empties `bytes`. Nothing: `why` says so.
template <typename Proto>
auto Parse(grpc::ByteBuffer& bytes, std::string& why) -> decltype(FromProto(Proto())) {
  const size_t size = bytes.Length();
  if (size > kMaxFrameBytes) {
    bytes.Clear();
    why = TooLong(size);
    return std::nullopt;
  }
  Proto proto;
  const bool is_whole = grpc::SerializationTraits<Proto>::Deserialize(&bytes, &proto).ok();
  auto frame = is_whole ? FromProto(proto) : std::nullopt;
  if (!frame) why = "a frame that protocol version 1 does not know";
  return frame;
}

// --- The coordinator's side ---

class GrpcServer;

// Whether `frame` is `other`, as far as comparing them is worth it: those that hold a map.
bool IsSame(const CoordinatorFrame& frame, const CoordinatorFrame& other) {
  const auto* message = std::get_if<CoordinatorMessage>(&frame);
  const auto* before = std::get_if<CoordinatorMessage>(&other);
  if (message == nullptr || before == nullptr || message->index() != before->index()) return false;
  if (const auto* commit = std::get_if<Commit>(message))
    return *commit == std::get<Commit>(*before);
  if (const auto* a = std::get_if<Prepare>(message)) {
    const auto& b = std::get<Prepare>(*before);
    return a->generation == b.generation && a->round == b.round && a->map == b.map &&
           a->plain == b.plain && a->finished == b.finished && a->spawn_delay == b.spawn_delay &&
           a->end_plain == b.end_plain && a->reason == b.reason;
  }
  return false;
}

// Deletes itself when gRPC is done with it.
class ServerStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ServerStream(GrpcServer& server, uint64_t id, grpc::CallbackServerContext* context)
      : server_(server), id_(id), context_(context) {}
  uint64_t id() const { return id_; }

  void Begin() {
    Lock lock(mutex_);
    if (!finished_) StartRead(&in_);
  }
  void Send(const grpc::ByteBuffer& frame) {
    Lock lock(mutex_);
    if (closing_ || finished_) return;
    if (frame.Length() > kMaxFrameBytes) return Cut(TooLong(frame.Length()));
    const bool idle = out_.empty();
    if (!out_.Push(frame)) return Cut("it does not read what it is sent");
    if (idle) StartWrite(out_.front());
  }
  void Close(const std::string& reason) {
    Lock lock(mutex_);
    if (closing_) return;
    closing_ = true;
    why_ = reason;
    if (out_.empty()) FinishOnce();
  }
  bool is_closing() {
    Lock lock(mutex_);
    return closing_;
  }
  void Cancel() { context_->TryCancel(); }

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override {
    Lock lock(mutex_);
    if (!ok) out_.DropAllButFront();
    out_.Pop();
    if (finished_) return;
    if (!out_.empty()) {
      StartWrite(out_.front());
    } else if (closing_ || !ok) {
      FinishOnce();
    }
  }
  void OnCancel() override {
    Lock lock(mutex_);
    if (why_.empty()) why_ = "the connection was lost";
    FinishOnce();
  }
  void OnDone() override;

 private:
  // With the lock held. At once, whatever waits to be sent.
  void Cut(const std::string& reason) {
    closing_ = true;
    why_ = reason;
    FinishOnce();
  }
  void FinishOnce() {
    if (std::exchange(finished_, true)) return;
    Finish(closing_ ? grpc::Status(grpc::StatusCode::ABORTED, why_) : grpc::Status::OK);
  }

  GrpcServer& server_;
  const uint64_t id_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer in_;
  std::mutex mutex_;
  Outbox out_;
  bool closing_ = false;
  bool finished_ = false;
  std::string why_;
};

class GrpcServer final : public FrameServer {
 public:
  explicit GrpcServer(Ears ears) : ears_(std::move(ears)), service_(*this) {}

  // False: it could not be bound.
  bool Start(const std::vector<std::string>& addresses, int port, const Certificates& certificates,
             const Liveness& liveness) {
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(kGrpcMaxBytes);
    // Two servers on one port would share the agents between them.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, liveness.ping_after_ms);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, liveness.pong_within_ms);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_SENT_PING_INTERVAL_WITHOUT_DATA_MS, 100);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 100);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10'000);
    for (const std::string& address : addresses) {
      builder.AddListeningPort(JoinHostPort(address, port), Credentials(certificates), &port_);
    }
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    return server_ != nullptr && port_ != 0;
  }

  ~GrpcServer() override {
    if (server_ == nullptr) return;
    Lock lock(mutex_);
    const auto no_farewells = [this] {
      for (const auto& [id, stream] : streams_) {
        if (stream->is_closing()) return false;
      }
      return true;
    };
    gone_.wait_for(lock, kFarewell, no_farewells);
    ending_ = true;
    for (const auto& [id, stream] : streams_) stream->Cancel();
    lock.unlock();
    server_->Shutdown(std::chrono::system_clock::now() + kFarewell);
    lock.lock();
    gone_.wait(lock, [this] { return streams_.empty(); });
    lock.unlock();
    server_.reset();
  }

  int port() const override { return port_; }
  void Send(uint64_t stream, const CoordinatorFrame& frame) override {
    Lock lock(mutex_);
    const auto at = streams_.find(stream);
    if (at == streams_.end()) return;
    // A map of a thousand nodes is told to each of them.
    if (!IsSame(frame, newest_)) {
      newest_ = frame;
      newest_bytes_ = Serialize<v1::CoordinatorFrame>(frame);
    }
    at->second->Send(newest_bytes_);
  }
  void Close(uint64_t stream, const std::string& reason) override {
    Lock lock(mutex_);
    if (const auto at = streams_.find(stream); at != streams_.end()) at->second->Close(reason);
  }

  const Ears& ears() const { return ears_; }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Accept(
      grpc::CallbackServerContext* context) {
    ServerStream* stream = nullptr;
    {
      Lock lock(mutex_);
      stream = new ServerStream(*this, next_++, context);
      streams_[stream->id()] = stream;
      if (ending_) stream->Cancel();
    }
    ears_.on_open(stream->id(), Readable(context->peer()));
    stream->Begin();
    return stream;
  }
  void Remove(uint64_t id, const std::string& why) {
    ears_.on_closed(id, why);
    Lock lock(mutex_);
    streams_.erase(id);
    gone_.notify_all();
  }

 private:
  class Service final : public v1::Control::WithRawCallbackMethod_Attach<v1::Control::Service> {
   public:
    explicit Service(GrpcServer& server) : server_(server) {}
    grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Attach(
        grpc::CallbackServerContext* context) override {
      return server_.Accept(context);
    }

   private:
    GrpcServer& server_;
  };

  static std::shared_ptr<grpc::ServerCredentials> Credentials(const Certificates& certificates) {
    if (certificates.empty()) return grpc::InsecureServerCredentials();
    grpc::SslServerCredentialsOptions options(
        certificates.ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    options.pem_root_certs = certificates.ca;
    options.pem_key_cert_pairs.push_back({certificates.key, certificates.certificate});
    return grpc::SslServerCredentials(options);
  }

  const Ears ears_;
  Service service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
  std::mutex mutex_;  // before a stream's
  std::condition_variable gone_;
  bool ending_ = false;
  uint64_t next_ = 1;
  std::unordered_map<uint64_t, ServerStream*> streams_;
  CoordinatorFrame newest_;  // that was serialized
  grpc::ByteBuffer newest_bytes_;
};

void ServerStream::OnReadDone(bool ok) {
  if (!ok) {
    Lock lock(mutex_);
    if (why_.empty()) why_ = "the agent closed the stream, or was lost";
    if (out_.empty()) FinishOnce();
    closing_ = true;
    return;
  }
  const size_t bytes = in_.Length();
  std::string why;
  std::optional<AgentFrame> frame = Parse<v1::AgentFrame>(in_, why);
  if (!frame) {
    Lock lock(mutex_);
    return Cut(why);
  }
  server_.ears().on_frame(id_, *std::move(frame), bytes);
  Lock lock(mutex_);
  if (!finished_) StartRead(&in_);
}

void ServerStream::OnDone() {
  std::string why;
  {
    Lock lock(mutex_);
    why = why_;
  }
  server_.Remove(id_, why);
  delete this;
}

// --- An agent's side ---

// Calls that nobody holds any more and that gRPC is not done with.
class Calls {
 public:
  static Calls& Get() {
    static Calls* const calls = new Calls;  // never destroyed: gRPC's threads may outlive main
    return *calls;
  }
  void Add(grpc::ClientContext* context) {
    Lock lock(mutex_);
    contexts_.insert(context);
  }
  void Remove(grpc::ClientContext* context) {
    Lock lock(mutex_);
    contexts_.erase(context);
    none_.notify_all();
  }
  void Settle() {
    Lock lock(mutex_);
    const auto none = [this] { return contexts_.empty(); };
    if (none_.wait_for(lock, kFarewell, none)) return;
    for (grpc::ClientContext* context : contexts_) context->TryCancel();
    none_.wait_for(lock, kFarewell, none);
  }

 private:
  std::mutex mutex_;
  std::condition_variable none_;
  std::unordered_set<grpc::ClientContext*> contexts_;
};

// Lives until gRPC is done with it.
class ClientCall final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ClientCall(const std::shared_ptr<grpc::Channel>& channel, FrameStream::Ears ears)
      : stub_(channel), ears_(std::move(ears)) {}

  void Begin(std::shared_ptr<ClientCall> self) {
    Lock lock(mutex_);
    self_ = std::move(self);
    stub_.PrepareBidiStreamingCall(&context_, kMethod, {}, this);
    AddHold();  // Send starts writes from anywhere, until the reads end
    StartRead(&in_);
    StartCall();
  }
  void Send(const grpc::ByteBuffer& frame) {
    const size_t bytes = frame.Length();
    Lock lock(mutex_);
    if (ended_ || half_closed_) return;
    const bool idle = out_.empty();
    if (bytes > kMaxFrameBytes || !out_.Push(frame)) {
      if (why_.empty())
        why_ = bytes > kMaxFrameBytes ? TooLong(bytes) : "it does not read what it is sent";
      context_.TryCancel();
      return;
    }
    if (idle) StartWrite(out_.front());
  }
  void HalfClose() {
    Lock lock(mutex_);
    if (ended_ || std::exchange(half_closed_, true)) return;
    if (out_.empty()) StartWritesDone();
  }
  void Abandon() {
    Lock ear(ear_mutex_);
    ears_ = {};
    Lock lock(mutex_);
    if (self_ == nullptr) return;
    Calls::Get().Add(&context_);
    if (!half_closed_) context_.TryCancel();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Lock lock(mutex_);
      ended_ = true;
      lock.unlock();
      RemoveHold();
      return;
    }
    const size_t bytes = in_.Length();
    std::string why;
    std::optional<CoordinatorFrame> frame = Parse<v1::CoordinatorFrame>(in_, why);
    if (frame) {
      Lock ear(ear_mutex_);
      if (ears_.on_frame) ears_.on_frame(*std::move(frame), bytes);
    }
    Lock lock(mutex_);
    if (!why.empty()) {
      why_ = why;
      context_.TryCancel();
    }
    StartRead(&in_);
  }
  void OnWriteDone(bool ok) override {
    Lock lock(mutex_);
    if (!ok) out_.DropAllButFront();
    out_.Pop();
    if (!ok || ended_) return;
    if (!out_.empty()) {
      StartWrite(out_.front());
    } else if (half_closed_) {
      StartWritesDone();
    }
  }
  void OnDone(const grpc::Status& status) override {
    std::shared_ptr<ClientCall> self;
    std::string why;
    {
      Lock lock(mutex_);
      self.swap(self_);
      why = why_.empty() ? Readable(status) : why_;
    }
    {
      Lock ear(ear_mutex_);
      if (ears_.on_closed) ears_.on_closed(why);
    }
    Calls::Get().Remove(&context_);
  }

 private:
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer in_;
  std::mutex ear_mutex_;  // before mutex_
  FrameStream::Ears ears_;
  std::mutex mutex_;
  std::shared_ptr<ClientCall> self_;
  Outbox out_;
  bool half_closed_ = false;
  bool ended_ = false;
  std::string why_;
};

class GrpcStream final : public FrameStream {
 public:
  GrpcStream(const std::shared_ptr<grpc::Channel>& channel, Ears ears)
      : call_(std::make_shared<ClientCall>(channel, std::move(ears))) {
    call_->Begin(call_);
  }
  ~GrpcStream() override { call_->Abandon(); }
  void Send(const AgentFrame& frame) override { call_->Send(Serialize<v1::AgentFrame>(frame)); }
  void Finish() override { call_->HalfClose(); }

 private:
  std::shared_ptr<ClientCall> call_;
};

// --- Both ---

// A call that cannot go anywhere, whose channel holds the queue that all callbacks of the process
// come from. gRPC 1.51 ends that queue and joins its threads where the last channel goes away; that
// is one of these threads when a call lets go of its channel in OnDone, and the process aborts.
class QueueHolder final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  QueueHolder() : channel_(grpc::CreateChannel("", nullptr)), stub_(channel_) {
    Lock lock(mutex_);
    stub_.PrepareBidiStreamingCall(&context_, kMethod, {}, this);
    StartCall();
    ended_.wait(lock, [this] { return has_ended_; });
  }
  void OnDone(const grpc::Status&) override {
    Lock lock(mutex_);
    has_ended_ = true;
    ended_.notify_all();
  }

 private:
  std::shared_ptr<grpc::Channel> channel_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
};

class GrpcTransport final : public Transport {
 public:
  GrpcTransport() {
    // Its lines are about its insides; what matters is in each stream's `why`.
    if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
    // Debian's Abseil looks for cycles at each lock; with a thousand streams that is what costs
    // most.
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
    queue_ = new QueueHolder;  // like the transport, for the life of the process
  }

  std::unique_ptr<FrameServer> Listen(const std::vector<std::string>& addresses, int port,
                                      const Certificates& certificates, const Liveness& liveness,
                                      FrameServer::Ears ears) override {
    auto server = std::make_unique<GrpcServer>(std::move(ears));
    if (!server->Start(addresses, port, certificates, liveness)) return nullptr;
    return server;
  }

  std::unique_ptr<FrameStream> Connect(const std::string& address, int port,
                                       const std::string& name, const Certificates& certificates,
                                       const Liveness& liveness, FrameStream::Ears ears) override {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kGrpcMaxBytes);
    // Each stream has a connection of its own, and whoever opens it decides when.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, liveness.connect_within_ms);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, liveness.ping_after_ms);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, liveness.pong_within_ms);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_MIN_SENT_PING_INTERVAL_WITHOUT_DATA_MS, 100);
    auto credentials = grpc::InsecureChannelCredentials();
    if (!certificates.empty()) {
      arguments.SetSslTargetNameOverride(name);
      grpc::SslCredentialsOptions options;
      options.pem_root_certs = certificates.ca;
      options.pem_private_key = certificates.key;
      options.pem_cert_chain = certificates.certificate;
      credentials = grpc::SslCredentials(options);
    }
    const char* scheme = address.find(':') != std::string::npos ? "ipv6:" : "ipv4:";
    return std::make_unique<GrpcStream>(
        grpc::CreateCustomChannel(scheme + JoinHostPort(address, port), credentials, arguments),
        std::move(ears));
  }

  void Settle() override { Calls::Get().Settle(); }

 private:
  QueueHolder* queue_ = nullptr;
};

}  // namespace
}  // namespace outlast::control

extern "C" __attribute__((visibility("default"))) outlast::control::Transport*
OutlastControlTransport(uint64_t abi) {
  static auto* const transport = new outlast::control::GrpcTransport;
  return abi == outlast::control::kTransportAbi ? transport : nullptr;
}
