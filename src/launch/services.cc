#include "launch/services.h"

#include <algorithm>

#include "base/error.h"
#include "launch/machine.h"
#include "run/chain_connect.h"

namespace outlast {
namespace {

StateSource SourceOf(RestoreSource source) {
  switch (source) {
    case RestoreSource::kMemory:
      return StateSource::kMemory;
    case RestoreSource::kPeer:
      return StateSource::kPeer;
    case RestoreSource::kDisk:
      return StateSource::kDisk;
    case RestoreSource::kRemote:
      return StateSource::kRemote;
    case RestoreSource::kNone:
      break;
  }
  return StateSource::kNothing;
}

JobDeadlines DeadlinesOf(const LaunchOptions& options) {
  JobDeadlines deadlines;
  deadlines.respawn = options.job.respawn;
  deadlines.connect = kConnect;
  deadlines.soft_abort = options.job.soft_abort;
  deadlines.collective_timeout = options.outer.collective_timeout;
  if (options.nodes) deadlines.commit_ack = ElasticOptions{}.commit_ack;
  return deadlines;
}

}  // namespace

JobServices::JobServices(Keeper& keeper, WorkerHost& host, const LaunchOptions& options,
                         RunLedger& ledger, RunRecord& record, Console& console)
    : keeper_(keeper), ledger_(ledger), record_(record), console_(console) {
  SaveServiceOptions saves;
  saves.job_name = options.job_id;
  saves.fresh = options.fresh;
  saves.start = options.start;
  saves.take_over = options.take_over;
  saves.committer = options.nodes ? options.nodes->node : HostName();
  saves.plugins = options.plugins;
  if (options.nodes) {
    saves.peers = options.nodes->peers;
    saves.peers.token = options.nodes->trust.token.SecretFor("copies", options.job_id);
  }
  saves.observer = Observer();
  saves_ = std::make_unique<SaveService>(keeper_, std::move(saves));
  keeper_.Attach(saves_.get());
  MonitorListener listener;
  listener.on_finding = [this](const Verdict& verdict, const std::string& folder) {
    OnVerdict(verdict, folder);
  };
  listener.on_recovered = [this](const Verdict& verdict) {
    record_.Recovered(verdict.reason);
    console_.Say(
        fmt::format("outlast: watch: {}: it moves again, nothing was done", verdict.reason));
  };
  monitor_ = std::make_unique<Monitor>(keeper_, host, std::move(listener), DeadlinesOf(options));
  keeper_.Attach(monitor_.get());
}

JobServices::~JobServices() {
  keeper_.Detach(monitor_.get());
  keeper_.Detach(saves_.get());
}

absl::Status JobServices::GoOn(Kept& kept) {
  OUTLAST_RETURN_IF_ERROR(saves_->GoOn(kept));
  return monitor_->GoOn(kept);
}

SaveObserver JobServices::Observer() {
  SaveObserver observer;
  observer.on_durable = [this](int64_t step, const PersistResult& result) {
    const int64_t now = ledger_.Now();
    ledger_.Append(CheckpointEntry{now - absl::ToInt64Nanoseconds(result.write_time), now,
                                   generation_, step, result.bytes, ""});
    record_.Saved(step, result.checkpoint, result.bytes, result.write_time);
  };
  observer.on_failed = [this](int64_t step, const absl::Status& error) {
    ledger_.Append(CheckpointEntry{ledger_.Now(), ledger_.Now(), generation_, step, 0,
                                   std::string(MessageOf(error))});
    record_.SaveFailed(step, std::string(MessageOf(error)));
    console_.Say(fmt::format("outlast: {}; training goes on", MessageOf(error)));
  };
  observer.on_uploaded = [this](int64_t step, const UploadResult& result) {
    record_.Uploaded(step, result.checkpoint, result.bytes, result.time);
  };
  observer.on_upload_failed = [this](int64_t step, const absl::Status& error) {
    record_.UploadFailed(step, std::string(MessageOf(error)));
    console_.Say(fmt::format("outlast: {}; training goes on", MessageOf(error)));
  };
  observer.on_restored = [this](uint64_t generation, RestoreSource source, int64_t step) {
    const int64_t now = ledger_.Now();
    const StateSource from = SourceOf(source);
    ledger_.Append(RestoreEntry{committed_at_ns_, now, generation, 0, step, 0, from});
    ledger_.Append(RollbackEntry{now, generation, step, std::max(step, reached_step_), from});
    record_.Restored(generation, from, step);
    if (source == RestoreSource::kNone && generation > 1) {
      console_.Say(fmt::format(
          "outlast: generation {} begins anew at step 0: there is no checkpoint, and memory holds "
          "no snapshot that fits its ranks",
          generation));
    }
  };
  observer.on_copied = [this](int64_t step, const std::string& partner, uint64_t bytes,
                              absl::Duration time) { record_.Copied(step, partner, bytes, time); };
  observer.on_note = [this](const std::string& line) {
    record_.Noted(line);
    console_.Say("outlast: " + line);
  };
  return observer;
}

void JobServices::Committed(const CommitGeneration& commit) {
  generation_ = commit.generation;
  committed_at_ns_ = ledger_.Now();
}

void JobServices::OnVerdict(const Verdict& verdict, const std::string& folder) {
  for (const Culprit& culprit : verdict.culprits) {
    hung_since_ns_[culprit.rank] = ledger_.Now() - absl::ToInt64Nanoseconds(culprit.age);
  }
  record_.Judged(verdict.reason, folder);
  console_.Say(fmt::format("outlast: watch: {}{}", verdict.reason,
                           folder.empty() ? "" : " (" + folder + ")"));
}

std::string JobServices::WhereIs(int slot) {
  const RankLook look = monitor_->Peek(slot);
  if (!look.has_data || look.progress.sections.empty()) return "";
  const OpenSection& section = look.progress.sections.back();
  return fmt::format(", in {} of step {} for {}", section.name, look.progress.step,
                     absl::FormatDuration(absl::Milliseconds(section.age_ns / 1'000'000)));
}

int64_t JobServices::LastProgressOf(const FaultRecord& fault) const {
  if (fault.fault_class != FaultClass::kHang) return 0;
  const auto found = hung_since_ns_.find(fault.rank);
  return found == hung_since_ns_.end() ? 0 : found->second;
}

void JobServices::PersistLast(int64_t last_step, std::function<void(bool)> done) {
  saves_->PersistLast([this, last_step, done = std::move(done)](const absl::Status& saved) {
    if (!saved.ok()) {
      console_.Say(fmt::format("outlast: the newest step in memory could not be saved: {}",
                               MessageOf(saved)));
      return done(false);
    }
    done(saves_->holds_last_state() && saves_->durable_step() >= last_step);
  });
}

}  // namespace outlast
