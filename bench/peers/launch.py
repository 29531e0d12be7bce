#!/usr/bin/env python3
"""launch.py [--json FILE]: what starting, and going on after a kill -9, take under torchrun and under `outlast run`.

Each pass measures each case under both, in an order that turns around every other pass:
  launch.start_2          two processes that do nothing, from the command to its exit
  restart.python_gloo_N   a torch script that all-reduces over gloo: kill -9 of one of N ranks to the first all-reduce of all N
  restart.term_ignored    a rank fails and its peer ignores SIGTERM: from the failure to when both run again

One JSON object a line; `value` is the median. The peer's line has the name of Outlast's figure, so that `outlast_figures --peers FILE` puts
it beside ours; the same case under `outlast run` is NAME.outlast, and with a warm template that has imported torch NAME.outlast_template. Beside
restart.python_gloo_N stand, as NAME.torchft... and NAME.nvrx..., restarts inside of the survivors' processes (restart_peers.py has what they measure, and
how); a figure that cannot be had is null, with the reason. torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: with its stock
settings a gloo job is never restarted after kill -9, since the new ranks read the dead rank's address from the shared store.
The packages come from PyPI, into a virtual environment of their own (build/peers-venv, some 5 GB on disk).
"""
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time

import checkpoint  # the virtual environment
import restart_peers

HERE = pathlib.Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build"
GRACE_S = 0.5
PATIENCE_S = 120


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--term-passes", type=int, default=2, help="of the peer that ignores TERM: half a minute each (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="of the gloo script (%(default)s)")
    parser.add_argument("--only", default="", help="only cases whose names contain this")
    parser.add_argument("--outlast", type=pathlib.Path, default=BUILD / "release" / "outlast", help="the tool (%(default)s)")
    parser.add_argument("--outlast-flags", default="", help="more flags of `outlast run` for the gloo script")
    parser.add_argument("--json", type=pathlib.Path, help="where the lines go (standard output)")
    return parser.parse_args()


class Launcher:
    """How a world is started. `flags` are those of the gloo script."""

    def __init__(self, of, command, variables, flags=()):
        self.of, self.command, self.variables, self.flags = of, command, variables, list(flags)

    def start(self, ranks, flags, program, folder):
        command = [*self.command(ranks), *flags, *program]
        with (folder / "output").open("ab") as output:
            return subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                    env=os.environ | self.variables | {"OMP_NUM_THREADS": "1"})


def launchers(options):
    import torch

    torchrun = [pathlib.Path(sys.prefix) / "bin" / "torchrun", "--standalone"]
    variables = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}

    def outlast(of, flags):
        return Launcher(of, lambda ranks: [options.outlast, "run", "-n", str(ranks)], variables, options.outlast_flags.split() + flags)

    template = ["--template", "python3 -m outlast_template torch torch.distributed"]
    peer = Launcher(f"torchrun {torch.__version__.split('+')[0]}", lambda ranks: [*torchrun, "--nproc-per-node", str(ranks)],
                    {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    return {"outlast": outlast("outlast run", []), "outlast_template": outlast("outlast run --template", template), "torchrun": peer}


def lines_of(path):
    """Of a log: (attempt, rank, pid, seconds)."""
    text = path.read_text() if path.exists() else ""
    return [(int(a), int(r), int(p), float(t)) for a, r, p, t in (line.split() for line in text.splitlines() if line.count(" ") == 3)]


def wait_for(job, path, attempt, ranks):
    """The lines of all ranks in `attempt`, or of a later one."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = {rank: (pid, at) for a, rank, pid, at in lines_of(path) if a >= attempt}
        if len(found) == ranks:
            return found
        if job.poll() is not None:
            raise RuntimeError(f"it ended with {job.returncode}")
        time.sleep(0.002)
    raise RuntimeError("it did not come back")


def wait_for_template(job, launcher, folder):
    """Until the template of `launcher`, if it has one, has imported what it shall: a job is an hour old when it loses a rank, not a second."""
    deadline = time.monotonic() + PATIENCE_S
    events = folder / "outlast-runs" / "latest" / "events.jsonl"
    while "--template" in launcher.flags and '"template_ready"' not in events.read_text():
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("its template was never ready")
        time.sleep(0.05)


def end(job):
    """Ends what still runs, the quick way."""
    try:
        job.wait(10)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGINT)
        try:
            job.wait(40)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def start_2(launcher, folder):
    begun = time.monotonic()
    no_python = ["--no-python"] if "torchrun" in launcher.of else ["--"]
    job = launcher.start(2, [], [*no_python, "/bin/true"], folder)
    if job.wait() != 0:
        raise RuntimeError(f"it ended with {job.returncode}")
    return 1e3 * (time.monotonic() - begun)


def kill_to_reduce(launcher, folder, ranks, victim):
    if isinstance(launcher, Inside):
        return launcher.kill_to_reduce(folder, ranks, victim)
    job = launcher.start(ranks, ["--max-restarts", "3", *launcher.flags], [str(HERE / "gloo_trainer.py"), str(folder)], folder)
    try:
        before = wait_for(job, folder / "reduced", 0, ranks)
        wait_for_template(job, launcher, folder)
        time.sleep(0.3)
        killed = time.monotonic()
        os.kill(before[victim][0], signal.SIGKILL)
        after = wait_for(job, folder / "reduced", 1, ranks)
        return 1e3 * (max(at for _, at in after.values()) - killed)
    finally:
        (folder / "stop").touch()
        end(job)


def term_ignored(launcher, folder):
    flags = ["--max-restarts", "3"] + (["--grace", str(GRACE_S)] if launcher.of.startswith("outlast") else [])
    job = launcher.start(2, flags, [str(HERE / "stubborn.py"), str(folder)], folder)
    try:
        after = wait_for(job, folder / "started", 1, 2) if job.poll() is None else {}
        return 1e3 * (max(at for _, at in after.values()) - float((folder / "failed").read_text()))
    finally:
        end(job)


def cases(options):
    """Name -> how one launcher is measured, given the pass' number; and how many passes."""
    found = {"launch.start_2": (lambda one, folder, number: start_2(one, folder), options.passes)}
    for ranks in options.ranks:
        found[f"restart.python_gloo_{ranks}"] = (
            lambda one, folder, number, ranks=ranks: kill_to_reduce(one, folder, ranks, number % ranks), options.passes)
    found["restart.term_ignored"] = (lambda one, folder, number: term_ignored(one, folder), options.term_passes)
    return {name: case for name, case in found.items() if options.only in name}


class Inside:
    """A restart peer in place of a launcher."""

    def __init__(self, who):
        self.names, self.package, self.measure = restart_peers.ALL[who]
        self.missing = restart_peers.why_missing(self.package)
        self.of = restart_peers.OF[who].format(restart_peers.PACKAGES[self.package])

    def kill_to_reduce(self, folder, ranks, victim):
        if self.missing:
            raise RuntimeError(self.missing)
        return self.measure(folder, ranks, victim)


def last_words(path):
    """The last exception in what a peer said, else its last line."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()] if path.exists() else []
    errors = [line for line in lines if "Error:" in line]
    return (errors or lines or [""])[-1][-300:]


def measure_all(options, folder, known):
    """(name, who) -> samples, and why there are none."""
    samples, reasons, number = {}, {}, 0
    for name, (measure, passes) in cases(options).items():
        for turn in range(passes):
            for who in list(known)[:: -1 if turn % 2 else 1]:
                is_inside = isinstance(known[who], Inside)
                if "gloo" not in name and (is_inside or who == "outlast_template"):
                    continue  # what they save is a slow start
                names = known[who].names if is_inside else [who]
                number += 1
                place = folder / str(number)
                place.mkdir(parents=True)
                try:
                    value = measure(known[who], place, turn)
                except (RuntimeError, OSError) as why:
                    print(f"{name} under {known[who].of}: {why}:\n{last_words(place / 'output')}", file=sys.stderr)
                    for one in names:
                        reasons[name, one] = " ".join(f"{why}: {last_words(place / 'output')}".split()).rstrip(": ")
                    continue
                for one, sample in (value if is_inside else {who: value}).items():
                    samples.setdefault((name, one), []).append(sample)
                    print(f"{name} under {one}: {sample:.1f} ms", file=sys.stderr)
    return samples, reasons


def main():
    options = arguments()
    checkpoint.enter_venv()
    folder, known = BUILD / f"launch-peers-{os.getpid()}", launchers(options)
    if any("gloo" in name for name in cases(options)):
        known |= {who: Inside(who) for who in restart_peers.ALL}
    version = restart_peers.PACKAGES
    of = {who: known[who].of for who in known if not isinstance(known[who], Inside)} | {
        one: restart_peers.OF[one].format(version[package]) for names, package, _ in restart_peers.ALL.values() for one in names}
    try:
        samples, reasons = measure_all(options, folder, known)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(options.json.open("w", encoding="utf-8")) if options.json else sys.stdout
        for name, who in list(samples) + [at for at in reasons if at not in samples]:
            values = samples.get((name, who), [])
            line = {"name": name if who == "torchrun" else f"{name}.{who}", "of": of[who], "value": statistics.median(values) if values else None,
                    "unit": "ms", "n": len(values), "min": min(values, default=None), "max": max(values, default=None), "load": os.getloadavg()[0]}
            if (name, who) in reasons:
                line["reason"] = reasons[name, who]  # of the newest pass that failed
            print(json.dumps(line), file=out)


if __name__ == "__main__":
    main()
