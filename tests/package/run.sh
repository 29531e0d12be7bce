#!/usr/bin/env bash
# Installs a build, then builds and runs strangers' projects against it: find_package, add_subdirectory, the examples.
#   run.sh CASE SOURCE_FOLDER BUILD_FOLDER      CASE: find_package | add_subdirectory | examples
set -euo pipefail
case=$1 source=$(cd "$2" && pwd) build=$(cd "$3" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

install_here() {
  cmake --install "$build" --prefix "$work/installed" >"$work/install.log" 2>&1 || { cat "$work/install.log"; exit 1; }
}
build_project() {  # SOURCE TARGET [cmake arguments]
  local project=$1 target=$2
  shift 2
  cmake -S "$project" -B "$work/build" -G Ninja "$@" >"$work/configure.log" 2>&1 || { cat "$work/configure.log"; exit 1; }
  cmake --build "$work/build" --target "$target" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
}

case $case in
  find_package)
    install_here
    build_project "$source/tests/package/find_package" stranger -DCMAKE_PREFIX_PATH="$work/installed"
    "$work/build/stranger" | grep -x 'rank 0 of 1 after 1s'
    "$work/installed/bin/outlast" run -n 2 --run-dir "$work" -- "$work/build/stranger" | sort | grep -x '\[1\] rank 1 of 2 after 1s'
    ;;
  add_subdirectory)
    build_project "$source/tests/package/add_subdirectory" stranger -DOUTLAST_SOURCE="$source"
    "$work/build/stranger" | grep -x 'rank 0 of 1 after 1s'
    ;;
  examples)
    install_here
    for example in 01_hello 02_trainer; do
      rm -rf "$work/build"
      build_project "$source/examples/$example" "$example" -DCMAKE_PREFIX_PATH="$work/installed"
      cp "$work/build/$example" "$work/"
    done
    "$work/installed/bin/outlast" run -n 2 --run-dir "$work" -- "$work/01_hello" "$work/hello" | grep -F 'rank 1: the sum is 4950'
    "$work/01_hello" "$work/by-hand" &
    hello=$!
    until [ -e "$work/by-hand/OUTLAST.json" ]; do sleep 0.02; done
    kill -TERM "$hello"
    code=0
    wait "$hello" || code=$?
    [ "$code" = 80 ]
    mkdir "$work/log"
    "$work/installed/bin/outlast" run -n 2 --run-dir "$work" -- "$work/02_trainer" --checkpoints "$work/ckpt" --log "$work/log" \
      --steps 10 --batch 16 | grep -F 'final loss'
    ;;
  *)
    echo "unknown case '$case'" >&2
    exit 2
    ;;
esac
