"""AReaL's own worker with a memory limit: AREAL_BUDGET bytes above what it has after its first step.

RLIMIT_DATA enforces it. The class and the text of the allocator's error are those of a card: that wording is
played; the failed request, its size and its place in the program are real.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import runpy
from pathlib import Path

import torch
from areal.engine.fsdp_engine import FSDPEngine

BUDGET = int(os.environ["AREAL_BUDGET"])


def with_limit(update):
    """Return the method that gives the server its weights, which sets the limit after the first step."""

    @functools.wraps(update)
    def updates(engine, *arguments, **named):
        result = update(engine, *arguments, **named)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        # A resumed trainer gives the weights that it loaded before its first step.
        if soft == resource.RLIM_INFINITY and engine.has_trained:
            private = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_DATA, (private + BUDGET, hard))
        return result

    return updates


def as_a_card(batch):
    """Return a pass whose allocation failures have the words of a card."""

    @functools.wraps(batch)
    def passes(engine, *arguments, **named):
        engine.has_trained = engine.has_trained or batch.__name__ == "train_batch"
        try:
            return batch(engine, *arguments, **named)
        except RuntimeError as error:
            refused = re.search(r"DefaultCPUAllocator.*tried to allocate (\d+) bytes", str(error))
            if refused is None:
                raise
            text = (
                f"CUDA out of memory. Tried to allocate {int(refused[1]) / 2**20:.2f} MiB. "
                f"GPU 0 has a total capacity of {BUDGET / 2**30:.2f} GiB of which 0 bytes is free."
            )
            raise torch.OutOfMemoryError(text).with_traceback(error.__traceback__) from None

    return passes


if __name__ == "__main__":
    if BUDGET:
        FSDPEngine.has_trained = False
        FSDPEngine.update_weights = with_limit(FSDPEngine.update_weights)
        for method in ("train_batch", "forward_batch"):
            setattr(FSDPEngine, method, as_a_card(getattr(FSDPEngine, method)))
    runpy.run_module("areal.infra.rpc.rpc_server", run_name="__main__", alter_sys=True)
