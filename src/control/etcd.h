// What the coordinators of a job need of etcd v3: keys with their revisions, transactions, leases;
// over TLS and as a user of etcd where they are given.
// The client behind it speaks gRPC and lives in the module of the streams (load_transport.h), from
// src/adapters/etcd; nothing of gRPC is seen here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "control/transport.h"

namespace outlast::control {

// Where etcd is, and as whom it is asked.
struct EtcdServers {
  std::vector<std::string> endpoints;  // each HOST:PORT
  // TLS; `certificates.ca` then tells whose certificate the servers must show, for the host of
  // their endpoint, and the others are shown to them.
  bool uses_tls = false;
  Certificates certificates;
  std::string user, password;  // empty: nobody's
};

struct EtcdKey {
  std::string key, value;
  int64_t create_revision = 0;  // the store's, when the key was made; never the same twice
};

// All of it happens, or nothing.
struct EtcdTransaction {
  // Each key must have been made at that revision; 0: it must not be there.
  struct Guard {
    std::string key;
    int64_t create_revision = 0;
  };
  struct Put {
    std::string key, value;
    int64_t lease = 0;  // the key goes with it; 0: it stays
  };
  std::vector<Guard> guards;
  std::vector<Put> puts;
  struct Range {
    std::string first, end;  // without `end`
  };
  std::vector<std::string> deletes;         // keys
  std::vector<std::string> delete_folders;  // all keys that begin so; no key of `puts` may
  std::vector<Range> delete_ranges;         // no key of `puts` is in them
  std::vector<std::string> else_read;       // keys that are read where a guard fails
};

struct EtcdReply {
  enum class Outcome : uint8_t {
    kDone,
    kUnreached,  // it did not answer, or not now: the call may have been done all the same
    kRefused,    // it does not take such a call: not etcd v3, no right to, too large
  };
  Outcome outcome = Outcome::kUnreached;
  std::string why;  // where it is not kDone

  int64_t revision = 0;      // of the store, after the call
  bool guards_held = false;  // of a transaction; where they did not, nothing was changed
  std::vector<EtcdKey> keys;
  bool more = false;        // of a folder: there are more than were asked for
  int64_t lease = 0;        // that was granted
  int64_t ttl_seconds = 0;  // of a lease; 0: it has run out

  bool done() const { return outcome == Outcome::kDone; }
};

// Safe for concurrent use. Each call waits for the answer of the first server that gives one, and
// no longer than about two seconds for all of them.
class EtcdClient {
 public:
  virtual ~EtcdClient() = default;
  // The keys that begin with `folder`, in their order, those before `from` left out.
  virtual EtcdReply Read(const std::string& folder, const std::string& from, int64_t most) = 0;
  virtual EtcdReply Commit(const EtcdTransaction& transaction) = 0;
  virtual EtcdReply Grant(int64_t ttl_seconds) = 0;
  virtual EtcdReply KeepAlive(int64_t lease) = 0;
  virtual EtcdReply Revoke(int64_t lease) = 0;
};

// Another entry of the module: a client of `servers`; null when `abi` is not its own. The caller
// owns it.
inline constexpr char kEtcdEntry[] = "OutlastEtcdClient";
using EtcdEntry = EtcdClient* (*)(uint64_t abi, const EtcdServers& servers);
inline constexpr uint64_t kEtcdAbi = 2'000'000'000 + sizeof(EtcdServers) * 1'000'000 +
                                     sizeof(EtcdReply) * 1'000 + sizeof(EtcdTransaction);

}  // namespace outlast::control
