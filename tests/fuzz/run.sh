#!/usr/bin/env bash
# run.sh FUZZER CORPUS RUNS MAX_LEN: a fixed number of runs from a fixed seed. An input that fails is
# left beside the fuzzer; give it to the fuzzer as its only argument to see it again.
set -euo pipefail
fuzzer=$1 corpus=$2 runs=$3 max_len=$4
found=$(mktemp -d)  # what is found goes here, and never into the corpus
trap 'rm -rf "$found"' EXIT
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
"$fuzzer" -seed=20261 -runs="$runs" -max_len="$max_len" -timeout=10 -malloc_limit_mb=256 -rss_limit_mb=2048 \
  -print_final_stats=1 -verbosity=0 -artifact_prefix="$fuzzer." "$found" "$corpus"
