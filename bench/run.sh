#!/usr/bin/env bash
# run.sh BUILD_FOLDER [AREA] [--json FILE]: measures, in a folder of the build's disk.
set -euo pipefail
build=$1
shift
exec "$build/bench/outlast_figures" --dir "$build/bench" "$@"
