// What a job of several nodes allows: its worlds and the deadlines between agents and coordinator.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "outlast/elastic/job_options.h"
#include "outlast/elastic/membership.h"
#include "outlast/elastic/terms.h"

namespace outlast {

struct ElasticOptions {
  std::string job;  // its id
  // What the coordinator itself holds agents to, and who says so. What it leaves open is as the
  // first agent says.
  Terms terms;
  std::string terms_of = "the coordinator";
  JobOptions budget;  // faults, and the deadlines of workers; `world` is not used
  MembershipOptions membership;
  // Besides max_world: the first generation waits for them too, no longer than the last call.
  int spare_slots = 0;
  bool may_grow = true;  // at a committed step, when agents with free slots are there
  absl::Duration beat = absl::Seconds(1);
  absl::Duration beat_loss = absl::Seconds(3);      // silence after which a stream counts as lost
  absl::Duration rejoin_grace = absl::Seconds(10);  // a lost agent may come back with its workers
  absl::Duration prepare = absl::Seconds(20);       // PREPARE to the first PREPARED
  absl::Duration commit_ack = absl::Seconds(10);    // COMMIT to COMMITTED
  absl::Duration restore = absl::Seconds(120);      // discovery, read and vote of one candidate
  absl::Duration last_call = absl::Seconds(5);      // enough members are there: for the last ones
  absl::Duration join = absl::Seconds(600);         // for enough members
  absl::Duration grow_save = absl::Seconds(300);    // a save is waited for before the world grows
  absl::Duration grow_pause = absl::Seconds(60);    // from one growth to the next that saves first
  absl::Duration coordinator_grace = absl::Seconds(600);  // agents train on without a coordinator
  absl::Duration exclude_for = absl::Seconds(1800);
  // MB/s that the link of a new agent is to carry, each way, with a partner of the job; 0: it is
  // measured, and told.
  double peer_rate_floor = 0;
  double peer_rate_share = 0;                 // and this share of the median of the other links
  absl::Duration measure = absl::Seconds(8);  // one measurement
  absl::Duration measure_all = absl::Seconds(20);  // nobody waits longer for a node's link
};

// The rules by which deadlines nest; kInvalidArgument names both timers and their values.
absl::Status CheckDeadlines(const ElasticOptions& options);

}  // namespace outlast
