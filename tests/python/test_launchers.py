"""Programs that are linked with Outlast, under torchrun of PyTorch."""

import json
import os
import pathlib
import subprocess
import sys

TOOL = pathlib.Path(os.environ["OUTLAST_BUILD"]) / "outlast"


def test_torchrun_gives_each_process_its_rank(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", TOOL,
         "env", "--json"], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=True)
    places = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted((place["launcher"], place["rank"], place["world"]) for place in places) == [
        ("torchrun", 0, 2), ("torchrun", 1, 2)]
