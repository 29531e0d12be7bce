#!/usr/bin/env python3
"""torture.py BUILD [NAME...] [--check [--built BINARY...]]: the torture cases of torture.txt, one line each: name, ok | FAILED | missing | skipped, seconds.

The tests are asked of ctest, so that each runs as CI runs it. With NAME only these cases; with --check nothing runs: every test that the
table names must be there, in one of the binaries of --built if that is given. Ends with 1 when a case failed or has no test; a case that is "not built" says so, and does not count.
"""
import argparse
import fnmatch
import json
import pathlib
import subprocess
import sys
import time

TABLE = pathlib.Path(__file__).resolve().parent / "torture.txt"
NOT_BUILT = "not built"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--check", action="store_true", help="only whether each case has its tests")
    parser.add_argument("--built", nargs="*", help="the binaries that are built for the cases")
    return parser.parse_args()


def read_table():
    """Name -> patterns of tests, or the text behind a case that is not built."""
    cases = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, _, tests = line.partition("  ")
        if name in cases or not tests.strip():
            sys.exit(f"{TABLE.name}: {name}: twice, or without a test")
        tests = tests.strip()
        cases[name] = tests if tests.startswith(NOT_BUILT) else [test.strip() for test in tests.split(",")]
    return cases


def all_tests(build):
    """Name -> command, as ctest knows them."""
    listed = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], check=True, capture_output=True, text=True)
    return {test["name"]: test["command"] for test in json.loads(listed.stdout)["tests"] if "command" in test}


def run(command, log):
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace")
    log.write(ended.stdout)
    if ended.returncode != 0:
        return "FAILED"
    return "skipped" if "[  SKIPPED ]" in ended.stdout else "ok"


def not_built_for(pattern, known, built):
    """A test of `pattern` whose binary is none of `built` (None: all are)."""
    if built is None:
        return None
    return next((test for test in fnmatch.filter(known, pattern) if pathlib.Path(known[test][0]).name not in built), None)


def judge(patterns, known, options, results, log):
    """What became of a case, and the test that decided it. `results`: of tests that have run, for cases that share one."""
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            return "missing", pattern
        if stranger := not_built_for(pattern, known, options.built):
            return "missing", f"{stranger}: {pathlib.Path(known[stranger][0]).name} is not built for it"
    worst = ("ok", "")
    for pattern in [] if options.check else patterns:
        for test in fnmatch.filter(known, pattern):
            found = results[test] = results.get(test) or run(known[test], log)
            if found == "FAILED":
                return found, test
            worst = (found, test) if found != "ok" else worst
    return worst


def main():
    options = arguments()
    cases, known = read_table(), all_tests(options.build)
    strangers = [name for name in options.names if name not in cases]
    if strangers:
        sys.exit(f"no such case: {', '.join(strangers)}; they are listed in {TABLE}")
    counts, results, log_path = {}, {}, options.build / "torture.log"
    with log_path.open("w", encoding="utf-8") as log:
        for name in options.names or cases:
            begun, tests = time.monotonic(), cases[name]
            state, detail = (NOT_BUILT, tests) if isinstance(tests, str) else judge(tests, known, options, results, log)
            counts[state] = counts.get(state, 0) + 1
            print(f"{name:<42} {state:<9} {time.monotonic() - begun:6.1f} s{'' if state == 'ok' else '  ' + detail}", flush=True)
    print(", ".join(f"{count} {state}" for state, count in counts.items()) + ("" if options.check else f" (all output: {log_path})"))
    return 1 if counts.get("FAILED") or counts.get("missing") else 0


if __name__ == "__main__":
    sys.exit(main())
