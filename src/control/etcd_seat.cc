#include "control/etcd_seat.h"

#include <pthread.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "control/etcd_keys.h"
#include "outlast/base/clock.h"
#include "outlast/base/id.h"
#include "outlast/base/mutex.h"
#include "outlast/elastic/exit_code.h"
#include "outlast/elastic/journal.h"

namespace outlast {
namespace {

using control::EtcdReply;
using control::EtcdTransaction;

constexpr absl::Duration kRetry = absl::Milliseconds(200);
constexpr int64_t kRecordsARead = 256;

absl::Duration Now() { return Clock::Real().Uptime(); }

// One time of leading: from the key that was made until it is lost or given up. Safe for concurrent
// use.
class Tenure {
 public:
  Tenure(int64_t revision, int64_t lease, absl::Duration good_until)
      : revision(revision), lease(lease), good_until_(good_until) {}

  const int64_t revision;  // that made the key
  const int64_t lease;

  // The lease cannot have run out before this time.
  absl::Duration good_until() const {
    MutexLock lock(mutex_);
    return good_until_;
  }
  void Extend(absl::Duration good_until) {
    MutexLock lock(mutex_);
    good_until_ = good_until;
  }
  void End() {
    MutexLock lock(mutex_);
    is_over_ = true;
    changed_.NotifyAll();
  }
  bool is_good() const {
    MutexLock lock(mutex_);
    return !is_over_ && Now() < good_until_;
  }
  // Waits a little; false: it is not good any more.
  bool Pause() {
    const absl::Duration until = Now() + kRetry;
    MutexLock lock(mutex_);
    while (!is_over_ && Now() < until) changed_.WaitFor(mutex_, until - Now());
    return !is_over_ && Now() < good_until_;
  }

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  absl::Duration good_until_ ABSL_GUARDED_BY(mutex_);
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
};

class EtcdJournal final : public CoordinatorJournal {
 public:
  EtcdJournal(std::shared_ptr<control::EtcdClient> client, EtcdKeys keys,
              std::shared_ptr<Tenure> tenure, CoordinatorState state)
      : client_(std::move(client)),
        keys_(std::move(keys)),
        tenure_(std::move(tenure)),
        state_(std::move(state)),
        next_(state_.records) {}

  const CoordinatorState& state() const override { return state_; }
  const std::string& torn() const override { return none_; }
  uint64_t least_incarnation() const override { return static_cast<uint64_t>(tenure_->revision); }

  absl::Status Append(std::string_view bytes) override {
    const std::string key = keys_.Record(next_);
    EtcdTransaction write;
    write.guards = {{keys_.leader, tenure_->revision}, {key, 0}};
    write.puts = {{key, std::string(bytes)}};
    write.else_read = {keys_.leader, key};
    std::string why = "this coordinator stepped down";
    while (tenure_->is_good()) {
      const EtcdReply reply = client_->Commit(write);
      if (reply.outcome == EtcdReply::Outcome::kRefused)
        return Error(absl::StatusCode::kAborted, "etcd refuses a record: {}", reply.why);
      if (reply.done() && (reply.guards_held || IsThere(reply, key, bytes))) {
        ++next_;
        return absl::OkStatus();
      }
      if (reply.done())
        return Error(absl::StatusCode::kAborted, "another coordinator leads the job by now");
      why = reply.why;
      if (!tenure_->Pause()) break;
    }
    return Error(absl::StatusCode::kAborted, "a record is not in etcd in time: {}", why);
  }

  // Where no answer comes it may have been done all the same, which changes nothing.
  absl::Status Compact(std::string_view base) override {
    if (!tenure_->is_good())
      return Error(absl::StatusCode::kUnavailable, "etcd has not answered for a while");
    const std::string newest = keys_.Record(next_ - 1);
    EtcdTransaction replace;
    replace.guards = {{keys_.leader, tenure_->revision}};
    if (next_ > 1) replace.delete_ranges = {{keys_.Record(0), newest}};
    replace.puts = {{newest, std::string(base)}};
    const EtcdReply reply = client_->Commit(replace);
    if (!reply.done()) return Error(absl::StatusCode::kUnavailable, "etcd: {}", reply.why);
    if (reply.guards_held) return absl::OkStatus();
    return Error(absl::StatusCode::kAborted, "another coordinator leads the job by now");
  }

 private:
  // An attempt without an answer may have been done; nobody else writes while the key is ours.
  bool IsThere(const EtcdReply& reply, const std::string& key, std::string_view bytes) const {
    bool leads = false, has_record = false;
    for (const control::EtcdKey& found : reply.keys) {
      if (found.key == keys_.leader) leads = found.create_revision == tenure_->revision;
      if (found.key == key) has_record = found.value == bytes;
    }
    return leads && has_record;
  }

  const std::shared_ptr<control::EtcdClient> client_;
  const EtcdKeys keys_;
  const std::shared_ptr<Tenure> tenure_;
  const CoordinatorState state_;
  const std::string none_;
  uint64_t next_;
};

// The keys besides the journal.
struct Look {
  std::optional<control::EtcdKey> leader;
  std::string run;
  std::optional<EtcdOver> over;
};

}  // namespace

// All but the calls from outside is on its own thread.
class EtcdSeat::Work {
 public:
  Work(EventLoop& caller, std::shared_ptr<control::EtcdClient> client, EtcdSeatOptions options,
       Ears ears)
      : caller_(caller),
        client_(std::move(client)),
        options_(std::move(options)),
        ears_(std::move(ears)),
        keys_(options_.job),
        thread_([this] {
          pthread_setname_np(pthread_self(), "outlast-etcd");
          Loop();
        }) {}
  ~Work() {
    alive_.reset();
    {
      MutexLock lock(mutex_);
      is_stopping_ = true;
      if (tenure_ != nullptr) tenure_->End();
      changed_.NotifyAll();
    }
    thread_.join();
  }

  void Announce(std::string address) {
    MutexLock lock(mutex_);
    address_ = std::move(address);
    changed_.NotifyAll();
  }
  void StepDown() {
    MutexLock lock(mutex_);
    steps_down_ = true;
    if (tenure_ != nullptr) tenure_->End();
    changed_.NotifyAll();
  }
  void EndRun(int exit_code, std::string reason) {
    MutexLock lock(mutex_);
    ended_ = EtcdOver{"", exit_code, std::move(reason)};
  }

 private:
  void Loop();
  // --- Standing by ---
  std::shared_ptr<Tenure> Campaign();
  std::optional<Look> LookAtKeys();
  bool Judge(const Look& look);
  bool Compare(const CoordinatorState& state, const std::string& run, bool is_first);
  std::shared_ptr<Tenure> Claim();
  std::shared_ptr<Tenure> Reclaim(const control::EtcdKey& leader);
  // --- Leading ---
  std::unique_ptr<CoordinatorJournal> Prepare(const std::shared_ptr<Tenure>& tenure);
  std::optional<std::string> ReadRecords(Tenure* tenure);
  bool BeginRun(Tenure& tenure);
  std::string Hold(Tenure& tenure);
  std::string Renew(Tenure& tenure);
  std::string WriteAddress(Tenure& tenure, const std::string& address);
  void AwaitStepDown();
  void Resign(const Tenure& tenure);
  // --- Both ---
  void Answered();
  bool Unanswered(const EtcdReply& reply);
  bool Sleep(absl::Duration time);
  bool is_stopping() {
    MutexLock lock(mutex_);
    return is_stopping_;
  }
  void Tell(std::function<void()> ear) {
    caller_.Post([alive = is_alive_, ear = std::move(ear)] {
      if (alive.lock() != nullptr) ear();
    });
  }
  void Line(std::string line) {
    Tell([this, line = std::move(line)] { ears_.on_line(line); });
  }
  void End(JobOutcome outcome, const std::string& reason) { End(ExitCodeOf(outcome), reason); }
  void End(int exit_code, const std::string& reason) {
    has_ended_ = true;
    Tell([this, exit_code, reason] { ears_.on_end(exit_code, reason); });
  }

  EventLoop& caller_;
  const std::shared_ptr<control::EtcdClient> client_;
  const EtcdSeatOptions options_;
  const Ears ears_;
  const EtcdKeys keys_;
  const std::string id_ = Id128::Random().hex();
  std::shared_ptr<int> alive_ = std::make_shared<int>();
  const std::weak_ptr<int> is_alive_ = alive_;

  // Of the thread.
  bool has_ended_ = false;
  bool looked_ = false;
  bool was_compared_ = false;  // with how the job's agents were started
  std::string run_;            // that this seat takes part in; empty: it is to be begun
  std::string ended_run_;      // that had ended when it looked first
  int64_t lease_ = 0;          // of the key that may be ours
  absl::Duration answered_ = Now();
  bool is_away_ = false;  // etcd, and people were told
  std::string followed_;  // whom people were told of

  Mutex mutex_;
  CondVar changed_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool steps_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<std::string> address_ ABSL_GUARDED_BY(mutex_);
  std::optional<EtcdOver> ended_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Tenure> tenure_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;  // last
};

void EtcdSeat::Work::Loop() {
  while (!has_ended_ && !is_stopping()) {
    const std::shared_ptr<Tenure> tenure = Campaign();
    if (tenure == nullptr) return;
    {
      MutexLock lock(mutex_);
      tenure_ = tenure;
      address_.reset();
      steps_down_ = false;
    }
    std::unique_ptr<CoordinatorJournal> journal = Prepare(tenure);
    if (journal != nullptr) {
      // std::function wants what can be copied.
      auto handed = std::make_shared<std::unique_ptr<CoordinatorJournal>>(std::move(journal));
      Tell([this, handed] { ears_.on_elected(std::move(*handed)); });
      const std::string why = Hold(*tenure);
      tenure->End();
      if (!why.empty()) {
        Tell([this, why] { ears_.on_lost(why); });
        AwaitStepDown();
      }
    }
    Resign(*tenure);
    {
      MutexLock lock(mutex_);
      tenure_.reset();
    }
    Sleep(kRetry);
  }
}

// --- Standing by ---

// Until it leads. Null: it is to stop, or it has ended.
std::shared_ptr<Tenure> EtcdSeat::Work::Campaign() {
  const absl::Duration poll = std::min(options_.lease / 10, absl::Seconds(1));
  followed_.clear();
  while (!is_stopping()) {
    const std::optional<Look> look = LookAtKeys();
    if (has_ended_ || (look && !Judge(*look))) return nullptr;
    std::shared_ptr<Tenure> tenure;
    if (look) tenure = look->leader ? Reclaim(*look->leader) : Claim();
    if (has_ended_) return nullptr;
    if (tenure != nullptr) return tenure;
    if (!Sleep(look ? poll : kRetry)) return nullptr;
  }
  return nullptr;
}

// Nothing: etcd did not answer.
std::optional<Look> EtcdSeat::Work::LookAtKeys() {
  const EtcdReply reply = client_->Read(keys_.folder, keys_.leader, 16);
  if (!reply.done()) {
    Unanswered(reply);
    return std::nullopt;
  }
  Answered();
  Look look;
  for (const control::EtcdKey& found : reply.keys) {
    if (found.key == keys_.leader) look.leader = found;
    if (found.key == keys_.run) look.run = found.value;
    if (found.key == keys_.over) look.over = EtcdOver::Parse(found.value);
  }
  return look;
}

// False: there is nothing more to do here.
bool EtcdSeat::Work::Judge(const Look& look) {
  const bool is_first = !std::exchange(looked_, true);
  if ((is_first || !was_compared_) && !look.run.empty()) {
    const auto bytes = ReadRecords(nullptr);
    if (!bytes) {
      looked_ = !is_first;
      return !has_ended_;
    }
    const auto content = ReadJournal(*bytes);
    // A journal that is read while its leader begins anew may have any end.
    if (content.ok() && !Compare(content->state, look.run, is_first)) return false;
  }
  if (look.run.empty()) {
    if (run_.empty()) return true;
    End(JobOutcome::kNoQuorum,
        fmt::format("the journal of job {} is gone from etcd", options_.job));
    return false;
  }
  if (look.run == ended_run_) return true;
  run_ = look.run;
  if (!look.over || look.over->run != run_) return true;
  End(look.over->exit_code, look.over->reason);
  return false;
}

// False: it ends, for one that was started otherwise than the job would lose it.
bool EtcdSeat::Work::Compare(const CoordinatorState& state, const std::string& run, bool is_first) {
  if (is_first && state.ended) ended_run_ = run;
  was_compared_ = state.generation() > 0 && !state.ended;
  const std::string unlike = WhyUnlike(state, options_.terms);
  if (!unlike.empty()) End(JobOutcome::kRefused, unlike);
  return unlike.empty();
}

// Nobody leads. Null: somebody was quicker, or etcd did not answer.
std::shared_ptr<Tenure> EtcdSeat::Work::Claim() {
  const absl::Duration asked = Now();
  const EtcdReply granted = client_->Grant(absl::ToInt64Seconds(options_.lease));
  if (!granted.done()) {
    Unanswered(granted);
    return nullptr;
  }
  EtcdTransaction claim;
  claim.guards = {{keys_.leader, 0}};
  claim.puts = {{keys_.leader, EtcdLeader{id_, options_.name, ""}.text(), granted.lease}};
  const EtcdReply reply = client_->Commit(claim);
  if (reply.done() && !reply.guards_held) {
    (void)client_->Revoke(granted.lease);
    return nullptr;
  }
  lease_ = granted.lease;  // also without an answer: the next look tells
  if (!reply.done()) {
    Unanswered(reply);
    return nullptr;
  }
  return std::make_shared<Tenure>(reply.revision, lease_, asked + options_.lease);
}

// Somebody leads: this one, where it made the key and did not hear of it, or where its lease was
// not known to last.
std::shared_ptr<Tenure> EtcdSeat::Work::Reclaim(const control::EtcdKey& key) {
  const auto leader = EtcdLeader::Parse(key.value);
  if (leader && leader->id == id_) {
    const absl::Duration asked = Now();
    const EtcdReply reply = client_->KeepAlive(lease_);
    if (!reply.done() || reply.ttl_seconds <= 0) return nullptr;
    return std::make_shared<Tenure>(key.create_revision, lease_, asked + options_.lease);
  }
  const std::string who = leader ? leader->name : "somebody";
  if (followed_ != who) Line(fmt::format("stands by: {} leads job {}", who, options_.job));
  followed_ = who;
  return nullptr;
}

// --- Leading ---

// Null: the lead was lost meanwhile, or there is nothing more to do.
std::unique_ptr<CoordinatorJournal> EtcdSeat::Work::Prepare(const std::shared_ptr<Tenure>& tenure) {
  // Nobody else writes any more: what the keys say now stays so.
  const std::optional<Look> look = LookAtKeys();
  if (!look || !Judge(*look)) return nullptr;
  CoordinatorState state;
  if (run_.empty()) {
    if (!BeginRun(*tenure)) return nullptr;
  } else {
    const auto bytes = ReadRecords(tenure.get());
    if (!bytes) return nullptr;
    auto content = ReadJournal(*bytes);
    if (!content.ok() || !content->torn.empty()) {
      End(JobOutcome::kRefused,
          fmt::format("{}: {}", keys_.journal,
                      content.ok() ? content->torn : std::string(MessageOf(content.status()))));
      return nullptr;
    }
    state = std::move(content->state);
  }
  return std::make_unique<EtcdJournal>(client_, keys_, tenure, std::move(state));
}

// All records, one after another. Nothing: etcd did not answer, or the lead was lost.
std::optional<std::string> EtcdSeat::Work::ReadRecords(Tenure* tenure) {
  std::string bytes;
  std::string from;
  while (true) {
    const EtcdReply reply = client_->Read(keys_.journal, from, kRecordsARead);
    if (!reply.done()) {
      if (Unanswered(reply) || tenure == nullptr || !tenure->Pause()) return std::nullopt;
      continue;
    }
    Answered();
    for (const control::EtcdKey& record : reply.keys) bytes += record.value;
    if (!reply.more || reply.keys.empty()) return bytes;
    from = reply.keys.back().key + '\0';
    if (tenure != nullptr && !Renew(*tenure).empty()) return std::nullopt;
  }
}

bool EtcdSeat::Work::BeginRun(Tenure& tenure) {
  const std::string run = std::to_string(tenure.revision);
  EtcdTransaction begin;
  begin.guards = {{keys_.leader, tenure.revision}};
  begin.delete_folders = {keys_.journal};
  begin.deletes = {keys_.over};
  begin.puts = {{keys_.run, run}};
  while (tenure.is_good()) {
    const EtcdReply reply = client_->Commit(begin);
    if (reply.done() && !reply.guards_held) return false;
    if (reply.done()) {
      run_ = run;
      return true;
    }
    if (Unanswered(reply) || !tenure.Pause()) return false;
  }
  return false;
}

// Until the lead is lost, and why; empty: it was given up.
std::string EtcdSeat::Work::Hold(Tenure& tenure) {
  absl::Duration renew_at = Now() + options_.lease / 3;
  while (true) {
    std::optional<std::string> address;
    {
      MutexLock lock(mutex_);
      while (!is_stopping_ && !steps_down_ && !address_ && Now() < renew_at)
        changed_.WaitFor(mutex_, renew_at - Now());
      if (is_stopping_ || steps_down_) return {};
      address.swap(address_);
    }
    std::string lost = address ? WriteAddress(tenure, *address) : Renew(tenure);
    if (!lost.empty()) return lost;
    if (address) continue;
    renew_at = Now() + (is_away_ ? kRetry : options_.lease / 3);
  }
}

// Why the lead is lost; empty: it is not, though etcd may be away.
std::string EtcdSeat::Work::Renew(Tenure& tenure) {
  const absl::Duration asked = Now();
  EtcdReply reply = client_->KeepAlive(tenure.lease);
  if (reply.done() && reply.ttl_seconds <= 0) return "its lease in etcd has run out";
  if (reply.done()) {
    // The key may be gone without its lease, such as by a person.
    EtcdTransaction look;
    look.guards = {{keys_.leader, tenure.revision}};
    reply = client_->Commit(look);
    if (reply.done() && !reply.guards_held) return "its key in etcd is gone";
  }
  if (reply.done()) {
    Answered();
    tenure.Extend(asked + options_.lease);
  } else {
    Unanswered(reply);
  }
  if (Now() < tenure.good_until()) return {};
  return fmt::format("etcd has not answered for {}, another one may lead by now",
                     absl::FormatDuration(options_.lease));
}

std::string EtcdSeat::Work::WriteAddress(Tenure& tenure, const std::string& address) {
  EtcdTransaction write;
  write.guards = {{keys_.leader, tenure.revision}};
  write.puts = {{keys_.leader, EtcdLeader{id_, options_.name, address}.text(), tenure.lease}};
  const EtcdReply reply = client_->Commit(write);
  if (reply.done() && !reply.guards_held) return "its key in etcd is gone";
  if (reply.done()) {
    Tell([this] { ears_.on_announced(); });
    return {};
  }
  Unanswered(reply);
  if (std::string lost = Renew(tenure); !lost.empty()) return lost;
  MutexLock lock(mutex_);
  if (!address_) address_ = address;  // once more
  changed_.WaitFor(mutex_, kRetry);
  return {};
}

void EtcdSeat::Work::AwaitStepDown() {
  MutexLock lock(mutex_);
  while (!is_stopping_ && !steps_down_) changed_.Wait(mutex_);
}

// Only its own key goes, and whatever is not answered goes with the lease.
void EtcdSeat::Work::Resign(const Tenure& tenure) {
  if (is_away_) return;
  EtcdTransaction leave;
  leave.guards = {{keys_.leader, tenure.revision}};
  leave.deletes = {keys_.leader};
  {
    MutexLock lock(mutex_);
    if (ended_)
      leave.puts = {{keys_.over, EtcdOver{run_, ended_->exit_code, ended_->reason}.text()}};
  }
  const EtcdReply reply = client_->Commit(leave);
  if (reply.done()) (void)client_->Revoke(tenure.lease);
}

// --- Both ---

void EtcdSeat::Work::Answered() {
  answered_ = Now();
  if (std::exchange(is_away_, false)) Line("etcd answers again");
}

// Says so once, and ends where it is final; true then.
bool EtcdSeat::Work::Unanswered(const EtcdReply& reply) {
  if (reply.outcome == EtcdReply::Outcome::kRefused) {
    End(JobOutcome::kRefused, fmt::format("etcd refuses: {}", reply.why));
    return true;
  }
  if (!std::exchange(is_away_, true)) {
    MutexLock lock(mutex_);
    Line(fmt::format("etcd does not answer{}: {}",
                     tenure_ != nullptr ? ", the job goes on and nothing new is decided" : "",
                     reply.why));
  }
  const absl::Duration away = Now() - answered_;
  if (looked_ ? away < options_.grace : away < options_.first_answer) return false;
  End(looked_ ? JobOutcome::kNoQuorum : JobOutcome::kRefused,
      fmt::format("etcd did not answer for {}: {}", absl::FormatDuration(away), reply.why));
  return true;
}

// False: it is to stop.
bool EtcdSeat::Work::Sleep(absl::Duration time) {
  const absl::Duration until = Now() + time;
  MutexLock lock(mutex_);
  while (!is_stopping_ && Now() < until) changed_.WaitFor(mutex_, until - Now());
  return !is_stopping_;
}

EtcdSeat::EtcdSeat(EventLoop& caller, std::shared_ptr<control::EtcdClient> client,
                   EtcdSeatOptions options, Ears ears)
    : work_(
          std::make_unique<Work>(caller, std::move(client), std::move(options), std::move(ears))) {}
EtcdSeat::~EtcdSeat() = default;
void EtcdSeat::Announce(std::string address) { work_->Announce(std::move(address)); }
void EtcdSeat::StepDown() { work_->StepDown(); }
void EtcdSeat::EndRun(int exit_code, std::string reason) {
  work_->EndRun(exit_code, std::move(reason));
}

}  // namespace outlast
