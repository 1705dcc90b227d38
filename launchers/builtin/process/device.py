"""The memory that an actor of the built-in job may use: a card, or a byte budget that the kernel enforces."""

import ctypes
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DATA_FIELD = 5  # of /proc/self/statm: private writable memory, which RLIMIT_DATA counts
_SAMPLE_S = 0.0005

# Must be in the environment before the process starts. Without the fixed threshold the peaks of five equal
# runs spread over 3 % and what stays after a step grows from 26 to 490 MiB; with it the spread is 0.1 %
# (torch 2.13, glibc 2.36). MKL keeps the scratch memory of its matrix kernels, whose size depends on the
# processor: up to 15 MiB more in every phase of the same job.
ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "MKL_DISABLE_FAST_MM": "1",
}


class PhaseReading(msgspec.Struct, frozen=True, kw_only=True):
    """What one phase of one step cost, summed over its entries."""

    seconds: float
    peak_bytes: int  # above the baseline


# A thread's whole stack counts against RLIMIT_DATA, and the pools of Ray and torch grow while the job runs:
# with the usual 8 MiB five more threads are 40 MiB of nobody's memory.
_THREAD_STACK_BYTES = 1 << 20
_ATTRIBUTES_BYTES = 64  # pthread_attr_t is 56 on x86-64


def limit_thread_stacks() -> None:
    """Give every thread that is started from now on a small stack; raises OSError if glibc refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    for error in (
        libc.pthread_attr_init(attributes),
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_THREAD_STACK_BYTES)),
        libc.pthread_setattr_default_np(attributes),
    ):
        if error:
            raise OSError(error, os.strerror(error))


def vm_data_bytes() -> int:
    """Return the private writable memory of this process, the quantity that RLIMIT_DATA limits."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return data_bytes(os.pread(descriptor, 256, 0))
    finally:
        os.close(descriptor)


def warm_up() -> None:
    """Cause the one-time allocations of torch and oneDNN, so that they belong to the baseline."""
    for rows in (8, 64, 512):
        layer = torch.nn.Linear(64, 128)
        output = torch.nn.functional.silu(layer(torch.randn(rows, 64)))
        torch.log_softmax(output, dim=-1).sum().backward()  # type: ignore[no-untyped-call]
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, foreach=False)
        optimizer.step()
    query = torch.randn(2, 4, 32, 16, requires_grad=True)
    attended = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    attended.sum().backward()  # type: ignore[no-untyped-call]


class Device:
    """The device of this process: its baseline, its budget, and the peaks of its phases."""

    def __init__(self, *, on_gpu: bool, baseline_bytes: int, budget_bytes: int | None) -> None:
        self.on_gpu = on_gpu
        self.baseline_bytes = baseline_bytes
        self.budget_bytes = budget_bytes
        self.failed_used_bytes: int | None = None
        self._readings: dict[str, PhaseReading] = {}
        self._peak_bytes = 0
        self._sampling = threading.Event()
        if not on_gpu:
            # Started before the limit is set: a thread's stack counts against it.
            threading.Thread(target=self._sample, name="memory-sampler", daemon=True).start()

    @classmethod
    def open(cls, *, budget_bytes: int | None, on_gpu: bool = False) -> "Device":
        """Measure the baseline and let the budget (None: no limit) start above it; call it after warm-up."""
        if on_gpu:
            if budget_bytes is not None:
                total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total))
            return cls(on_gpu=True, baseline_bytes=0, budget_bytes=budget_bytes)
        device = cls(on_gpu=False, baseline_bytes=0, budget_bytes=budget_bytes)
        device.baseline_bytes = vm_data_bytes()
        device.enforce()
        return device

    @property
    def capacity_bytes(self) -> int:
        """Return the budget, or the card's memory; 0 means unlimited."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        if self.on_gpu:
            return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        return 0

    def enforce(self) -> None:
        """Set the limit, for the first time or after `lift`; the next failure is the first to be kept."""
        self.failed_used_bytes = None
        if not self.on_gpu and self.budget_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self.baseline_bytes + self.budget_bytes, hard))

    def lift(self) -> None:
        """Remove the limit, so that a failing process can still say why."""
        if not self.on_gpu:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def used_bytes(self) -> int:
        """Return what is in use now, above the baseline."""
        if self.on_gpu:
            return int(torch.cuda.memory_allocated()) + self._outside_bytes()
        return vm_data_bytes() - self.baseline_bytes

    def _outside_bytes(self) -> int:
        """Return what a whole card holds beside this process's tensors: contexts, other processes."""
        if self.budget_bytes is not None:
            return 0
        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - int(torch.cuda.memory_reserved()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record seconds and peak of the block under `name`; entries of one name add up until `take`."""
        self._peak_bytes = 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._note()
        self._sampling.set()
        started = time.perf_counter()
        try:
            yield
            if self.on_gpu:
                # Kernels run behind the host: without it their time and errors belong to the next phase.
                torch.cuda.synchronize()
        except BaseException:
            if self.failed_used_bytes is None:
                self._note()
                self.failed_used_bytes = self._peak_bytes
            raise
        finally:
            self._sampling.clear()
            self._note()
            self._close(name, seconds=time.perf_counter() - started)

    def take(self) -> dict[str, PhaseReading]:
        """Return the readings since the last call, by phase, and start again."""
        readings, self._readings = self._readings, {}
        return readings

    def _close(self, name: str, *, seconds: float) -> None:
        before = self._readings.get(name, PhaseReading(seconds=0.0, peak_bytes=0))
        self._readings[name] = PhaseReading(
            seconds=before.seconds + seconds, peak_bytes=max(before.peak_bytes, self._peak_bytes)
        )

    def _note(self) -> None:
        used = (
            int(torch.cuda.max_memory_allocated()) + self._outside_bytes()
            if self.on_gpu
            else self.used_bytes()
        )
        self._peak_bytes = max(self._peak_bytes, used)

    def _sample(self) -> None:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY)
        while True:
            self._sampling.wait()
            used = data_bytes(os.pread(descriptor, 256, 0)) - self.baseline_bytes
            if used > self._peak_bytes and self._sampling.is_set():
                self._peak_bytes = used
            time.sleep(_SAMPLE_S)


def data_bytes(statm: bytes) -> int:
    """Return the private writable memory that the text of /proc/PID/statm gives."""
    return int(statm.split()[_DATA_FIELD]) * _PAGE_BYTES
