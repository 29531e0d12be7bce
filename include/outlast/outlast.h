// Gathers the five core features: launch (Run), checkpoints, hang detection, metering, elastic
// restart (Generation).
#pragma once

#include "outlast/base/status.h"
#include "outlast/checkpoint/checkpointer.h"
#include "outlast/checkpoint/state.h"
#include "outlast/meter/flops.h"
#include "outlast/meter/meter.h"
#include "outlast/meter/peak.h"
#include "outlast/run/collectives.h"
#include "outlast/run/generation.h"
#include "outlast/run/run.h"
#include "outlast/watch/watchdog.h"
