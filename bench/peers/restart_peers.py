"""Restarts inside of the surviving processes, as torchft and nvidia-resiliency-ext do them: started here, with the settings that make them quick.

They come from PyPI into the peers' virtual environment (checkpoint.py), each for itself: one that is not to be had costs its own figures only.

torchft             N replica groups of one rank over ProcessGroupGloo. A group that is killed is started again at once. Settings: quorum not
                    asynchronous, so that a new group takes part from its first step on; init_sync=False; heartbeat_interval 20 ms;
                    torchft_lighthouse --heartbeat_timeout_ms 100 --join_timeout_ms 100 --quorum_tick_ms 10 (as delivered 5000, 60000, 100: a survivor then waits for 5 s).
  .torchft            kill -9 of one group to the first step that all N commit, the new one included
  .torchft_survivors  the same, to the first step that the others commit
nvidia-resiliency-ext  its in-process Wrapper around the same loop. It starts no processes: after an exception all N go on; in place of a
                    killed rank one in reserve does (MaxActiveWorldSize(N), N + 1 processes). Settings: all intervals 100 ms (as delivered
                    1 s; below 100 ms it gets slower, some 5 s), last_call_wait 0, heartbeat_timeout 1 s, gloo's time-out 2 s (it ends the
                    collective of ranks that are no neighbours of the dead one), both stores outside of the ranks, so that any may die.
  .nvrx_exception     an exception in one rank to the first all-reduce of all N
  .nvrx_reserve       kill -9 of one rank to the first all-reduce of N ranks
"""
import importlib.metadata
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
PACKAGES = {"torchft": "0.2.0", "nvidia-resiliency-ext": "0.4.1"}
PATIENCE_S = 60


def why_missing(package):
    """Installs `package` where it is missing; None, or why it cannot be had."""
    wanted = PACKAGES[package]
    try:
        if importlib.metadata.version(package) == wanted:
            return None
    except importlib.metadata.PackageNotFoundError:
        pass
    torch = importlib.metadata.version("torch")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", f"torch=={torch.split('+')[0]}", f"{package}=={wanted}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return None if done.returncode == 0 else "not installed: " + " / ".join(done.stdout.strip().splitlines()[-2:])


def lines_of(path):
    text = path.read_text() if path.exists() else ""
    return [(int(a), int(b), int(c), float(d)) for a, b, c, d in (line.split() for line in text.splitlines() if line.count(" ") == 3)]


class Fleet:
    """Processes that are ended when it is left."""

    def __init__(self, folder):
        self.folder, self.all = folder, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        (self.folder / "stop").touch()
        for one in self.all:
            try:
                one.wait(3)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()

    def start(self, command, **variables):
        with (self.folder / "output").open("ab") as output:
            self.all.append(subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.folder,
                                             env=os.environ | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in variables.items()}))
        return self.all[-1]

    def wait_for(self, what, of):
        """The first true answer of `what` to the lines in "reduced"; while all of `of` live."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = what(lines_of(self.folder / "reduced"))
            if found:
                return found
            ended = [one for one in of if one.poll() is not None]
            if ended:
                raise RuntimeError(f"a rank ended with {ended[0].returncode}")
            time.sleep(0.005)
        raise RuntimeError(f"it did not come back within {PATIENCE_S} s")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def torchft_kill(folder, ranks, victim):
    with Fleet(folder) as fleet:
        port = free_port()
        house = fleet.start([pathlib.Path(sys.prefix) / "bin" / "torchft_lighthouse", "--bind", f"127.0.0.1:{port}", "--min_replicas", 1,
                             "--heartbeat_timeout_ms", 100, "--join_timeout_ms", 100, "--quorum_tick_ms", 10])

        def start(group):
            return fleet.start([sys.executable, HERE / "torchft_trainer.py", folder, group, ranks, f"http://127.0.0.1:{port}"])

        groups = [start(group) for group in range(ranks)]
        fleet.wait_for(lambda lines: {group for joined, group, _, _ in lines if joined == ranks} == set(range(ranks)), groups)
        time.sleep(0.5)
        killed = time.monotonic()
        groups[victim].kill()
        groups[victim].wait()
        groups[victim] = start(victim)
        others = [group for group in range(ranks) if group != victim]

        def first(lines, groups_wanted, joined_wanted, after):
            found = {}
            for joined, group, _, at in lines:
                if group in groups_wanted and joined == joined_wanted and at > after:
                    found.setdefault(group, at)
            return max(found.values()) if len(found) == len(groups_wanted) else None

        shrunk = fleet.wait_for(lambda lines: first(lines, others, ranks - 1, killed), groups)
        whole = fleet.wait_for(lambda lines: first(lines, range(ranks), ranks, shrunk), groups)
        if house.poll() is not None:
            raise RuntimeError("its lighthouse ended")
        return {"torchft": 1e3 * (whole - killed), "torchft_survivors": 1e3 * (shrunk - killed)}


def nvrx(folder, ranks, victim, by_kill):
    import torch.distributed as dist

    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    with Fleet(folder) as fleet:
        world = ranks + 1 if by_kill else ranks
        all_of_them = [fleet.start([sys.executable, "-W", "ignore", HERE / "nvrx_trainer.py", folder, ranks, stores[0].port], RANK=rank, WORLD_SIZE=world,
                                   MASTER_ADDR="127.0.0.1", MASTER_PORT=stores[1].port) for rank in range(world)]

        def train(lines, iteration):
            found = {rank: at for number, rank, _, at in lines if number >= iteration}
            return found if len(found) == ranks else None

        fleet.wait_for(lambda lines: train(lines, 0), all_of_them)
        time.sleep(0.5)
        broken = time.monotonic()
        if by_kill:
            all_of_them[victim].send_signal(signal.SIGKILL)
            del all_of_them[victim]
        else:
            (folder / f"raise.{all_of_them[victim].pid}").touch()
        after = fleet.wait_for(lambda lines: train(lines, 1), all_of_them)
        return {"nvrx_reserve" if by_kill else "nvrx_exception": 1e3 * (max(after.values()) - broken)}


# What is measured: (its figures, the package, how).
ALL = {
    "torchft": (["torchft", "torchft_survivors"], "torchft", torchft_kill),
    "nvrx_exception": (["nvrx_exception"], "nvidia-resiliency-ext", lambda folder, ranks, victim: nvrx(folder, ranks, victim, False)),
    "nvrx_reserve": (["nvrx_reserve"], "nvidia-resiliency-ext", lambda folder, ranks, victim: nvrx(folder, ranks, victim, True)),
}
OF = {
    "torchft": "torchft {}, the killed group started again",
    "torchft_survivors": "torchft {}, the surviving groups",
    "nvrx_exception": "nvidia-resiliency-ext {} in-process, an exception",
    "nvrx_reserve": "nvidia-resiliency-ext {} in-process, a process in reserve",
}
