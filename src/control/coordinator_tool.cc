#include "control/coordinator_tool.h"

#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <climits>
#include <ostream>

#include "base/error.h"
#include "base/flag_rules.h"
#include "base/flag_values.h"
#include "base/socket.h"
#include "control/coordinator_host.h"
#include "control/endpoint.h"
#include "control/etcd_coordinator.h"
#include "control/etcd_flags.h"
#include "control/etcd_keys.h"
#include "control/load_transport.h"
#include "control/node_flags.h"
#include "outlast/elastic/exit_code.h"

namespace outlast {
namespace {

constexpr int kStopSignals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};

struct Arguments {
  CoordinatorHostOptions host;
  EtcdSeatOptions seat;
  std::string nodes, slots, spares, max_restarts, no_retry, retry, preempt_exit, early_exit_grace;
  BatchFlags batch;
  TrustFlags trust;
  std::string last_call, join, serve_late, grace, stop_within, preflight_peer_rate, exclude_for;
  std::string etcd, lease;
  EtcdFlags etcd_flags;
  control::EtcdServers etcd_servers;
};

void Declare(CLI::App& app, Arguments& raw) {
  app.add_option("--job", raw.host.elastic.job, "Id of the job")->required()->type_name("ID");
  app.add_option("--journal", raw.host.journal,
                 "Folder of the journal; the same one again goes on with the job, until that has "
                 "ended")
      ->type_name("FOLDER");
  app.add_option("--etcd", raw.etcd,
                 "Instead of --journal: keeps it in etcd, which lets one of the job's coordinators "
                 "lead while the others stand by")
      ->type_name("HOST:PORT,...");
  raw.etcd_flags.Declare(app);
  app.add_option("--lease", raw.lease,
                 "With --etcd: a leader that is silent for so long has lost the job (10)")
      ->type_name("SECONDS");
  app.add_option("--listen", raw.host.listen, "Where; port 0: any (127.0.0.1:0)")
      ->type_name("HOST:PORT");
  app.add_option("--nnodes", raw.nodes, "Nodes that the job has; MAX 2 or more")
      ->type_name("N|MIN:MAX");
  app.add_option("-n,--nproc-per-node", raw.slots, "Ranks of a node (1)")->type_name("N");
  app.add_option("--max-restarts", raw.max_restarts,
                 "Restarts since the last committed step, and 20 an hour at most; 0: never (3)")
      ->type_name("R");
  app.add_option("--spares", raw.spares, "Nodes besides MAX that the start waits for (0)")
      ->type_name("N");
  app.add_option("--preflight-peer-rate", raw.preflight_peer_rate,
                 "MB/s that a node's link is to carry each way, as agents measure it before they "
                 "are given ranks, or 50% of the median of the other links; 0: it is only told (0)")
      ->type_name("MB/S|%");
  app.add_option("--no-retry", raw.no_retry, "Worker exit codes that end the job (82,93)")
      ->type_name("CODES");
  app.add_option("--retry", raw.retry, "The only worker exit codes that are tried again (all)")
      ->type_name("CODES");
  app.add_option("--preempt-exit", raw.preempt_exit, "Exit code of \"pre-empted, saved\" (80)")
      ->type_name("CODE");
  app.add_option("--early-exit-grace", raw.early_exit_grace,
                 "How long others may run on after a joined rank ended (60)")
      ->type_name("SECONDS");
  raw.batch.Declare(app);
  raw.trust.Declare(app);
  app.add_option("--last-call", raw.last_call, "How long the last nodes are waited for (5)")
      ->type_name("SECONDS");
  app.add_option("--join-timeout", raw.join, "How long MIN nodes are waited for (600)")
      ->type_name("SECONDS");
  app.add_option("--exclude-for", raw.exclude_for,
                 "How long a node that is unfit is not taken (1800)")
      ->type_name("SECONDS");
  app.add_option("--grace", raw.grace, "SIGTERM to SIGKILL in a stop (15)")->type_name("SECONDS");
  app.add_option("--stop-within", raw.stop_within, "A stop in all (25)")->type_name("SECONDS");
  app.add_option("--serve-late", raw.serve_late,
                 "How long late agents are told the end, or until a signal (30)")
      ->type_name("SECONDS");
  app.footer(
      "Example:\n"
      "  outlast coordinator --job j7 --nnodes 2:4 -n 8 --listen 10.0.0.1:29400 --token-file token "
      "--journal j7.journal\n"
      "  outlast coordinator --job j7 --nnodes 2:4 -n 8 --listen 10.0.0.1:29400 --token-file token "
      "--etcd 10.0.0.7:2379,10.0.0.8:2379,10.0.0.9:2379");
}

absl::Status CompleteJournal(Arguments& raw) {
  if (raw.etcd.empty()) {
    if (!raw.lease.empty()) {
      return Error(absl::StatusCode::kInvalidArgument, "--lease '{}' without --etcd", raw.lease);
    }
    if (const char* flag = raw.etcd_flags.given(); flag != nullptr)
      return Error(absl::StatusCode::kInvalidArgument, "{} without --etcd", flag);
    if (raw.host.journal.empty()) return RefuseValue("--journal", "", "a folder, or --etcd,");
    return absl::OkStatus();
  }
  if (!raw.host.journal.empty()) {
    return Error(absl::StatusCode::kInvalidArgument, "--journal '{}' and --etcd '{}': one wanted",
                 raw.host.journal, raw.etcd);
  }
  OUTLAST_ASSIGN_OR_RETURN(raw.etcd_servers, ReadEtcd(raw.etcd, raw.etcd_flags));
  int lease = 0;
  OUTLAST_RETURN_IF_ERROR(ReadInteger("--lease", raw.lease, 2, 3600, lease));
  if (lease != 0) raw.seat.lease = absl::Seconds(lease);
  OUTLAST_ASSIGN_OR_RETURN(const HostPort listen, HostPort::Parse(raw.host.listen));
  if (IsAnyAddress(listen.host))
    return RefuseValue("--listen", raw.host.listen, "with --etcd an address that agents reach");
  return absl::OkStatus();
}

absl::Status Complete(Arguments& raw) {
  ElasticOptions& elastic = raw.host.elastic;
  if (elastic.job.empty()) return RefuseValue("--job", "", "the job's id");
  OUTLAST_RETURN_IF_ERROR(CheckJobId(elastic.job));
  OUTLAST_RETURN_IF_ERROR(CompleteJournal(raw));
  JobOptions& job = elastic.budget;
  int slots = 1, spares = 0;
  OUTLAST_RETURN_IF_ERROR(ReadInteger("-n", raw.slots, 1, 1 << 16, slots));
  OUTLAST_RETURN_IF_ERROR(ReadInteger("--spares", raw.spares, 0, 1 << 16, spares));
  PeerRate peer_rate;
  OUTLAST_RETURN_IF_ERROR(ReadPeerRate(raw.preflight_peer_rate, peer_rate));
  elastic.peer_rate_floor = peer_rate.floor;
  elastic.peer_rate_share = peer_rate.share;
  OUTLAST_RETURN_IF_ERROR(
      ReadInteger("--max-restarts", raw.max_restarts, 0, INT_MAX, job.max_restarts));
  OUTLAST_RETURN_IF_ERROR(ReadCodes("--no-retry", raw.no_retry, job.no_retry_codes));
  OUTLAST_RETURN_IF_ERROR(ReadCodes("--retry", raw.retry, job.retry_codes));
  OUTLAST_RETURN_IF_ERROR(
      ReadInteger("--preempt-exit", raw.preempt_exit, 0, 255, job.preempt_exit));
  OUTLAST_RETURN_IF_ERROR(
      ReadSeconds("--early-exit-grace", raw.early_exit_grace, job.early_exit_grace));
  NodeCount nodes;
  if (!raw.nodes.empty()) {
    OUTLAST_ASSIGN_OR_RETURN(nodes, ParseNodeCount(raw.nodes));
  }
  // Agents of a job of one node lead it themselves, and none would come.
  if (nodes.max < 2)
    return RefuseValue("--nnodes", raw.nodes, "as its agents have it, 2 or more, or MIN:MAX");
  OUTLAST_RETURN_IF_ERROR(raw.batch.Read(job));
  elastic.membership = MembershipOf(job, slots, nodes);
  OUTLAST_RETURN_IF_ERROR(CheckLargestWorld(elastic.membership));
  elastic.spare_slots = spares * slots;
  elastic.terms = JobTerms(job, slots, nodes, spares);
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--last-call", raw.last_call, elastic.last_call));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--join-timeout", raw.join, elastic.join));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--exclude-for", raw.exclude_for, elastic.exclude_for));
  OUTLAST_RETURN_IF_ERROR(CheckWaits(raw.last_call, elastic.last_call, raw.join, elastic.join));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--grace", raw.grace, job.grace));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--stop-within", raw.stop_within, job.stop_within));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--serve-late", raw.serve_late, raw.host.serve_late));
  OUTLAST_ASSIGN_OR_RETURN(Trust trust, ReadTrust(raw.trust));
  raw.host.token = std::move(trust.token);
  raw.host.certificates = std::move(trust.certificates);
  raw.host.allow_strangers = trust.allow_strangers;
  return absl::OkStatus();
}

// A descriptor that reads the signals which ask for a stop. Before any thread is started.
absl::StatusOr<UniqueFd> TakeSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kStopSignals) sigaddset(&set, signal);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  UniqueFd fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd.is_open()) return ErrnoStatus(errno, "take signals");
  return fd;
}

absl::StatusOr<int> Serve(CoordinatorHostOptions options, std::ostream& out, std::ostream& err) {
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd signals, TakeSignals());
  OUTLAST_ASSIGN_OR_RETURN(control::Transport * transport, control::LoadTransport());
  OUTLAST_ASSIGN_OR_RETURN(const std::unique_ptr<EventLoop> loop, EventLoop::Make());
  const std::string job = options.elastic.job;
  RaiseDescriptorLimit();  // a stream each agent, and gRPC listens no more once it has run out
  int code = ExitCodeOf(JobOutcome::kNoQuorum);
  bool has_ended = false;
  const auto say = [&err](const std::string& line) {
    err << "outlast: coordinator: " << line << std::endl;
  };
  OUTLAST_ASSIGN_OR_RETURN(
      const std::unique_ptr<CoordinatorHost> host,
      CoordinatorHost::Start(
          *loop, *transport, std::move(options),
          {.on_line = say,
           .on_fault = [&](const RecordFault& record) { say(record.fault.detail); },
           .on_finish =
               [&](const FinishJob& finish) {
                 code = finish.exit_code;
                 has_ended = true;
                 say(fmt::format("job {} ends with {}: {}", job, code, finish.reason));
               },
           .on_over =
               [&](const absl::Status& why) {
                 if (!why.ok()) {
                   say(std::string(MessageOf(why)));
                   code = ExitCodeOf(JobOutcome::kNoQuorum);
                 }
                 loop->Stop();
               }}));
  OUTLAST_RETURN_IF_ERROR(loop->Watch(signals.get(), [&] {
    signalfd_siginfo taken{};
    while (read(signals.get(), &taken, sizeof(taken)) == sizeof(taken)) {
      if (has_ended) return loop->Stop();  // late agents are not waited for any more
      host->AskStop(static_cast<int>(taken.ssi_signo));
    }
  }));
  out << "coordinator of job " << job << " at " << host->address() << std::endl;
  loop->Run();
  return code;
}

// One of several coordinators of the job.
absl::StatusOr<int> ServeInTurn(Arguments raw, std::ostream& out, std::ostream& err) {
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd signals, TakeSignals());
  OUTLAST_ASSIGN_OR_RETURN(control::Transport * transport, control::LoadTransport());
  OUTLAST_ASSIGN_OR_RETURN(std::shared_ptr<control::EtcdClient> client,
                           control::LoadEtcd(raw.etcd_servers));
  OUTLAST_ASSIGN_OR_RETURN(const std::unique_ptr<EventLoop> loop, EventLoop::Make());
  RaiseDescriptorLimit();
  EtcdCoordinator coordinator(*loop, *transport, std::move(client), std::move(raw.host),
                              std::move(raw.seat), out, err);
  OUTLAST_RETURN_IF_ERROR(loop->Watch(signals.get(), [&] {
    signalfd_siginfo taken{};
    while (read(signals.get(), &taken, sizeof(taken)) == sizeof(taken))
      coordinator.Signal(static_cast<int>(taken.ssi_signo));
  }));
  loop->Run();
  return coordinator.code();
}

}  // namespace

int RunCoordinatorTool(const std::vector<std::string>& arguments, std::ostream& out,
                       std::ostream& err) {
  const int refused = ExitCodeOf(JobOutcome::kRefused);
  CLI::App app("Leads a job of several nodes, as a process of its own.", "outlast coordinator");
  Arguments raw;
  Declare(app, raw);
  const auto refuse = [&](std::string_view why) {
    err << "outlast: coordinator: " << why << '\n';
    return refused;
  };
  absl::Status given = RefuseCutValues(app, arguments);
  if (!given.ok()) return refuse(MessageOf(given));
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::CallForHelp&) {
    out << app.help();
    return 0;
  } catch (const CLI::ParseError& error) {
    given = RefuseRepeatedFlags(app);
    if (!given.ok()) return refuse(MessageOf(given));
    return refuse(std::string(error.what()) + ": see outlast coordinator --help");
  }
  given = RefuseRepeatedFlags(app);
  if (given.ok()) given = RefuseEmptyValues(app);
  if (!given.ok()) return refuse(MessageOf(given));
  absl::StatusOr<int> code = refused;
  if (const absl::Status fits = Complete(raw); fits.ok()) {
    code = raw.etcd.empty() ? Serve(std::move(raw.host), out, err)
                            : ServeInTurn(std::move(raw), out, err);
  } else {
    code = fits;
  }
  if (code.ok()) return *code;
  err << "outlast: coordinator: " << MessageOf(code.status()) << '\n';
  return refused;
}

}  // namespace outlast
