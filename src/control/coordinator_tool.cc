#include "control/coordinator_tool.h"

#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <ostream>

#include "base/error.h"
#include "control/certificates.h"
#include "control/coordinator_host.h"
#include "control/load_transport.h"
#include "outlast/elastic/exit_code.h"

namespace outlast {
namespace {

constexpr int kStopSignals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};

struct Arguments {
  CoordinatorHostOptions host;
  std::string nodes = "1";
  int slots = 1;
  std::string token_file;
  int token_fd = -1;
  std::string ca, certificate, key;
  double last_call = 5, join = 600, serve_late = 30;
};

void Declare(CLI::App& app, Arguments& raw) {
  app.add_option("--job", raw.host.elastic.job, "Id of the job")->required()->type_name("ID");
  app.add_option("--journal", raw.host.journal,
                 "Folder of the journal; the same one again goes on where it ends")
      ->required()
      ->type_name("FOLDER");
  app.add_option("--listen", raw.host.listen, "Where; port 0: any (127.0.0.1:0)")
      ->type_name("HOST:PORT");
  app.add_option("--nnodes", raw.nodes, "Nodes that the job has (1)")->type_name("N|MIN:MAX");
  app.add_option("-n,--nproc-per-node", raw.slots, "Ranks of a node (1)")
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--max-restarts", raw.host.elastic.budget.max_restarts,
                 "Restarts without progress before the job ends (3)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--token-file", raw.token_file, "Holds the job token, 64 hex digits")
      ->type_name("FILE");
  app.add_option("--token-fd", raw.token_fd, "The same, by a descriptor that is inherited");
  app.add_flag("--allow-strangers", raw.host.allow_strangers,
               "Listen beyond this machine without a token");
  app.add_option("--tls-ca", raw.ca, "Whom certificates of agents must be from")->type_name("FILE");
  app.add_option("--tls-cert", raw.certificate, "Own certificate")->type_name("FILE");
  app.add_option("--tls-key", raw.key, "Its key")->type_name("FILE");
  app.add_option("--last-call", raw.last_call, "How long the last nodes are waited for (5)")
      ->type_name("SECONDS");
  app.add_option("--join-timeout", raw.join, "How long MIN nodes are waited for (600)")
      ->type_name("SECONDS");
  app.add_option("--serve-late", raw.serve_late, "How long late agents are told the end (30)")
      ->type_name("SECONDS");
  app.footer(
      "Example:\n"
      "  outlast coordinator --job j7 --nnodes 2:4 -n 8 --listen 10.0.0.1:29400 --token-file token "
      "--journal j7.journal");
}

// "4", or "2:4".
absl::Status ParseNodes(const std::string& text, int slots, MembershipOptions& membership) {
  std::istringstream in(text);
  int min = 0, max = 0;
  char colon = ':';
  in >> min;
  max = min;
  if (in && !in.eof()) in >> colon >> max;
  if (!in || !in.eof() || colon != ':' || min < 1 || max < min || max > (1 << 16)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--nnodes '{}': N or MIN:MAX is wanted, such as 4 or 2:4", text);
  }
  membership.min_world = min * slots;
  membership.max_world = max * slots;
  return absl::OkStatus();
}

absl::Status Complete(Arguments& raw) {
  OUTLAST_RETURN_IF_ERROR(ParseNodes(raw.nodes, raw.slots, raw.host.elastic.membership));
  if (!raw.token_file.empty() && raw.token_fd >= 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--token-file {} and --token-fd {}: one of them", raw.token_file, raw.token_fd);
  }
  if (!raw.token_file.empty()) {
    OUTLAST_ASSIGN_OR_RETURN(raw.host.token, JobToken::Read(raw.token_file));
  } else if (raw.token_fd >= 0) {
    OUTLAST_ASSIGN_OR_RETURN(raw.host.token, JobToken::ReadFrom(raw.token_fd));
  }
  OUTLAST_ASSIGN_OR_RETURN(raw.host.certificates,
                           ReadCertificates(raw.ca, raw.certificate, raw.key));
  raw.host.elastic.last_call = absl::Seconds(raw.last_call);
  raw.host.elastic.join = absl::Seconds(raw.join);
  raw.host.serve_late = absl::Seconds(raw.serve_late);
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
  int code = ExitCodeOf(JobOutcome::kNoQuorum);
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
    while (read(signals.get(), &taken, sizeof(taken)) == sizeof(taken))
      host->AskStop(static_cast<int>(taken.ssi_signo));
  }));
  out << "coordinator of job " << job << " at " << host->address() << std::endl;
  loop->Run();
  return code;
}

}  // namespace

int RunCoordinatorTool(const std::vector<std::string>& arguments, std::ostream& out,
                       std::ostream& err) {
  const int refused = ExitCodeOf(JobOutcome::kRefused);
  CLI::App app("Leads a job of several nodes, as a process of its own.", "outlast coordinator");
  Arguments raw;
  Declare(app, raw);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::CallForHelp&) {
    out << app.help();
    return 0;
  } catch (const CLI::ParseError& error) {
    err << "outlast: coordinator: " << error.what() << ": see outlast coordinator --help\n";
    return refused;
  }
  absl::StatusOr<int> code = refused;
  if (const absl::Status fits = Complete(raw); fits.ok()) {
    code = Serve(std::move(raw.host), out, err);
  } else {
    code = fits;
  }
  if (code.ok()) return *code;
  err << "outlast: coordinator: " << MessageOf(code.status()) << '\n';
  return refused;
}

}  // namespace outlast
