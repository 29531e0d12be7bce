#include "tests/fault/ckpt_job.h"
