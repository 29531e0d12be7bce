#include "watch/evidence.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "outlast/base/fd.h"

namespace outlast {
namespace {

using nlohmann::json;

absl::Status MakeFolder(const std::string& path) {
  if (mkdir(path.c_str(), 0755) == 0 || errno == EEXIST) return absl::OkStatus();
  return ErrnoStatus(errno, path);
}

absl::StatusOr<UniqueFd> NewFile(const std::string& path) {
  UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!file.is_open()) return ErrnoStatus(errno, path);
  return file;
}

absl::Status CopyRange(int from, int to, off_t begin, off_t end, const std::string& path) {
  std::vector<std::byte> block(256 << 10);
  while (begin < end) {
    const size_t wanted = std::min<size_t>(block.size(), static_cast<size_t>(end - begin));
    const ssize_t got = pread(from, block.data(), wanted, begin);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return ErrnoStatus(got == 0 ? EIO : errno, path);
    const ssize_t put = pwrite(to, block.data(), static_cast<size_t>(got), begin);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return ErrnoStatus(put == 0 ? EIO : errno, path);
    begin += put;
  }
  return absl::OkStatus();
}

json CulpritJson(const Culprit& culprit) {
  return {{"rank", culprit.rank},
          {"slot", culprit.slot},
          {"node", culprit.node},
          {"section", culprit.section},
          {"step", culprit.step},
          {"phase", std::string(PhaseName(culprit.phase))},
          {"age_s", absl::ToDoubleSeconds(culprit.age)}};
}

}  // namespace

std::string VerdictJson(const Verdict& verdict, std::span<const int> stacks, absl::Duration took) {
  json culprits = json::array();
  for (const Culprit& culprit : verdict.culprits) culprits.push_back(CulpritJson(culprit));
  const std::string name(VerdictClassName(verdict.verdict_class));
  json comm = nullptr;
  if (verdict.comm.id_hash != 0)
    comm = {{"name", verdict.comm.name}, {"seq", verdict.comm.seq}, {"op", verdict.comm.op}};
  json first_divergent = nullptr;
  if (verdict.first_divergent_seq != 0) first_divergent = verdict.first_divergent_seq;
  const json object = {{"schema", 1},
                       {"generation", verdict.generation},
                       {"class", name},
                       {"confidence", std::string(ConfidenceName(verdict.confidence))},
                       {"ambiguous", verdict.ambiguous},
                       {"kind", verdict.kind},
                       {"culprits", std::move(culprits)},
                       {"waiting", verdict.waiting},
                       {"comm", std::move(comm)},
                       {"first_divergent_seq", std::move(first_divergent)},
                       {"cycle", verdict.cycle},
                       {"evidence", verdict.evidence},
                       {"reason", verdict.reason},
                       {"stacks", std::vector<int>(stacks.begin(), stacks.end())},
                       {"runbook", "watch/" + name},
                       {"took_ms", absl::ToDoubleMilliseconds(took)}};
  // Names come out of shared memory: bytes that are no UTF-8 are replaced, not refused.
  return object.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

absl::Status CopyBox(int fd, const std::string& path) {
  struct stat info {};
  if (fstat(fd, &info) != 0) return ErrnoStatus(errno, path);
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd file, NewFile(path));
  if (ftruncate(file.get(), info.st_size) != 0) return ErrnoStatus(errno, path);
  for (off_t at = 0; at < info.st_size;) {
    const off_t data = lseek(fd, at, SEEK_DATA);
    if (data < 0 && errno == ENXIO) break;  // only a hole is left
    if (data < 0) return ErrnoStatus(errno, path);
    const off_t hole = lseek(fd, data, SEEK_HOLE);
    if (hole < 0) return ErrnoStatus(errno, path);
    OUTLAST_RETURN_IF_ERROR(CopyRange(fd, file.get(), data, hole, path));
    at = hole;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> WriteEvidence(const std::string& run_dir, int number,
                                          const Verdict& verdict, std::span<const BoxOfRank> boxes,
                                          std::span<const int> stacks, absl::Duration took) {
  OUTLAST_RETURN_IF_ERROR(MakeFolder(run_dir + "/boxes"));
  const std::string folder = fmt::format("{}/boxes/g{}-{}-{}", run_dir, verdict.generation, number,
                                         VerdictClassName(verdict.verdict_class));
  OUTLAST_RETURN_IF_ERROR(MakeFolder(folder));
  // The verdict first: a full disk takes the boxes, not the finding.
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd file, NewFile(folder + "/verdict.json"));
  const std::string text = VerdictJson(verdict, stacks, took);
  OUTLAST_RETURN_IF_ERROR(WriteAll(file.get(), std::as_bytes(std::span(text))));
  absl::Status first_error;
  for (const BoxOfRank& box : boxes) {
    const absl::Status copied = CopyBox(box.fd, fmt::format("{}/rank{}.box", folder, box.rank));
    if (!copied.ok() && first_error.ok()) first_error = copied;
  }
  OUTLAST_RETURN_IF_ERROR(first_error);
  return folder;
}

}  // namespace outlast
