#!/usr/bin/env python3
"""Runs clang++ -fsyntax-only with -Wthread-safety as an error over our sources in a compile database."""
import json
import pathlib
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

GCC_ONLY = {"-Wshadow=local"}


def check(entry):
    words = shlex.split(entry["command"])
    while "ccache" in pathlib.Path(words[0]).name:
        words = words[1:]
    kept, skip = [], False
    for word in words[1:]:
        if skip:
            skip = False
        elif word in ("-o", "-c"):
            skip = word == "-o"
        elif word not in GCC_ONLY:
            kept.append(word)
    command = ["clang++", "-fsyntax-only", "-Wthread-safety", "-Wno-unknown-warning-option", *kept]
    return subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)


def main():
    database = json.loads(pathlib.Path(sys.argv[1]).read_text())
    sources = [e for e in database if "/src/" in e["file"] and "/build/" not in e["file"]]
    with ThreadPoolExecutor(2) as pool:
        failed = [r for r in pool.map(check, sources) if r.returncode != 0]
    for result in failed:
        print(result.stderr)
    print(f"{len(sources)} sources, {len(failed)} with findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
