// Certificates from files.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "control/transport.h"

namespace outlast {

// Reads PEM files; an empty name: none. kInvalidArgument: a certificate without its key, or a key
// without its certificate, or one that is not PEM; else the file system's. Names the files.
absl::StatusOr<control::Certificates> ReadCertificates(const std::string& ca,
                                                       const std::string& certificate,
                                                       const std::string& key);

}  // namespace outlast
