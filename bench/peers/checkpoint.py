#!/usr/bin/env python3
"""checkpoint.py [--json FILE]: what saving and loading takes with torch.save, torch's distributed checkpoint (DCP) and safetensors.

Each pass saves the same tensors with each of them, in an order that turns around every other pass, makes the files durable, and loads
them into the tensors again: cold (the files' pages were dropped from the page cache) and warm. One JSON object a line; `value` is the
median. Rates are bytes of the tensors over the time, a save's with its fsync; the stall is the time until async_save returns.
The packages come from PyPI, into a virtual environment of their own (build/peers-venv, some 5 GB on disk).
`outlast_figures --peers FILE` puts them beside Outlast's figures.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import warnings

HERE = pathlib.Path(__file__).resolve().parent
VENV = HERE.parent.parent / "build" / "peers-venv"
REQUIREMENTS = HERE / "requirements.txt"


def enter_venv():
    """Goes on in the environment that has the packages, made on the first call."""
    if pathlib.Path(sys.prefix) == VENV:
        return
    python = VENV / "bin" / "python"
    mark = VENV / "requirements.txt"
    if not mark.exists() or mark.read_text() != REQUIREMENTS.read_text():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", "-r", REQUIREMENTS], check=True)
        shutil.copy(REQUIREMENTS, mark)
    os.execv(python, [str(python), *sys.argv])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=float, default=4e9, help="of F32 tensors (%(default)g)")
    parser.add_argument("--tensors", type=int, default=64, help="of equal size (%(default)s)")
    parser.add_argument("--passes", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--dir", type=pathlib.Path, default=VENV.parent, help="a folder on the disk to measure")
    parser.add_argument("--json", type=pathlib.Path, help="where the lines go (standard output)")
    return parser.parse_args()


def files_of(path):
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def make_durable(path):
    for place in [*files_of(path), path, path.parent]:
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget_pages(path):
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Peer:
    """One way to save. `save` returns the seconds that the caller stood still, or None where that is the whole save."""

    def __init__(self, name, of, suffix, save, load):
        self.name, self.of, self.suffix, self.save, self.load = name, of, suffix, save, load


def peers():
    import safetensors
    import safetensors.torch
    import torch
    import torch.distributed.checkpoint as dcp

    def copy_into(state, loaded):
        for name, tensor in state.items():
            tensor.copy_(loaded[name])

    def async_save(state, path):
        begun = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=path)
        stall = time.perf_counter() - begun
        future.result()
        return stall

    def dcp_load(state, path):
        dcp.load(state, checkpoint_id=path)

    torch_name, safetensors_name = f"torch {torch.__version__.split('+')[0]}", f"safetensors {safetensors.__version__}"
    return [
        Peer("torch", f"torch.save and load, {torch_name}", ".pt", lambda state, path: torch.save(state, path),
             lambda state, path: copy_into(state, torch.load(path, weights_only=True))),
        Peer("dcp", f"DCP save and load, {torch_name}", "", lambda state, path: dcp.save(state, checkpoint_id=path) and None, dcp_load),
        Peer("dcp.async_save", f"DCP async_save, {torch_name}", "", async_save, None),
        Peer("safetensors", f"save_file and load_file, {safetensors_name}", ".safetensors",
             lambda state, path: safetensors.torch.save_file(state, path),
             lambda state, path: copy_into(state, safetensors.torch.load_file(path))),
    ]


def measure(peer, state, path, add):
    """One save and its loads."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())

    def timed(call):
        os.sync()
        begun = time.perf_counter()
        result = call()
        return time.perf_counter() - begun, result

    def save():
        stall = peer.save(state, path)
        make_durable(path)
        return stall

    seconds, stall = timed(save)
    if isinstance(stall, float):
        add(f"{peer.name}.stall", peer.of, 1e3 * stall, "ms")
    add(f"{peer.name}.rate" if "." in peer.name else f"{peer.name}.save.rate", peer.of, size / 1e9 / seconds, "GB/s")
    if peer.load:
        wanted = next(iter(state.values())).clone()
        for how in ("cold", "warm"):
            if how == "cold":
                forget_pages(path)
            next(iter(state.values())).zero_()
            seconds, _ = timed(lambda: peer.load(state, path))
            if not next(iter(state.values())).equal(wanted):
                raise RuntimeError(f"{peer.name}: other bytes came back")
            add(f"{peer.name}.load.{how}", f"{peer.of}, {how}", size / 1e9 / seconds, "GB/s")
    remove(path)


def main():
    options = arguments()
    enter_venv()
    import torch

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    each = int(options.bytes) // options.tensors // 4
    generator = torch.Generator().manual_seed(1)
    state = {f"layers.{i}.weight": torch.rand(each, generator=generator) for i in range(options.tensors)}
    folder = options.dir / f"outlast-peers-{os.getpid()}"
    folder.mkdir(parents=True)
    samples, about = {}, {}

    def add(name, of, value, unit):
        samples.setdefault(name, []).append(value)
        about[name] = (of, unit)

    try:
        for number in range(options.passes):
            turn = peers()[:: -1 if number % 2 else 1]
            for peer in turn:
                measure(peer, state, folder / f"{peer.name}-{number}{peer.suffix}", add)
                print(f"pass {number + 1}: {peer.name} done", file=sys.stderr)
    finally:
        shutil.rmtree(folder)
    out = options.json.open("w", encoding="utf-8") if options.json else sys.stdout
    for name, values in samples.items():
        of, unit = about[name]
        line = {"name": name, "of": of, "value": statistics.median(values), "unit": unit, "n": len(values), "min": min(values),
                "max": max(values), "bytes": each * 4 * options.tensors, "tensors": options.tensors, "load": os.getloadavg()[0]}
        print(json.dumps(line), file=out)


if __name__ == "__main__":
    main()
