"""One of two processes that load checkpoints into a layout of their own, by PyTorch's reader.

reshard_worker.py STORE_FILE RANK OUT_FOLDER CHECKPOINT...
"""

import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

store, rank, out, *checkpoints = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
mesh = init_device_mesh("cpu", (2,))
for checkpoint in checkpoints:
    state = {
        "rows": distribute_tensor(torch.zeros(10, 20), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.zeros(6, 9, dtype=torch.bfloat16), mesh, [Shard(1)]),
        "replicated": torch.zeros(30, 16),
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(checkpoint))
    local = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in state.items()}
    torch.save(local, f"{out}/{pathlib.Path(checkpoint).name}.{rank}.pt")
dist.destroy_process_group()
# The mesh keeps its group's threads to the end. One that lets go of a tensor while the interpreter is
# being taken down aborts the process (torch 2.11, pytorch/pytorch#179291), so it is not taken down.
os._exit(0)
