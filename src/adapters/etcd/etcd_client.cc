// Blocking calls to etcd's gRPC servers, one after another until one answers.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "control/etcd.h"
#include "etcd.grpc.pb.h"

namespace outlast::control {
namespace {

namespace pb = etcdserverpb;
using std::chrono::milliseconds;
using Outcome = EtcdReply::Outcome;

constexpr milliseconds kAll(2000);   // for all servers together
constexpr milliseconds kLeast(300);  // for one, however many there are

// The first key behind all that begin with `folder`, which ends with '/'.
std::string EndOf(std::string folder) {
  folder.back() = static_cast<char>(folder.back() + 1);
  return folder;
}

Outcome OutcomeOf(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return Outcome::kDone;
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::UNIMPLEMENTED:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::OUT_OF_RANGE:
      return Outcome::kRefused;
    default:
      return Outcome::kUnreached;
  }
}

void Take(const pb::RangeResponse& from, EtcdReply& reply) {
  for (const pb::KeyValue& kv : from.kvs())
    reply.keys.push_back({kv.key(), kv.value(), kv.create_revision()});
  reply.more = from.more();
}

std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const EtcdServers& servers) {
  if (!servers.uses_tls) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = servers.certificates.ca;
  options.pem_private_key = servers.certificates.key;
  options.pem_cert_chain = servers.certificates.certificate;
  return grpc::SslCredentials(options);
}

// The token is not good, or not any more: it ran out, the server was started again, or a right was
// changed. Asking for another one helps.
bool WantsNewToken(const grpc::Status& status) {
  const std::string& text = status.error_message();
  return text.find("invalid auth token") != std::string::npos ||
         text.find("revision of auth store is old") != std::string::npos;
}

class Server {
 public:
  Server(std::string endpoint, std::shared_ptr<grpc::ChannelCredentials> credentials)
      : endpoint_(std::move(endpoint)), credentials_(std::move(credentials)) {}

  const std::string& endpoint() const { return endpoint_; }
  std::shared_ptr<grpc::Channel> channel() {
    const std::lock_guard lock(mutex_);
    if (channel_ == nullptr) {
      grpc::ChannelArguments arguments;
      arguments.SetMaxReceiveMessageSize(-1);
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
      // A server that was started again is found again at once.
      arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
      arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
      arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
      channel_ = grpc::CreateCustomChannel(endpoint_, credentials_, arguments);
    }
    return channel_;
  }
  // A connection that leads nowhere any more is not waited for twice.
  void Forget(const std::shared_ptr<grpc::Channel>& channel) {
    const std::lock_guard lock(mutex_);
    if (channel_ == channel) channel_.reset();
  }

 private:
  const std::string endpoint_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  std::mutex mutex_;
  std::shared_ptr<grpc::Channel> channel_;
};

class GrpcEtcdClient final : public EtcdClient {
 public:
  explicit GrpcEtcdClient(const EtcdServers& servers)
      : user_(servers.user), password_(servers.password) {
    const auto credentials = CredentialsOf(servers);
    for (const std::string& endpoint : servers.endpoints)
      servers_.push_back(std::make_unique<Server>(endpoint, credentials));
  }

  EtcdReply Read(const std::string& folder, const std::string& from, int64_t most) override {
    pb::RangeRequest request;
    request.set_key(std::max(folder, from));
    request.set_range_end(EndOf(folder));
    request.set_limit(most);
    return Call([&](Try& at, EtcdReply& reply) {
      pb::RangeResponse response;
      auto status = pb::KV::NewStub(at.channel)->Range(&at.context, request, &response);
      reply.revision = response.header().revision();
      Take(response, reply);
      return status;
    });
  }

  EtcdReply Commit(const EtcdTransaction& transaction) override {
    const pb::TxnRequest request = RequestOf(transaction);
    return Call([&](Try& at, EtcdReply& reply) {
      pb::TxnResponse response;
      auto status = pb::KV::NewStub(at.channel)->Txn(&at.context, request, &response);
      reply.revision = response.header().revision();
      reply.guards_held = response.succeeded();
      for (const pb::ResponseOp& one : response.responses()) {
        if (one.has_response_range()) Take(one.response_range(), reply);
      }
      return status;
    });
  }

  EtcdReply Grant(int64_t ttl_seconds) override {
    pb::LeaseGrantRequest request;
    request.set_ttl(ttl_seconds);
    return Call([&](Try& at, EtcdReply& reply) {
      pb::LeaseGrantResponse response;
      auto status = pb::Lease::NewStub(at.channel)->LeaseGrant(&at.context, request, &response);
      reply.lease = response.id();
      reply.ttl_seconds = response.ttl();
      return status;
    });
  }

  // A stream of one request: etcd has no other way.
  EtcdReply KeepAlive(int64_t lease) override {
    pb::LeaseKeepAliveRequest request;
    request.set_id(lease);
    return Call([&](Try& at, EtcdReply& reply) {
      const auto stub = pb::Lease::NewStub(at.channel);
      const auto stream = stub->LeaseKeepAlive(&at.context);
      pb::LeaseKeepAliveResponse response;
      const bool answered = stream->Write(request) && stream->Read(&response);
      if (answered) {
        reply.ttl_seconds = response.ttl();
        at.context.TryCancel();  // its end says nothing
      }
      grpc::Status status = stream->Finish();
      if (answered) return grpc::Status::OK;
      if (!status.ok()) return status;
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "no answer to a sign of life");
    });
  }

  EtcdReply Revoke(int64_t lease) override {
    pb::LeaseRevokeRequest request;
    request.set_id(lease);
    return Call([&](Try& at, EtcdReply&) {
      pb::LeaseRevokeResponse response;
      return pb::Lease::NewStub(at.channel)->LeaseRevoke(&at.context, request, &response);
    });
  }

 private:
  struct Try {
    std::shared_ptr<grpc::Channel> channel;
    grpc::ClientContext context;
  };
  using Body = std::function<grpc::Status(Try& at, EtcdReply& reply)>;
  using Deadline = std::chrono::system_clock::time_point;

  // The server that answered last comes first.
  EtcdReply Call(const Body& body) {
    const auto until = std::chrono::system_clock::now() + kAll;
    const size_t first = First();
    std::string tried;
    for (size_t i = 0; i < servers_.size(); ++i) {
      const size_t index = (first + i) % servers_.size();
      Server& server = *servers_[index];
      const auto channel = server.channel();
      const auto now = std::chrono::system_clock::now();
      const auto left = std::chrono::duration_cast<milliseconds>(until - now);
      const auto deadline =
          now + std::max<milliseconds>(kLeast, left / static_cast<int>(servers_.size() - i));
      EtcdReply reply;
      const grpc::Status status = CallAsUser(channel, deadline, body, reply);
      reply.outcome = OutcomeOf(status);
      if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) server.Forget(channel);
      if (reply.outcome != Outcome::kUnreached) {
        SetFirst(index);
        if (!reply.done()) reply.why = Words(server, status) + AsWhom();
        return reply;
      }
      tried += (tried.empty() ? "" : "; ") + Words(server, status);
    }
    return {.outcome = Outcome::kUnreached, .why = tried};
  }

  // A call without a user, or with the token that etcd gave for its password; with a new one where
  // that is not taken any more. A token holds for all servers.
  grpc::Status CallAsUser(const std::shared_ptr<grpc::Channel>& channel, Deadline deadline,
                          const Body& body, EtcdReply& reply) {
    grpc::Status status;
    for (const bool is_first : {true, false}) {
      Try at{.channel = channel, .context = {}};
      at.context.set_deadline(deadline);
      std::string token;
      if (!user_.empty()) {
        status = TokenFor(channel, deadline, token);
        if (!status.ok()) return status;
      }
      if (!token.empty()) at.context.AddMetadata("token", token);
      reply = {};
      status = body(at, reply);
      if (!is_first || user_.empty() || !WantsNewToken(status)) return status;
      const std::lock_guard lock(mutex_);
      if (token_ == token) token_.clear();
    }
    return status;
  }

  // Empty: etcd wants none.
  grpc::Status TokenFor(const std::shared_ptr<grpc::Channel>& channel, Deadline deadline,
                        std::string& token) {
    {
      const std::lock_guard lock(mutex_);
      token = token_;
    }
    if (!token.empty()) return grpc::Status::OK;
    grpc::ClientContext context;
    context.set_deadline(deadline);
    pb::AuthenticateRequest request;
    request.set_name(user_);
    request.set_password(password_);
    pb::AuthenticateResponse response;
    grpc::Status status = pb::Auth::NewStub(channel)->Authenticate(&context, request, &response);
    if (status.error_message().find("authentication is not enabled") != std::string::npos)
      return grpc::Status::OK;
    token = response.token();
    const std::lock_guard lock(mutex_);
    token_ = token;
    return status;
  }

  std::string AsWhom() const { return user_.empty() ? "" : " (as user '" + user_ + "')"; }

  static std::string Words(const Server& server, const grpc::Status& status) {
    std::string text = status.error_message();
    constexpr char kCause[] = "Failed to connect to remote host: ";
    const size_t at = text.rfind(kCause);
    if (at != std::string::npos) text.erase(0, at + sizeof(kCause) - 1);
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) text = "no answer in time";
    return server.endpoint() + ": " + text;
  }

  static pb::TxnRequest RequestOf(const EtcdTransaction& transaction) {
    pb::TxnRequest request;
    for (const EtcdTransaction::Guard& guard : transaction.guards) {
      pb::Compare& compare = *request.add_compare();
      compare.set_target(pb::Compare::CREATE);
      compare.set_result(pb::Compare::EQUAL);
      compare.set_key(guard.key);
      compare.set_create_revision(guard.create_revision);
    }
    for (const std::string& key : transaction.deletes)
      request.add_success()->mutable_request_delete_range()->set_key(key);
    for (const std::string& folder : transaction.delete_folders) {
      pb::DeleteRangeRequest& range = *request.add_success()->mutable_request_delete_range();
      range.set_key(folder);
      range.set_range_end(EndOf(folder));
    }
    for (const EtcdTransaction::Range& keys : transaction.delete_ranges) {
      pb::DeleteRangeRequest& range = *request.add_success()->mutable_request_delete_range();
      range.set_key(keys.first);
      range.set_range_end(keys.end);
    }
    for (const EtcdTransaction::Put& put : transaction.puts) {
      pb::PutRequest& to = *request.add_success()->mutable_request_put();
      to.set_key(put.key);
      to.set_value(put.value);
      to.set_lease(put.lease);
    }
    for (const std::string& key : transaction.else_read)
      request.add_failure()->mutable_request_range()->set_key(key);
    return request;
  }

  size_t First() {
    const std::lock_guard lock(mutex_);
    return first_;
  }
  void SetFirst(size_t index) {
    const std::lock_guard lock(mutex_);
    first_ = index;
  }

  const std::string user_, password_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::mutex mutex_;
  size_t first_ = 0;
  std::string token_;
};

}  // namespace
}  // namespace outlast::control

extern "C" __attribute__((visibility("default"))) outlast::control::EtcdClient* OutlastEtcdClient(
    uint64_t abi, const outlast::control::EtcdServers& servers) {
  if (abi != outlast::control::kEtcdAbi) return nullptr;
  return new outlast::control::GrpcEtcdClient(servers);
}
