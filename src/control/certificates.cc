#include "control/certificates.h"

#include <cerrno>
#include <fstream>
#include <sstream>

#include "base/error.h"

namespace outlast {
namespace {

constexpr size_t kMostPemBytes = 1 << 20;

absl::StatusOr<std::string> ReadPem(const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path, std::ios::binary);
  if (!file) return ErrnoStatus(errno, path);
  std::string text(kMostPemBytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.find("-----BEGIN ") == std::string::npos)
    return Error(absl::StatusCode::kInvalidArgument, "{}: it is no PEM file", path);
  return text;
}

}  // namespace

absl::StatusOr<control::Certificates> ReadCertificates(const std::string& ca,
                                                       const std::string& certificate,
                                                       const std::string& key) {
  if (certificate.empty() != key.empty()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "certificate '{}' and key '{}': both or none are wanted", certificate, key);
  }
  control::Certificates read;
  OUTLAST_ASSIGN_OR_RETURN(read.ca, ReadPem(ca));
  OUTLAST_ASSIGN_OR_RETURN(read.certificate, ReadPem(certificate));
  OUTLAST_ASSIGN_OR_RETURN(read.key, ReadPem(key));
  return read;
}

}  // namespace outlast
