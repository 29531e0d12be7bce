// /metrics: a status and its totals as Prometheus text 0.0.4 or OpenMetrics 1.0.
//
// Names, all with the label `job`, none with a rank or a step as label:
//   outlast_run_info{run_id}                   1
//   outlast_run_seconds                        since the start
//   outlast_generation                         outlast_world_size
//   outlast_ranks{state}                       places here by state; each state has its line
//   outlast_step                               the newest that a rank here is in
//   outlast_progress_age_seconds               of the rank here that stands still longest
//   outlast_steps_total                        finished by the lowest slot here
//   outlast_step_duration_seconds              their histogram
//   outlast_step_part_seconds_total{part}      their data, forward, backward, optimizer,
//                                              checkpoint_stall and other: sum = the histogram's
//   outlast_collective_wait_seconds_total      inside these parts
//   outlast_tokens_total, outlast_samples_total, outlast_model_flops_total     of all ranks here
//   outlast_mfu_ratio                          of the last 64 steps; absent while it is unknown
//   outlast_faults_total{class}                outlast_workers_started_total
//   outlast_restarts_used, outlast_restarts_allowed            since the last committed step; of
//       several nodes the first one is absent but on the leading node, once a fault was charged
//   outlast_saves_total{result}                durable, failed
//   outlast_saved_bytes_total
//   outlast_checkpoint_step, outlast_checkpoint_timestamp_seconds    absent before the first one
//   outlast_stop_requested                     1 once this agent was asked to stop
//   outlast_stop_service_seconds               from then until a checkpoint was durable; absent
//   before
// Counters never fall while the agent lives, whatever dies, and the number of series stays.
#pragma once

#include <string>
#include <string_view>

#include "launch/job_status.h"
#include "launch/step_totals.h"

namespace outlast {

enum class MetricsFormat { kPrometheus, kOpenMetrics };

// OpenMetrics only for those who ask for it.
MetricsFormat FormatFor(std::string_view accept);
std::string_view ContentTypeOf(MetricsFormat format);

std::string MetricsText(const JobStatus& status, const RunTotals& totals, MetricsFormat format);

}  // namespace outlast
