#include "outlast/base/id.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "outlast/base/digest.h"
#include "outlast/base/fd.h"

namespace outlast {
namespace {

int HexValue(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  return -1;
}

void FillRandom(void* target, size_t bytes) {
  // Never short for up to 256 bytes once the kernel's pool is ready; EINTR only before that.
  while (getrandom(target, bytes, 0) != static_cast<ssize_t>(bytes)) {
  }
}

}  // namespace

Id128 Id128::Random() {
  Id128 id;
  FillRandom(id.bytes.data(), id.bytes.size());
  return id;
}

Id128 Id128::FromName(std::string_view name) {
  const Sha256Digest digest = Sha256(name);
  Id128 id;
  std::copy_n(digest.begin(), id.bytes.size(), id.bytes.begin());
  return id;
}

absl::StatusOr<Id128> Id128::FromHex(std::string_view hex) {
  Id128 id;
  bool valid = hex.size() == 2 * id.bytes.size();
  for (size_t i = 0; valid && i < id.bytes.size(); ++i) {
    const int high = HexValue(hex[2 * i]);
    const int low = HexValue(hex[2 * i + 1]);
    valid = high >= 0 && low >= 0;
    if (valid) id.bytes[i] = static_cast<std::byte>(high * 16 + low);
  }
  if (!valid)
    return Error(absl::StatusCode::kInvalidArgument, "id '{}': 32 lower-case hex digits wanted",
                 hex.substr(0, 64));
  return id;
}

std::string Id128::hex() const { return ToHex(bytes); }

namespace {

Id128 ReadBootId() {
  const UniqueFd file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  char text[37] = {};
  if (!file.is_open() || read(file.get(), text, 36) != 36) return {};
  std::string hex;
  std::copy_if(text, text + 36, std::back_inserter(hex), [](char c) { return c != '-'; });
  return Id128::FromHex(hex).value_or(Id128{});
}

}  // namespace

// Read once: each snapshot that is looked at is asked for its boot.
Id128 BootId() {
  static const Id128 id = ReadBootId();
  return id;
}

uint64_t RandomU64() {
  uint64_t value;
  FillRandom(&value, sizeof value);
  return value;
}

}  // namespace outlast
