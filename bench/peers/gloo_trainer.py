"""gloo_trainer.py FOLDER: all-reduces over gloo until the file FOLDER/stop is there. A plain torch script: it knows nothing of who started it.

FOLDER/reduced gets a line "attempt rank pid time.monotonic()" after a process' first all-reduce.
"""
import os
import sys

import torch
import torch.distributed as dist

folder = sys.argv[1]
dist.init_process_group("gloo")
value = torch.ones(1024)
dist.all_reduce(value)
import time  # noqa: E402  (after what is measured)

now = time.monotonic()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
line = f"{attempt} {dist.get_rank()} {os.getpid()} {now}\n".encode()
log = os.open(f"{folder}/reduced", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, line)
while True:
    end = torch.tensor([1.0 if os.path.exists(f"{folder}/stop") else 0.0])
    dist.all_reduce(end)
    if end.item() > 0:
        break
    time.sleep(0.005)
dist.destroy_process_group()
