"""Our files in other programs' readers: Python's safetensors, and PyTorch's distributed checkpoint.

The names and bytes are those of checkpoint_writer.cc. Comparisons are of bytes, so that NaNs count too.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

BUILD = pathlib.Path(os.environ["OUTLAST_BUILD"])
SOURCE = pathlib.Path(__file__).resolve().parents[2]
SHARED = pathlib.Path(os.environ.get("OUTLAST_SHARED_DIR", SOURCE.parent / "shared"))
GOLDEN = SOURCE / "tests" / "checkpoint" / "testdata" / "golden"
WORKER = pathlib.Path(__file__).with_name("reshard_worker.py")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# What torch has a type for, and its own readers keep (torch 2.11).
TORCH_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
TENSORS = {
    "rows": ([10, 20], torch.float32), "columns": ([6, 9], torch.bfloat16),
    "replicated": ([30, 16], torch.float32), "scalar": ([], torch.int64),
    "none": ([0, 5], torch.float32), "layers/0/ü ключ": ([3, 2], torch.float16),
    **{"dtype." + name: ([4, 8], dtype) for name, dtype in TORCH_TYPES.items()},
}


def outlast(*arguments):
    command = [BUILD / "outlast", "ckpt", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def bytes_of(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def expected(name):
    shape, dtype = TENSORS[name]
    count = torch.empty(shape, dtype=dtype).nbytes
    values = [(31 * i + sum(name.encode())) % 256 for i in range(count)]
    return bytes(v & 1 if dtype == torch.bool else v for v in values)


def check(state, names=None):
    for name in names or TENSORS:
        shape, dtype = TENSORS[name]
        assert list(state[name].shape) == shape, name
        assert state[name].dtype == dtype, name
        assert bytes_of(state[name]) == expected(name), name


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interop") / "root"
    subprocess.run([BUILD / "outlast_checkpoint_writer", folder], check=True, timeout=60)
    return folder


def checkpoint_of(root, step):
    (folder,) = root.glob(f"step-{step:012}-*")
    return folder


# Three ranks wrote the first, one the second; the golden ones are as an earlier version wrote them.
@pytest.fixture(params=["fresh, 3 ranks", "fresh, 1 rank", "golden, 3 ranks", "golden, 1 rank"])
def checkpoint(request, root):
    where = GOLDEN if request.param.startswith("golden") else root
    return checkpoint_of(where, 1 if request.param.endswith("3 ranks") else 2)


def test_types_that_torch_lacks_open_by_their_names(root):
    with safetensors.safe_open(checkpoint_of(root, 3) / "w00000.safetensors", framework="np") as f:
        types = {key: f.get_slice(key).get_dtype() for key in f.keys()}
    assert types == {"dtype." + name: name for name in ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0")}


def zeros():
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in TENSORS.items()}


def test_each_shard_opens_in_safetensors(checkpoint):
    receipts = [json.loads(path.read_text()) for path in sorted(checkpoint.glob("*.receipt.json"))]
    assert receipts
    for receipt in receipts:
        with safetensors.safe_open(checkpoint / receipt["file"]["name"], framework="pt") as shard:
            boxes = {box["key"]: box for box in receipt["tensors"]}
            assert set(shard.keys()) == set(boxes)
            for key, box in boxes.items():
                shape = shard.get_slice(key).get_shape()
                assert list(shape) == box["extent"], key


def test_the_boxes_make_up_the_tensors(checkpoint):
    state = zeros()
    for path in sorted(checkpoint.glob("*.receipt.json")):
        receipt = json.loads(path.read_text())
        with safetensors.safe_open(checkpoint / receipt["file"]["name"], framework="pt") as shard:
            for box in receipt["tensors"]:
                if box["name"] not in state:
                    continue  # a type that torch lacks
                place = tuple(slice(o, o + e) for o, e in zip(box["offsets"], box["extent"]))
                state[box["name"]][place] = shard.get_tensor(box["key"])
    check(state)


def test_opens_in_dcp(checkpoint):
    state = zeros()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    check(state)


@pytest.fixture(scope="module")
def resharded(root, tmp_path_factory):
    """Two processes read three ranks' files, and one's, into rows and columns of their own."""
    out = tmp_path_factory.mktemp("resharded")
    checkpoints = [checkpoint_of(where, step) for where in (root, GOLDEN) for step in (1, 2)]
    workers = [
        subprocess.Popen([sys.executable, WORKER, out / "store", str(rank), out, *checkpoints])
        for rank in range(2)
    ]
    assert [worker.wait(timeout=240) for worker in workers] == [0, 0]
    return out


def test_reshards_in_dcp(checkpoint, resharded):
    name = checkpoint.name
    halves = [torch.load(resharded / f"{name}.{rank}.pt", weights_only=True) for rank in range(2)]
    check({"rows": torch.cat([half["rows"] for half in halves], 0),
           "columns": torch.cat([half["columns"] for half in halves], 1),
           "replicated": halves[1]["replicated"]}, ["rows", "columns", "replicated"])


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 1000])
def test_an_export_opens_in_safetensors_and_in_dcp(root, tmp_path, shard_bytes):
    outlast("export", checkpoint_of(root, 1), "--hf", tmp_path / "out", "--shard-bytes", shard_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 1000)
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
    state = {}
    for file in files:
        with safetensors.safe_open(file, framework="pt") as shard:
            assert shard.metadata()["format"] == "pt"
            for key in shard.keys():
                if key in TENSORS:
                    state[key] = shard.get_tensor(key)
    check(state)
    state = zeros()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    check(state)


def test_import_takes_and_refuses_what_safetensors_does(tmp_path):
    fixtures = sorted((SHARED / "cases" / "fixtures" / "st").glob("*.safetensors"))
    if not fixtures:
        assert os.environ.get("CI") != "true", f"no fixtures at {SHARED}"
        pytest.skip(f"no fixtures at {SHARED}")
    stricter = {"bad_dup.safetensors"}  # a name twice: the format forbids it, safetensors 0.8 reads it
    for number, file in enumerate(fixtures):
        try:
            with safetensors.safe_open(file, framework="np") as opened:
                taken = bool(opened.keys())  # a checkpoint has at least one tensor
        except (safetensors.SafetensorError, OSError, UnicodeDecodeError):
            taken = False
        command = [BUILD / "outlast", "ckpt", "import", file, tmp_path / str(number), "--step", "1"]
        code = subprocess.run(command, capture_output=True, timeout=60).returncode
        assert code == (0 if taken and file.name not in stricter else 1), file.name


def test_tied_weights_load_as_safetensors_ties_them(root, tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.arange(6.0))
            self.b = self.a

    safetensors.torch.save_model(Model(), str(tmp_path / "model.safetensors"))
    outlast("import", tmp_path / "model.safetensors", tmp_path / "root", "--step", 4)
    shown = json.loads(outlast("show", tmp_path / "root", "--json"))
    assert len(shown["tensors"]) == 1 and len(shown["aliases"]) == 1
    outlast("export", tmp_path / "root", "--hf", tmp_path / "back")
    again = Model()
    torch.nn.init.zeros_(again.a)
    safetensors.torch.load_model(again, str(tmp_path / "back" / "model.safetensors"))
    assert torch.equal(again.b.detach(), torch.arange(6.0))


def test_what_safetensors_saved_comes_back_by_import(root, tmp_path):
    state = {name: torch.frombuffer(bytearray(expected(name)) or bytearray(1), dtype=torch.uint8)
             for name in TENSORS}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    outlast("import", tmp_path, tmp_path / "root", "--step", 9)
    outlast("verify", tmp_path / "root")
    shard = checkpoint_of(tmp_path / "root", 9) / "w00000.safetensors"
    loaded = safetensors.torch.load_file(shard)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
