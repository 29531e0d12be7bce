"""nvrx_trainer.py FOLDER ACTIVE STORE_PORT: a rank under nvidia-resiliency-ext's in-process Wrapper, which all-reduces over gloo until FOLDER/stop is there.

FOLDER/reduced gets a line "iteration rank pid time.monotonic()" after a rank's first all-reduce of each iteration. A rank whose
FOLDER/raise.PID is there raises an exception. ACTIVE ranks train, those beyond them are in reserve.
"""
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

folder, active, store_port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
base_store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
tenth = timedelta(milliseconds=100)


@inprocess.Wrapper(
    store_kwargs={"timeout": timedelta(seconds=60)},
    rank_assignment=inprocess.Compose(inprocess.rank_assignment.MaxActiveWorldSize(active), inprocess.rank_assignment.ShiftRanks()),
    monitor_thread_interval=tenth, monitor_process_interval=tenth, heartbeat_interval=tenth, progress_watchdog_interval=tenth,
    heartbeat_timeout=timedelta(seconds=1), last_call_wait=timedelta(0))
def train(call_wrapper: inprocess.CallWrapper = None):
    store = dist.PrefixStore(str(call_wrapper.iteration), base_store)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=active, timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(1024))
    now = time.monotonic()
    log = os.open(f"{folder}/reduced", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, f"{call_wrapper.iteration} {dist.get_rank()} {os.getpid()} {now}\n".encode())
    os.close(log)
    while True:
        end = torch.tensor([1.0 if os.path.exists(f"{folder}/stop") else 0.0])
        dist.all_reduce(end)
        if end.item() > 0:
            break
        if os.path.exists(f"{folder}/raise.{os.getpid()}"):
            raise RuntimeError("a fault")
        time.sleep(0.005)
    dist.destroy_process_group()


train()
