#include "control/etcd_coordinator.h"

#include <signal.h>
#include <unistd.h>

#include <ostream>
#include <utility>

#include "base/error.h"
#include "base/socket.h"
#include "outlast/base/clock.h"
#include "outlast/elastic/exit_code.h"

namespace outlast {
namespace {

// Of its own accord, while etcd would have let it lead: then it does not get better.
constexpr int kMostAbdications = 5;
constexpr absl::Duration kLongLead = absl::Minutes(2);

std::string NameOfThisProcess() {
  char host[256] = {};
  (void)gethostname(host, sizeof host - 1);
  return fmt::format("{} (process {})", host, getpid());
}

// As it was given, for a name may be in its certificate; with the port that was bound.
std::string Reachable(const std::string& listen, const std::string& bound) {
  auto asked = HostPort::Parse(listen);
  const auto found = HostPort::Parse(bound);
  if (!asked.ok() || !found.ok()) return bound;
  asked->port = found->port;
  return asked->text();
}

}  // namespace

EtcdCoordinator::EtcdCoordinator(EventLoop& loop, control::Transport& transport,
                                 std::shared_ptr<control::EtcdClient> client,
                                 CoordinatorHostOptions host, EtcdSeatOptions seat,
                                 std::ostream& out, std::ostream& err)
    : loop_(loop),
      transport_(transport),
      options_(std::move(host)),
      out_(out),
      err_(err),
      code_(ExitCodeOf(JobOutcome::kNoQuorum)) {
  seat.job = options_.elastic.job;
  seat.name = NameOfThisProcess();
  seat.terms = options_.elastic.terms;
  seat.grace = options_.elastic.coordinator_grace;
  EtcdSeat::Ears ears;
  ears.on_line = [this](const std::string& line) { Say(line); };
  ears.on_elected = [this](std::unique_ptr<CoordinatorJournal> journal) {
    Lead(std::move(journal));
  };
  ears.on_announced = [this] {
    if (host_ == nullptr) return;
    out_ << "coordinator of job " << options_.elastic.job << " at "
         << Reachable(options_.listen, host_->address()) << std::endl;
  };
  ears.on_lost = [this](const std::string& why) { StepDown(why); };
  ears.on_end = [this](int code, const std::string& reason) {
    host_.reset();
    if (finish_) return loop_.Stop();
    Finish(code, reason);
  };
  seat_ = std::make_unique<EtcdSeat>(loop_, std::move(client), std::move(seat), std::move(ears));
}

EtcdCoordinator::~EtcdCoordinator() {
  if (finish_ && host_ != nullptr) seat_->EndRun(finish_->exit_code, finish_->reason);
  // An append that waits for etcd is not waited for.
  seat_->StepDown();
  host_.reset();
}

void EtcdCoordinator::Lead(std::unique_ptr<CoordinatorJournal> journal) {
  const std::optional<EndedRecord> ended = journal->state().ended;
  if (journal->state().generation() > 0 && !ended) {
    Say(fmt::format("goes on with job {} at generation {}", options_.elastic.job,
                    journal->state().generation()));
  }
  CoordinatorHost::Ears ears;
  ears.on_line = [this](const std::string& line) { Say(line); };
  ears.on_fault = [this](const RecordFault& record) { Say(record.fault.detail); };
  ears.on_finish = [this, ended](const FinishJob& finish) {
    finish_ = ended ? FinishJob{ended->exit_code, ended->reason} : finish;
    code_ = finish_->exit_code;
    Say(fmt::format("job {} {} with {}: {}", options_.elastic.job, ended ? "had ended" : "ends",
                    code_, finish_->reason));
  };
  ears.on_over = [this](const absl::Status& why) {
    if (why.ok()) return loop_.Stop();
    // The host is not to end while it calls.
    loop_.Post([this, why] {
      if (host_ == nullptr) return;
      if (Clock::Real().Uptime() - led_since_ > kLongLead) abdications_ = 0;
      if (++abdications_ > kMostAbdications)
        return Finish(ExitCodeOf(JobOutcome::kNoQuorum), std::string(MessageOf(why)));
      StepDown(std::string(MessageOf(why)));
    });
  };
  auto host =
      CoordinatorHost::Start(loop_, transport_, options_, std::move(ears), std::move(journal));
  if (!host.ok())
    return Finish(ExitCodeOf(JobOutcome::kRefused), std::string(MessageOf(host.status())));
  host_ = *std::move(host);
  led_since_ = Clock::Real().Uptime();
  seat_->Announce(Reachable(options_.listen, host_->address()));
}

void EtcdCoordinator::StepDown(const std::string& why) {
  if (host_ == nullptr) return;
  Say(fmt::format("does not lead job {} any more: {}", options_.elastic.job, why));
  seat_->StepDown();
  host_.reset();
}

void EtcdCoordinator::Signal(int signal) {
  if (finish_) return loop_.Stop();  // late agents are not waited for any more
  const bool by_a_person = signal == SIGINT || signal == SIGHUP;
  if (host_ != nullptr && by_a_person) return host_->AskStop(signal);
  Finish(ExitCodeOf(JobOutcome::kLeft), fmt::format("signal {}", signal));
}

void EtcdCoordinator::Finish(int code, const std::string& reason) {
  code_ = code;
  Say(fmt::format("ends with {}: {}", code, reason));
  loop_.Stop();
}

void EtcdCoordinator::Say(const std::string& line) {
  err_ << "outlast: coordinator: " << line << std::endl;
}

}  // namespace outlast
