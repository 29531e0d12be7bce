#include "control/load_transport.h"

#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "base/error.h"

#ifndef OUTLAST_LIBDIR
#define OUTLAST_LIBDIR "lib"
#endif

namespace outlast::control {
namespace {

constexpr char kModule[] = "liboutlast-grpc.so";

std::vector<std::filesystem::path> Places() {
  std::error_code ignored;
  const std::filesystem::path folder =
      std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path();
  const std::filesystem::path above = folder.parent_path();
  return {folder / kModule, above / kModule, above / OUTLAST_LIBDIR / kModule,
          above / "lib" / kModule};
}

absl::Status Refuse(const std::filesystem::path& file, std::string_view why) {
  return Error(absl::StatusCode::kFailedPrecondition, "{}: {}", file.string(), why);
}

struct Module {
  std::filesystem::path file;
  void* handle = nullptr;

  absl::Status OfAnotherBuild() const {
    return Refuse(file, "it belongs to another build of outlast");
  }
};

absl::StatusOr<Module> Load(const std::filesystem::path& file) {
  void* const module = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (module == nullptr) return Refuse(file, dlerror());
  return Module{file, module};
}

absl::StatusOr<Module> Find() {
  std::string looked_for;
  for (const std::filesystem::path& file : Places()) {
    std::error_code ignored;
    if (std::filesystem::exists(file, ignored)) return Load(file);
    if (looked_for.find(file.string()) == std::string::npos)
      looked_for += (looked_for.empty() ? "" : ", ") + file.string();
  }
  return Error(absl::StatusCode::kNotFound,
               "several nodes need {}, which is not there (it is built where gRPC is installed: "
               "libgrpc++-dev, protobuf-compiler-grpc); looked for {}",
               kModule, looked_for);
}

}  // namespace

bool HasTransport() {
  std::error_code ignored;
  for (const std::filesystem::path& file : Places()) {
    if (std::filesystem::exists(file, ignored)) return true;
  }
  return false;
}

absl::StatusOr<Transport*> LoadTransport() {
  OUTLAST_ASSIGN_OR_RETURN(const Module module, Find());
  const auto entry = reinterpret_cast<TransportEntry>(dlsym(module.handle, kTransportEntry));
  Transport* const transport = entry != nullptr ? entry(kTransportAbi) : nullptr;
  if (transport == nullptr) return module.OfAnotherBuild();
  return transport;
}

absl::StatusOr<std::shared_ptr<EtcdClient>> LoadEtcd(const EtcdServers& servers) {
  OUTLAST_ASSIGN_OR_RETURN(const Module module, Find());
  // The transport quiets gRPC's log and holds its queue, for the life of the process.
  OUTLAST_RETURN_IF_ERROR(LoadTransport().status());
  const auto entry = reinterpret_cast<EtcdEntry>(dlsym(module.handle, kEtcdEntry));
  std::shared_ptr<EtcdClient> client(entry != nullptr ? entry(kEtcdAbi, servers) : nullptr);
  if (client == nullptr) return module.OfAnotherBuild();
  return client;
}

}  // namespace outlast::control
