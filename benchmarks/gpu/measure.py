"""Peaks and real out-of-memory failures of one trainer: `python benchmarks/gpu/measure.py --out FILE.jsonl`.

Runs on a bare machine with one NVIDIA GPU, PyTorch and transformers; nothing that this project installs is
imported. Each line of FILE is one phase of one case: its peaks, or the failure with its whole message.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the checkout is not on the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.gpu.cards import Cuda, Device, Process
from benchmarks.gpu.cases import LAYOUTS, SHAPES, Case, Settings, cases, parameters
from benchmarks.gpu.trainer import Phases, run

Write = Callable[[dict[str, Any]], None]
_MOST_TOKENS = 1 << 20  # of a micro-batch: here a card is as good as endless


def measure(case: Case, device: Device, write: Write) -> str:
    """Measure one case, write a line per phase, and return how it ended: done, oom or error."""
    phases = Phases(device)
    failure: dict[str, Any] = {}
    device.empty()
    device.limit(case.budget_bytes)
    try:
        run(case, phases)
    except Exception as error:
        failure = {
            "kind": "oom" if device.ran_out(error) else "error",
            "phase": phases.current,
            "step": phases.step,
            "message": f"{type(error).__module__}.{type(error).__qualname__}: {error}",
            "traceback": traceback.format_exc(limit=-4),
            "at_failure": device.reading(),
        }
        traceback.clear_frames(error.__traceback__)
    finally:
        device.limit(None)
        device.empty()
    common = described(case, device)
    for phase, reading in phases.readings.items():
        if phase != failure.get("phase"):
            write({**common, "kind": "peak", "phase": phase, **reading})
    if failure:
        write({**common, **failure})
    return str(failure.get("kind", "done"))


def described(case: Case, device: Device) -> dict[str, Any]:
    """Return what every line of a case says."""
    import transformers

    layout = asdict(LAYOUTS[case.layout]) | {
        "logits_bytes": 4,
        "padded": True,
        "chunked_head": True,
        "per_tensor_optimizer": True,
        "optimizer_temporary_bytes": 16,  # the norm is taken in fp64: a copy and its square
        "optimizer_stays_offloaded": True,
        "logits_share": case.response_tokens / case.length,
        "sync_buckets": 1,
        "optimizer_passes_through": True,
        "embedding_apart": False,
        "loads_whole": LAYOUTS[case.layout].strategy == "fsdp2",
        "sequences": case.rows * case.microbatches,
        "prompt_tokens": case.prompt_tokens,
        "response_tokens": case.response_tokens,
    }
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "schema": 1,
        "device": device.kind,
        "hardware": {"name": device.name, "total_bytes": device.total_bytes},
        "versions": versions | {"python": platform.python_version()} | device.versions(),
        "model_name": case.model,
        "model": SHAPES[case.model],
        "layout_name": case.layout,
        "layout": layout,
        "settings": asdict(case.settings),
        "budget_bytes": case.budget_bytes,
    }


def possible(case: Case, total_bytes: int) -> bool:
    """Return whether the trainer's state may fit; a case that grows may fail with it, but not by far."""
    state = LAYOUTS[case.layout].state_bytes * parameters(SHAPES[case.model])
    return state <= (2.0 if case.grow else 0.9) * total_bytes


def _climb(case: Case, device: Device, write: Write, *, ends: float) -> None:
    """Measure a case, and where it grows each doubled one, until memory or time runs out."""
    while time.monotonic() < ends:
        started = time.monotonic()
        end = measure(case, device, write)
        settings = case.settings
        print(
            f"{case.model} {case.layout} {settings.tokens_per_microbatch} tokens, recompute "
            f"{settings.recompute}: {end} in {time.monotonic() - started:.1f} s",
            flush=True,
        )
        if end != "done" or not case.grow or settings.tokens_per_microbatch > _MOST_TOKENS:
            return
        case = case.doubled()


def main(arguments: list[str] | None = None) -> int:
    """Measure until the cases or the minutes are used up; return 3 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="lines are appended to this file")
    parser.add_argument("--minutes", type=float, default=20.0, help="begin no case after this many")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only try the steps")
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), help="default: all but tiny that fit")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--tokens", type=int, help="of the smallest micro-batch (2048, on the cpu 64)")
    parser.add_argument("--budget", type=int, help="bytes that the allocator may have in every case")
    parser.add_argument("--cases", type=int, help="at most so many")
    parser.add_argument("--grow-only", action="store_true", help="only the cases that end out of memory")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("no GPU: PyTorch sees no CUDA device (--device cpu tries the steps without one)\n")
        return 3
    device: Device = Cuda() if options.device == "cuda" else Process()
    chosen = options.models or (
        ["tiny"] if device.kind == "cpu" else [name for name in SHAPES if name != "tiny"]
    )
    tokens = options.tokens or (2048 if device.kind == "cuda" else 64)
    # Imports, kernels and workspaces belong to no case.
    warming = Case(
        model="tiny",
        layout="built-in",
        settings=Settings(tokens_per_microbatch=64, sync_buffer=1),
        prompt_tokens=16,
        response_tokens=16,
    )
    run(warming, Phases(device))
    ends = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, sort_keys=True) + "\n")
            file.flush()

        planned = (
            case if options.budget is None else replace(case, budget_bytes=options.budget)
            for case in cases(device.total_bytes, models=chosen, layouts=options.layouts, tokens=tokens)
            if possible(case, device.total_bytes) and (case.grow or not options.grow_only)
        )
        for case in islice(planned, options.cases):
            _climb(case, device, write, ends=ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())
