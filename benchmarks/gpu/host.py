"""Measure host memory that belongs to a GPU job: `python benchmarks/gpu/host.py --out FILE.jsonl`.

Each line is one case in a process of its own: page-locked tensors of one size, the states of a model of 0.5
billion parameters moved to the host tensor by tensor, FSDP2's CPUOffloadPolicy, and the staging of an
asynchronous checkpoint. Needs PyTorch and one NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
# Rows and columns of the weights of a model of the shape of Qwen2.5-0.5B, and how often it has each.
_WEIGHTS = [((151936, 896), 1), ((896, 896), 48), ((128, 896), 48), ((4864, 896), 48), ((896, 4864), 24)]
_SIZES = (1, 3, 33, 65, 129, 260, 520, 1100, 2300)  # MiB of one page-locked tensor
_ALLOCATORS = ("", "pinned_max_round_threshold_mb:64", "pinned_use_cuda_host_register:True")


def _tensors(device: str) -> list[torch.Tensor]:
    shapes = [shape for shape, count in _WEIGHTS for _ in range(count)]
    return [torch.ones(shape, device=device) for shape in shapes]


def pinned(size_mib: int) -> tuple[int, Any]:
    """Page-lock one tensor."""
    kept = torch.ones(size_mib * MIB, dtype=torch.uint8, pin_memory=True)
    return kept.nbytes, kept


def moved(_: int) -> tuple[int, Any]:
    """Move a model's weights to page-locked memory, tensor by tensor."""
    kept = [part.cpu().pin_memory() for part in _tensors("cuda")]
    return sum(part.nbytes for part in kept), kept


def offloaded(pin: int) -> tuple[int, Any]:
    """Shard a model over one rank with FSDP2's CPUOffloadPolicy, pass once forward and backward."""
    from torch.distributed import HashStore, init_process_group
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    layers = [torch.nn.Linear(4096, 4096, bias=False) for _ in range(16)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=bool(pin)))
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=bool(pin)))
    model(torch.ones(8, 4096, device="cuda")).sum().backward()
    size = sum(part.numel() * part.element_size() for part in model.parameters())
    return 2 * size, model  # weights and gradients


def staged(cached: int) -> tuple[int, Any]:
    """Stage a model's weights for an asynchronous checkpoint, and wait until it is written."""
    from torch.distributed import HashStore, init_process_group
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    state = {f"weight{index}": part for index, part in enumerate(_tensors("cuda"))}
    size = sum(part.nbytes for part in state.values())
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder, cache_staged_state_dict=bool(cached))
        future: Any = async_save(state, storage_writer=writer)
        future.result()
    return size, (state, writer)


CASES: dict[str, Callable[[int], tuple[int, Any]]] = {
    "pinned": pinned,
    "moved": moved,
    "offloaded": offloaded,
    "staged": staged,
}


def _resident(name: str) -> int:
    """Return a figure of this process in bytes: VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("MemAvailable:")]
    return int(line.split()[1]) << 10


def rows(case: str, values: list[int]) -> Iterator[dict[str, Any]]:
    """Run a case with each value and yield what it adds to this process; nothing is freed in between."""
    torch.zeros(1, device="cuda")
    torch.ones(1, pin_memory=True)
    kept = []
    for value in values:
        before, free = _resident("VmRSS"), _available()
        size, new = CASES[case](value)
        torch.cuda.synchronize()
        kept.append(new)
        yield {
            "value": value,
            "tensors_bytes": size,
            "resident_bytes": _resident("VmRSS") - before,
            "peak_bytes": _resident("VmHWM") - before,
            "machine_bytes": free - _available(),
            "allocator": {  # of page-locked memory, in all
                key: size for key, size in torch.cuda.host_memory_stats().items() if key.endswith(".current")
            },
        }


def main(arguments: list[str] | None = None) -> int:
    """Measure every case; return 3 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", nargs="+", metavar=("CASE", "VALUE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU: PyTorch sees no CUDA device\n")
        return 3
    if options.one:
        for row in rows(options.one[0], [int(value) for value in options.one[1:]]):
            print("row:" + json.dumps(row), flush=True)
        return 0
    planned: list[tuple[str, tuple[int, ...], str]] = []
    planned += [("pinned", _SIZES, setting) for setting in _ALLOCATORS]
    planned += [("moved", (0,), setting) for setting in _ALLOCATORS]
    planned += [(case, (value,), "") for case in ("offloaded", "staged") for value in (0, 1)]
    common = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__}
    with options.out.open("a") as file:
        for case, values, setting in planned:
            command = [sys.executable, __file__, "--out", "-", "--one", case, *map(str, values)]
            variables = {**os.environ, "PYTORCH_ALLOC_CONF": setting}
            child = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
            lines = child.stdout.splitlines()
            measured = [json.loads(line[4:]) for line in lines if line.startswith("row:")]
            if child.returncode:
                measured.append({"error": child.stderr[-400:]})
            for row in measured:
                file.write(json.dumps({"case": case, "setting": setting, **common, **row}) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
