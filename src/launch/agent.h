// The agent of one node: starts the workers, keeps the job going, and says at the end how it went.
#pragma once

#include "launch/adoption.h"
#include "launch/guardian.h"
#include "launch/options.h"
#include "outlast/base/id.h"

namespace outlast {

// Runs the job to its end and returns the exit code (outlast/elastic/exit_code.h). One line on
// standard error says why it is not 0. `guardian` was forked before this process had other threads.
int RunAgent(const LaunchOptions& options, const Id128& run_id, Guardian& guardian);

// Goes on with a job whose agent was killed, in the same RUN_DIR.
int RunAdoptingAgent(const LaunchOptions& options, FoundJob job);

}  // namespace outlast
