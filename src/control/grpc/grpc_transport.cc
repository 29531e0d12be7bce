// Streams over gRPC's callback API: a handful of threads, however many streams. No lock of ours is
// held while an ear is called, except each stream's own ear lock, which is what lets a stream be
// deaf from a moment on.
#include <grpc/support/log.h>
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
template <typename Proto>
class Outbox {
 public:
  // False: too much waits already.
  bool Push(Proto proto, size_t bytes) {
    if (bytes_ + bytes > kMostQueuedBytes) return false;
    bytes_ += bytes;
    queue_.push_back({std::move(proto), bytes});
    return true;
  }
  bool empty() const { return queue_.empty(); }
  const Proto& front() const { return queue_.front().first; }
  void Pop() {
    bytes_ -= queue_.front().second;
    queue_.pop_front();
  }
  void DropAllButFront() {
    while (queue_.size() > 1) {
      bytes_ -= queue_.back().second;
      queue_.pop_back();
    }
  }

 private:
  std::deque<std::pair<Proto, size_t>> queue_;
  size_t bytes_ = 0;
};

// --- The coordinator's side ---

class GrpcServer;

// Deletes itself when gRPC is done with it.
class ServerStream final : public grpc::ServerBidiReactor<v1::AgentFrame, v1::CoordinatorFrame> {
 public:
  ServerStream(GrpcServer& server, uint64_t id, grpc::CallbackServerContext* context)
      : server_(server), id_(id), context_(context) {}
  uint64_t id() const { return id_; }

  void Begin() {
    Lock lock(mutex_);
    if (!finished_) StartRead(&in_);
  }
  void Send(v1::CoordinatorFrame proto) {
    const size_t bytes = proto.ByteSizeLong();
    Lock lock(mutex_);
    if (closing_ || finished_) return;
    if (bytes > kMaxFrameBytes) return Cut(TooLong(bytes));
    const bool idle = out_.empty();
    if (!out_.Push(std::move(proto), bytes)) return Cut("it does not read what it is sent");
    if (idle) StartWrite(&out_.front());
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
      StartWrite(&out_.front());
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
  v1::AgentFrame in_;
  std::mutex mutex_;
  Outbox<v1::CoordinatorFrame> out_;
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
    v1::CoordinatorFrame proto;
    ToProto(frame, proto);
    Lock lock(mutex_);
    if (const auto at = streams_.find(stream); at != streams_.end())
      at->second->Send(std::move(proto));
  }
  void Close(uint64_t stream, const std::string& reason) override {
    Lock lock(mutex_);
    if (const auto at = streams_.find(stream); at != streams_.end()) at->second->Close(reason);
  }

  const Ears& ears() const { return ears_; }
  grpc::ServerBidiReactor<v1::AgentFrame, v1::CoordinatorFrame>* Accept(
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
  class Service final : public v1::Control::CallbackService {
   public:
    explicit Service(GrpcServer& server) : server_(server) {}
    grpc::ServerBidiReactor<v1::AgentFrame, v1::CoordinatorFrame>* Attach(
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
};

void ServerStream::OnReadDone(bool ok) {
  if (!ok) {
    Lock lock(mutex_);
    if (why_.empty()) why_ = "the agent closed the stream, or was lost";
    if (out_.empty()) FinishOnce();
    closing_ = true;
    return;
  }
  const size_t bytes = in_.ByteSizeLong();
  std::optional<AgentFrame> frame = bytes <= kMaxFrameBytes ? FromProto(in_) : std::nullopt;
  if (!frame) {
    Lock lock(mutex_);
    return Cut(bytes > kMaxFrameBytes ? TooLong(bytes)
                                      : "a frame that protocol version 1 does not know");
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
class ClientCall final : public grpc::ClientBidiReactor<v1::AgentFrame, v1::CoordinatorFrame> {
 public:
  ClientCall(const std::shared_ptr<grpc::Channel>& channel, FrameStream::Ears ears)
      : stub_(v1::Control::NewStub(channel)), ears_(std::move(ears)) {}

  void Begin(std::shared_ptr<ClientCall> self) {
    Lock lock(mutex_);
    self_ = std::move(self);
    stub_->async()->Attach(&context_, this);
    AddHold();  // Send starts writes from anywhere, until the reads end
    StartRead(&in_);
    StartCall();
  }
  void Send(v1::AgentFrame proto) {
    const size_t bytes = proto.ByteSizeLong();
    Lock lock(mutex_);
    if (ended_ || half_closed_) return;
    const bool idle = out_.empty();
    if (bytes > kMaxFrameBytes || !out_.Push(std::move(proto), bytes)) {
      if (why_.empty())
        why_ = bytes > kMaxFrameBytes ? TooLong(bytes) : "it does not read what it is sent";
      context_.TryCancel();
      return;
    }
    if (idle) StartWrite(&out_.front());
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
    const size_t bytes = in_.ByteSizeLong();
    std::optional<CoordinatorFrame> frame = bytes <= kMaxFrameBytes ? FromProto(in_) : std::nullopt;
    if (frame) {
      Lock ear(ear_mutex_);
      if (ears_.on_frame) ears_.on_frame(*std::move(frame), bytes);
    }
    Lock lock(mutex_);
    if (!frame) {
      why_ =
          bytes > kMaxFrameBytes ? TooLong(bytes) : "a frame that protocol version 1 does not know";
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
      StartWrite(&out_.front());
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
  std::unique_ptr<v1::Control::Stub> stub_;
  grpc::ClientContext context_;
  v1::CoordinatorFrame in_;
  std::mutex ear_mutex_;  // before mutex_
  FrameStream::Ears ears_;
  std::mutex mutex_;
  std::shared_ptr<ClientCall> self_;
  Outbox<v1::AgentFrame> out_;
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
  void Send(const AgentFrame& frame) override {
    v1::AgentFrame proto;
    ToProto(frame, proto);
    call_->Send(std::move(proto));
  }
  void Finish() override { call_->HalfClose(); }

 private:
  std::shared_ptr<ClientCall> call_;
};

// --- Both ---

// A call that cannot go anywhere, whose channel holds the queue that all callbacks of the process
// come from. gRPC 1.51 ends that queue and joins its threads where the last channel goes away; that
// is one of these threads when a call lets go of its channel in OnDone, and the process aborts.
class QueueHolder final : public grpc::ClientBidiReactor<v1::AgentFrame, v1::CoordinatorFrame> {
 public:
  QueueHolder()
      : channel_(grpc::CreateChannel("", nullptr)), stub_(v1::Control::NewStub(channel_)) {
    Lock lock(mutex_);
    stub_->async()->Attach(&context_, this);
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
  std::unique_ptr<v1::Control::Stub> stub_;
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
