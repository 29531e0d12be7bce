"""torchft_trainer.py FOLDER GROUP GROUPS LIGHTHOUSE: a torchft replica group of one rank, which all-reduces over gloo until FOLDER/stop is there.

FOLDER/reduced gets a line "participants group pid time.monotonic()" for each committed step.
"""
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

folder, group, groups, lighthouse = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
limit = timedelta(seconds=10)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
state = {"value": torch.ones(1024)}
manager = Manager(
    pg=ProcessGroupGloo(timeout=limit), min_replica_size=1, use_async_quorum=False, init_sync=False,
    load_state_dict=state.update, state_dict=lambda: state, replica_id=f"group_{group}",
    rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse, hostname="127.0.0.1",
    heartbeat_interval=timedelta(milliseconds=20), timeout=limit, quorum_timeout=timedelta(seconds=60), connect_timeout=limit)
log = os.open(f"{folder}/reduced", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    # The value tells all groups of the stop at one step.
    value = torch.full((1024,), 1.0 if os.path.exists(f"{folder}/stop") else 0.0)
    manager.start_quorum()
    manager.allreduce(value).wait()
    if not manager.should_commit():
        continue
    line = f"{manager.num_participants()} {group} {os.getpid()} {time.monotonic()}\n".encode()
    os.write(log, line)
    if value[0].item() > 0:
        break
    time.sleep(0.005)
os._exit(0)  # its threads are not waited for
