#!/usr/bin/env bash
# Trains the same model twice with 4 ranks: undisturbed, and while one rank is killed, another stopped, and at last the whole
# job killed and started again. Then shows what the faults cost, and checks that both runs ended with the same bits.
#   demo.sh BUILD_FOLDER
set -euo pipefail
build=$(cd "${1:?usage: demo.sh BUILD_FOLDER}" && pwd)
outlast=$build/outlast
trainer=$build/examples/02_trainer/02_trainer
check=$build/examples/02_trainer/check_consumption
ranks=4 steps=300
options=(--steps $steps --batch 64 --seed 1 --checkpoint-every 25 --watch-floor 2 --watch-poll 0.2)
work=$build/../demo/$(date +%Y%m%d-%H%M%S)-$$
mkdir -p "$work"
work=$(cd "$work" && pwd)
job=""
trap '[ -z "$job" ] || kill -KILL "$job" 2>/dev/null || true' EXIT

say() { printf '%s\n' "$*"; }
# The newest step of a run, from rank 0's log; -1 before the first.
newest_step() { tail -n 1 "$work/$1/losses.tsv" 2>/dev/null | cut -f 3 | grep -E '^[0-9]+$' || echo -1; }
newest_loss() { tail -n 1 "$work/$1/losses.tsv" 2>/dev/null | cut -f 4; }

progress() {
  local step=$1 loss=$2 width=40 filled
  [ -t 1 ] || return 0
  filled=$((step * width / steps))
  printf '\r  [%s%s] step %3d of %d   loss %s nats a byte   ' "$(printf '%*s' $filled '' | tr ' ' '#')" \
    "$(printf '%*s' $((width - filled)) '' | tr ' ' .)" "$step" $steps "$loss"
}

start() {
  mkdir -p "$work/$1"
  "$outlast" run -n $ranks --run-dir "$work/$1/runs" -- "$trainer" --checkpoints "$work/$1/checkpoints" --log "$work/$1" \
    "${options[@]}" >>"$work/$1/console.log" 2>&1 </dev/null &
  job=$!
}

# Waits until the run has come to a step; fails when the job ends before, or stands still for a minute.
reach() {
  local name=$1 wanted=$2 step last=-2 since=$SECONDS
  while step=$(newest_step "$name"); [ "$step" -lt "$wanted" ]; do
    progress $((step + 1)) "$(newest_loss "$name")"
    kill -0 "$job" 2>/dev/null || { say "the job ended at step $step; its console:"; tail -n 20 "$work/$name/console.log"; exit 1; }
    [ "$step" = "$last" ] || { last=$step since=$SECONDS; }
    [ $((SECONDS - since)) -lt 60 ] || { say "no step for a minute at step $step"; tail -n 20 "$work/$name/console.log"; exit 1; }
    sleep 0.2
  done
  progress $((step + 1)) "$(newest_loss "$name")"
}

finish() {
  reach "$1" $((steps - 1))
  local code=0
  wait "$job" || code=$?
  job=""
  [ ! -t 1 ] || printf '\n'
  [ $code = 0 ] || { say "the job ended with $code; its console:"; tail -n 20 "$work/$1/console.log"; exit 1; }
}

# The process of a rank, from the events of the newest RUN_DIR.
pid_of() {
  grep '"event":"worker_started"' "$work/$1/runs/latest/events.jsonl" | grep "\"rank\":$2," | tail -n 1 | sed -E 's/.*"pid":([0-9]+).*/\1/'
}

note() {
  [ ! -t 1 ] || printf '\n'
  say "  step $(($(newest_step disturbed) + 1)), loss $(newest_loss disturbed): $1"
}

say "A language model of 1,046,144 parameters, $ranks ranks, $steps steps of 64 samples, on the licence texts of this machine."
say "All files: $work"
say "1. Undisturbed"
begin=$SECONDS
start undisturbed
finish undisturbed
say "  $((SECONDS - begin)) s"

say "2. The same, disturbed"
begin=$SECONDS
start disturbed
reach disturbed 80
note "SIGKILL to rank 2 (process $(pid_of disturbed 2))"
kill -KILL "$(pid_of disturbed 2)"
reach disturbed 160
note "SIGSTOP to rank 1 (process $(pid_of disturbed 1))"
kill -STOP "$(pid_of disturbed 1)"
reach disturbed 230
note "SIGKILL to the agent (process $job), and with it to the whole job"
kill -KILL "$job"
wait "$job" 2>/dev/null || true
say "  the same command again"
start disturbed
finish disturbed
say "  $((SECONDS - begin)) s"

say ""
"$outlast" report "$work"/disturbed/runs/run-*

say ""
failed=0
verdict() { if [ "$2" = yes ]; then say "  ok      $1"; else say "  FAILED  $1"; failed=1; fi; }
read -r quiet_loss quiet_value entropy quiet_state <"$work/undisturbed/result.txt"
read -r loss value _ state <"$work/disturbed/result.txt"
same=no; [ "$loss $state" = "$quiet_loss $quiet_state" ] && same=yes
verdict "final loss $value ($loss) and all weights equal the undisturbed run's bit for bit ($quiet_value)" $same
verdict "it lies below the text's unigram entropy, $entropy nats a byte" "$(awk "BEGIN{print ($value < $entropy) ? \"yes\" : \"no\"}")"
proof=yes; counted=$("$check" --checkpoints none --log "$work/disturbed" "${options[@]}" 2>&1) || proof=no
verdict "$counted" $proof
lost=$("$outlast" report --json "$work"/disturbed/runs/run-* | sed -nE 's/.*"steps_run_again": ?([0-9]+).*/\1/p')
counted_lost=$(sed -nE 's/.*; ([0-9]+) steps were lost.*/\1/p' <<<"$counted")
equal=no; [ "$lost" = "$counted_lost" ] && equal=yes
verdict "the ledger counts the same lost steps: $lost" $equal
exit $failed
