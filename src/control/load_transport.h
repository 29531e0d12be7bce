// Finds the module that speaks gRPC.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "control/etcd.h"
#include "control/transport.h"

namespace outlast::control {

// The process's transport; its module is loaded at the first call and stays. After the guardian was
// forked, and with signals blocked that the process takes by descriptor: the module has threads.
// It is looked for beside the program, one folder above, and in lib folders beside the program's.
// kNotFound: where it was looked for. kFailedPrecondition: it is of another build, or does not
// load.
absl::StatusOr<Transport*> LoadTransport();
// Whether a module is there; nothing is loaded.
bool HasTransport();
// A client of etcd, from the same module; nothing is sent yet. Errors as above.
absl::StatusOr<std::shared_ptr<EtcdClient>> LoadEtcd(const EtcdServers& servers);

}  // namespace outlast::control
