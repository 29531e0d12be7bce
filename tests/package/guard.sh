#!/usr/bin/env bash
# The layering guard: a copy of the sources with one forbidden include must not configure, and the message must name it.
#   guard.sh SOURCE_FOLDER
set -euo pipefail
source=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$source"/{CMakeLists.txt,cmake,include,src} "$work/"
expect_refusal() {  # WHAT WANTED_TEXT
  if cmake -S "$work" -B "$work/build" -DOUTLAST_BUILD_TESTS=OFF -DOUTLAST_BUILD_BENCH=OFF -DOUTLAST_BUILD_EXAMPLES=OFF >"$work/log" 2>&1; then
    echo "$1 was configured"
    exit 1
  fi
  grep -F "$2" "$work/log" || { cat "$work/log"; exit 1; }
}
echo '#include "outlast/run/run.h"' >>"$work/include/outlast/base/clock.h"
expect_refusal "an include of a higher module" "module 'base' may include"
cp "$source/include/outlast/base/clock.h" "$work/include/outlast/base/clock.h"
sed -i 's/^outlast_module(base)$/outlast_module(base DEPS run)/' "$work/CMakeLists.txt"
expect_refusal "a dependency on a module below" "is not declared above it"
