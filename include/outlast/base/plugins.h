// A registry of plug-ins: implementations of an interface by the scheme of a URI. What is in it,
// somebody put there by a call (absl::Status RegisterS3(Plugins&)); nothing registers itself.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <typeindex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace outlast {

class Plugins;

// What `uri` says before "://"; empty for a plain path. "slow+file:///a": "slow+file".
std::string_view SchemeOf(std::string_view uri);

// Makers of one interface by scheme. Filled at start, by one thread; then read by any.
template <typename Interface>
class PluginsOf {
 public:
  // Gets the URI as it was given, and the registry, so that a maker for "slow" can make what
  // follows the '+' ("slow+file:///a").
  using Maker = std::function<absl::StatusOr<std::unique_ptr<Interface>>(const std::string& uri,
                                                                         const Plugins& plugins)>;

  // kAlreadyExists: the scheme is taken.
  absl::Status Add(std::string scheme, Maker maker);
  // By the scheme's part before the first '+'. kInvalidArgument: no such scheme; those that are
  // known are named.
  absl::StatusOr<std::unique_ptr<Interface>> Make(const std::string& uri,
                                                  const Plugins& plugins) const;

 private:
  std::map<std::string, Maker, std::less<>> makers_;
};

class Plugins {
 public:
  template <typename Interface>
  PluginsOf<Interface>& Of() {
    std::shared_ptr<void>& found = by_type_[std::type_index(typeid(Interface))];
    if (found == nullptr) found = std::make_shared<PluginsOf<Interface>>();
    return *static_cast<PluginsOf<Interface>*>(found.get());
  }
  // What `uri` names, by the scheme's maker.
  template <typename Interface>
  absl::StatusOr<std::unique_ptr<Interface>> Make(const std::string& uri) const {
    const auto found = by_type_.find(std::type_index(typeid(Interface)));
    static const PluginsOf<Interface> kNone;
    const auto* makers = found == by_type_.end()
                             ? &kNone
                             : static_cast<const PluginsOf<Interface>*>(found->second.get());
    return makers->Make(uri, *this);
  }

 private:
  std::map<std::type_index, std::shared_ptr<void>> by_type_;
};

namespace internal {
absl::Status SchemeTaken(std::string_view scheme);
absl::Status NoSuchScheme(std::string_view uri, const std::vector<std::string>& known);
}  // namespace internal

template <typename Interface>
absl::Status PluginsOf<Interface>::Add(std::string scheme, Maker maker) {
  const auto [at, is_new] = makers_.emplace(std::move(scheme), std::move(maker));
  return is_new ? absl::OkStatus() : internal::SchemeTaken(at->first);
}

template <typename Interface>
absl::StatusOr<std::unique_ptr<Interface>> PluginsOf<Interface>::Make(
    const std::string& uri, const Plugins& plugins) const {
  const std::string_view scheme = SchemeOf(uri);
  const auto found = makers_.find(scheme.substr(0, scheme.find('+')));
  if (found != makers_.end()) return found->second(uri, plugins);
  std::vector<std::string> known;
  for (const auto& [name, maker] : makers_) known.push_back(name);
  return internal::NoSuchScheme(uri, known);
}

}  // namespace outlast
