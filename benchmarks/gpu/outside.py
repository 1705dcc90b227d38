"""Measure GPU memory outside PyTorch's allocator: `python benchmarks/gpu/outside.py --out FILE.jsonl`.

One line per stage of a process (its context, its first product, a communicator, captured graphs) with the
bytes that are no longer free on the card and those that PyTorch's allocator has reserved. Needs PyTorch and
one NVIDIA GPU that no other process uses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def stages(before: int) -> Iterator[tuple[str, int, int]]:
    """Yield each stage's name, the bytes that the card has lost since `before`, and those reserved."""

    def now(name: str) -> tuple[str, int, int]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return name, before - torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()

    yield now("context")
    value = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (value @ value).float().log_softmax(-1).sum().backward()  # type: ignore[no-untyped-call]
    value.grad = None
    yield now("first product, with its gradient")
    query = torch.randn(1, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    query.grad = None
    yield now("attention, with its gradient")
    from torch.distributed import HashStore, all_reduce, init_process_group, new_group

    init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    flat = torch.ones(1 << 20, device="cuda")
    all_reduce(flat)
    yield now("NCCL group of one rank")
    all_reduce(flat, group=new_group([0]))
    yield now("second NCCL group of one rank")
    layers = torch.nn.Sequential(
        *(_Block(2048, device="cuda", dtype=torch.bfloat16) for _ in range(28))
    ).requires_grad_(False)
    yield now("28 layers")
    kept: list[Any] = []
    pool = torch.cuda.graph_pool_handle()
    for batch in reversed(_BATCHES):
        inputs = torch.randn(batch, 2048, device="cuda", dtype=torch.bfloat16)
        layers(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = layers(inputs)
        kept += [graph, inputs, outputs]
        yield now(f"graph of {batch} rows")


class _Block(torch.nn.Module):
    """The products of a layer's decoding step, without attention."""

    def __init__(self, hidden: int, **kind: Any) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(hidden, **kind)
        self.up = torch.nn.Linear(hidden, 6 * hidden, bias=False, **kind)
        self.down = torch.nn.Linear(3 * hidden, hidden, bias=False, **kind)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(hidden)).chunk(2, dim=-1)
        result: torch.Tensor = hidden + self.down(torch.nn.functional.silu(gate) * up)
        return result


def main(arguments: list[str] | None = None, *, write: Callable[[str], object] = print) -> int:
    """Measure the stages; return 3 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="lines are appended to this file")
    options = parser.parse_args(arguments)
    try:
        import pynvml

        pynvml.nvmlInit()
        free = int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free)
    except Exception as error:  # no library, no driver or no card
        sys.stderr.write(f"no GPU: {error}\n")
        return 3
    common = {
        "schema": 1,
        "kind": "outside",
        "hardware": {
            "name": torch.cuda.get_device_name(0),
            "total_bytes": torch.cuda.get_device_properties(0).total_memory,
        },
        "versions": {"torch": torch.__version__, "cuda": str(torch.version.cuda)},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        for name, lost, reserved in stages(free):
            line = common | {"stage": name, "lost_bytes": lost, "reserved_bytes": reserved}
            file.write(json.dumps(line, sort_keys=True) + "\n")
            write(f"{name}: {lost / (1 << 20):.0f} MiB of the card, {reserved / (1 << 20):.0f} reserved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
