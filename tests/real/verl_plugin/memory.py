"""Peaks of the trainer's phases, and a budget for a process that has no card.

VERL_PLUGIN_PEAKS names a file that gets a line of JSON per pass. VERL_PLUGIN_BUDGET is what the trainer's
process may take, in bytes of private memory above what it has after its first step; RLIMIT_DATA enforces it.
With VERL_PLUGIN_BUDGET_IN=optimizer it holds in the optimizer's step alone, above what the process has before
the first step.
With VERL_PLUGIN_WORDS=cuda the class and the text of the allocator's error are those of a card. That wording
is played; the failed request, its size, its place in the program and what is in use are real.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from verl.plugin.platform import get_platform

from .cpu import park_optimizers, private_bytes


class Memory:
    """What the trainer's process does, and how much memory it takes."""

    def __init__(self) -> None:
        self.device = get_platform().device_module
        self.path = os.environ.get("VERL_PLUGIN_PEAKS")
        self.budget = int(os.environ.get("VERL_PLUGIN_BUDGET") or 0)
        self.in_optimizer = os.environ.get("VERL_PLUGIN_BUDGET_IN") == "optimizer"
        self.baseline = 0
        self.updates = 0
        self.step = 0
        self.began = time.monotonic()
        self.begin()

    def begin(self) -> None:
        """Begin a phase."""
        self.began = time.monotonic()
        self.device.reset_peak_memory_stats()

    def end(self, name: str) -> None:
        """Write down what a phase took since the last beginning, and begin the next one."""
        if self.path:
            free, total = self.device.mem_get_info()
            line = {
                "phase": name,
                "step": self.step + 1,
                "seconds": round(time.monotonic() - self.began, 3),
                "allocated_bytes": self.device.max_memory_allocated(),
                "reserved_bytes": self.device.max_memory_reserved(),
                "allocated_now_bytes": self.device.memory_allocated(),
                "reserved_now_bytes": self.device.memory_reserved(),
                "free_bytes": free,
                "total_bytes": total,
            }
            with Path(self.path).open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.begin()

    @contextmanager
    def phase(self, name: str):
        """Measure a phase that succeeds."""
        self.begin()
        yield
        self.end(name)

    def updated(self, step: int | None) -> None:
        """Note that the engine has new weights, which ends a step."""
        self.step = step or 0
        self.updates += 1
        # The engine gets weights at the start and after each step; the first step allocates what stays.
        if self.updates == (1 if self.in_optimizer else 2) and self.budget:
            self.baseline = private_bytes()
            if not self.in_optimizer:
                self.limit(self.baseline + self.budget)

    def limit(self, size: int) -> None:
        """Let the kernel refuse this process more private memory than a number of bytes."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size, hard))

    def limit_optimizer(self) -> None:
        """Let the budget hold in the optimizer's step alone."""
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        step = FSDPEngine.optimizer_step

        @functools.wraps(step)
        def limited(*arguments, **named):
            self.limit(self.baseline + self.budget)
            try:
                return step(*arguments, **named)
            finally:
                self.limit(resource.RLIM_INFINITY)

        FSDPEngine.optimizer_step = limited

    def follow(self) -> None:
        """Measure the passes of verl's engine: forward ends where backward begins."""
        from verl.workers.engine.base import BaseEngine
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        def measured(owner: type, method: str, name: str, before: str | None = None) -> None:
            call = getattr(owner, method)

            @functools.wraps(call)
            def passes(*arguments, **named):
                self.end(before) if before else self.begin()
                result = call(*arguments, **named)
                self.end(name)
                return result

            setattr(owner, method, passes)

        measured(BaseEngine, "infer_batch", "log_prob")
        measured(FSDPEngine, "optimizer_step", "optimizer")
        measured(torch.Tensor, "backward", "backward", before="forward")

    def card_error(self, asked: int) -> torch.OutOfMemoryError:
        """Return a card's error with the figures of a request of so many bytes that was refused."""
        # Leaving the pass has freed memory since; less was free than the request, or it had been granted.
        free = max(0, min(self.budget + self.baseline - private_bytes(), asked))
        capacity, in_use = self.budget / 2**30, (self.budget - free) / 2**30
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {asked / 2**20:.2f} MiB. GPU 0 has a total capacity of "
            f"{capacity:.2f} GiB of which {free / 2**20:.2f} MiB is free. Including "
            f"non-PyTorch memory, this process has {in_use:.2f} GiB memory in use. Of the allocated memory "
            f"{in_use:.2f} GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
        )

    def speak_as_a_card(self) -> None:
        """Replace the allocator's error where it leaves a pass of verl's engine; its traceback stays."""
        from verl.workers.engine.base import BaseEngine

        def translated(call):
            @functools.wraps(call)
            def batch(*arguments, **named):
                try:
                    return call(*arguments, **named)
                except RuntimeError as error:
                    refused = re.search(r"DefaultCPUAllocator.*tried to allocate (\d+) bytes", str(error))
                    if refused is None or not self.baseline:
                        raise
                    card_error = self.card_error(int(refused[1]))
                    raise card_error.with_traceback(error.__traceback__) from None

            return batch

        for method in ("train_batch", "infer_batch"):
            setattr(BaseEngine, method, translated(getattr(BaseEngine, method)))


@functools.cache
def watch() -> Memory:
    """Return this process's account; the first call begins it."""
    memory = Memory()
    if memory.path:
        memory.follow()
    if os.environ.get("VERL_PLUGIN_WORDS") == "cuda":
        memory.speak_as_a_card()
        park_optimizers()
    if memory.in_optimizer:
        memory.limit_optimizer()
    return memory
