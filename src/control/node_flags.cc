#include "control/node_flags.h"

#include <CLI/CLI.hpp>
#include <climits>
#include <sstream>

#include "base/error.h"
#include "base/flag_values.h"
#include "control/certificates.h"

namespace outlast {
namespace {

absl::StatusOr<JobToken> ReadToken(const TrustFlags& flags) {
  if (!flags.token_file.empty() && !flags.token_fd.empty()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--token-file {} and --token-fd {}: one of them wanted", flags.token_file,
                 flags.token_fd);
  }
  if (!flags.token_file.empty()) return JobToken::Read(flags.token_file);
  if (flags.token_fd.empty()) return JobToken();
  int fd = 0;
  OUTLAST_RETURN_IF_ERROR(ReadInteger("--token-fd", flags.token_fd, 0, INT_MAX, fd));
  return JobToken::ReadFrom(fd);
}

}  // namespace

absl::StatusOr<NodeCount> ParseNodeCount(const std::string& text) {
  std::istringstream in(text);
  NodeCount count;
  char colon = ':';
  in >> count.min;
  count.max = count.min;
  if (in && !in.eof()) in >> colon >> count.max;
  if (!in || !in.eof() || colon != ':' || count.min < 1 || count.max < count.min ||
      count.max > (1 << 16)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--nnodes '{}': N or MIN:MAX is wanted, such as 4 or 2:4", text);
  }
  return count;
}

absl::Status ReadPeerRate(const std::string& text, PeerRate& rate) {
  if (text.empty() || text.back() != '%')
    return ReadInteger("--preflight-peer-rate", text, 0, 1'000'000, rate.floor);
  const std::string number = text.substr(0, text.size() - 1);
  int percent = 0;
  if (number.empty() || !ReadInteger("--preflight-peer-rate", number, 1, 99, percent).ok())
    return RefuseValue("--preflight-peer-rate", text, "MB/s, or 1% to 99%");
  rate.share = percent / 100.0;
  return absl::OkStatus();
}

absl::Status CheckWaits(const std::string& last_call_text, absl::Duration last_call,
                        const std::string& join_text, absl::Duration join) {
  if (join >= last_call) return absl::OkStatus();
  const auto shown = [](std::string_view flag, const std::string& text, absl::Duration value) {
    return text.empty() ? fmt::format("{} ({:g} by default)", flag, absl::ToDoubleSeconds(value))
                        : fmt::format("{} '{}'", flag, text);
  };
  return Error(
      absl::StatusCode::kInvalidArgument, "{} is shorter than {}: as long or longer wanted",
      shown("--join-timeout", join_text, join), shown("--last-call", last_call_text, last_call));
}

MembershipOptions MembershipOf(const JobOptions& job, int slots, const NodeCount& nodes) {
  return {.min_world = nodes.min * slots,
          .max_world = nodes.max * slots,
          .unit = job.ranks_per_replica,
          .global_micro_batches = job.micro_batches};
}

void BatchFlags::Declare(CLI::App& app) {
  app.add_option("--micro-batches", micro_batches,
                 "Micro-batches of a step over all ranks: only worlds that split them evenly are "
                 "formed, so that the global batch stays (not said)")
      ->type_name("N");
  app.add_option("--ranks-per-replica", ranks_per_replica,
                 "Ranks that hold one replica of the model between them: worlds are whole replicas "
                 "(1)")
      ->type_name("N");
}

absl::Status BatchFlags::Read(JobOptions& job) const {
  OUTLAST_RETURN_IF_ERROR(
      ReadInteger("--micro-batches", micro_batches, 1, INT_MAX, job.micro_batches));
  return ReadInteger("--ranks-per-replica", ranks_per_replica, 1, 1 << 20, job.ranks_per_replica);
}

Terms JobTerms(const JobOptions& job, int slots, const NodeCount& nodes, int spares) {
  const auto number = [](std::string flag, int value) {
    return MakeTerm(std::move(flag), fmt::format("{}", value));
  };
  const auto codes = [](std::string flag, const std::vector<int>& values, const char* of_none) {
    const std::string text = fmt::format("{}", fmt::join(values, ","));
    return MakeTerm(std::move(flag), text.empty() ? of_none : text);
  };
  const std::string count = nodes.min == nodes.max ? fmt::format("{}", nodes.max)
                                                   : fmt::format("{}:{}", nodes.min, nodes.max);
  return {number("-n", slots),
          MakeTerm("--nnodes", count),
          number("--spares", spares),
          number("--max-restarts", job.max_restarts),
          codes("--no-retry", job.no_retry_codes, "no code"),
          codes("--retry", job.retry_codes, "all codes"),
          number("--preempt-exit", job.preempt_exit),
          number("--micro-batches", job.micro_batches),
          number("--ranks-per-replica", job.ranks_per_replica),
          MakeTerm("--early-exit-grace",
                   fmt::format("{:g}", absl::ToDoubleSeconds(job.early_exit_grace)))};
}

void TrustFlags::Declare(CLI::App& app) {
  app.add_option("--token-file", token_file, "Holds the job token, 64 hex digits")
      ->type_name("FILE");
  app.add_option("--token-fd", token_fd, "The same, by a descriptor that is inherited")
      ->type_name("FD");
  app.add_flag("--allow-strangers", allow_strangers, "Listen beyond this machine without a token");
  app.add_option("--tls-ca", ca, "Whom the others' certificates must be from")->type_name("FILE");
  app.add_option("--tls-cert", certificate, "Own certificate")->type_name("FILE");
  app.add_option("--tls-key", key, "Its key")->type_name("FILE");
}

const char* TrustFlags::given() const {
  if (!token_file.empty()) return "--token-file";
  if (!token_fd.empty()) return "--token-fd";
  if (!ca.empty()) return "--tls-ca";
  if (!certificate.empty()) return "--tls-cert";
  if (!key.empty()) return "--tls-key";
  return allow_strangers ? "--allow-strangers" : nullptr;
}

absl::StatusOr<Trust> ReadTrust(const TrustFlags& flags) {
  Trust trust{.allow_strangers = flags.allow_strangers};
  OUTLAST_ASSIGN_OR_RETURN(trust.token, ReadToken(flags));
  OUTLAST_ASSIGN_OR_RETURN(trust.certificates,
                           ReadCertificates(flags.ca, flags.certificate, flags.key));
  return trust;
}

}  // namespace outlast
