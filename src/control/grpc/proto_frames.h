// Frames as protobuf messages, and back.
#pragma once

#include <optional>

#include "control/transport.h"

namespace outlast::control {
namespace v1 {
class AgentFrame;
class CoordinatorFrame;
}  // namespace v1

void ToProto(const AgentFrame& frame, v1::AgentFrame& proto);
void ToProto(const CoordinatorFrame& frame, v1::CoordinatorFrame& proto);
// Nothing: a case, an enumerator or a size that this version does not know.
std::optional<AgentFrame> FromProto(const v1::AgentFrame& proto);
std::optional<CoordinatorFrame> FromProto(const v1::CoordinatorFrame& proto);

}  // namespace outlast::control
