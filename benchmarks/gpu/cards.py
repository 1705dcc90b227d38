"""What memory is measured on: a card, or a process where there is none."""

from __future__ import annotations

import gc
import os
import platform
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


class Cuda:
    """One NVIDIA card, as PyTorch and NVML see it."""

    kind = "cuda"

    def __init__(self) -> None:
        torch.cuda.set_device(0)
        self.total_bytes = int(torch.cuda.get_device_properties(0).total_memory)
        self.name = torch.cuda.get_device_name(0)
        # The context and cuBLAS' own memory exist before anything is measured.
        side = torch.ones(256, 256, device="cuda")
        (side @ side).sum().item()
        self._nvml = _nvml_card()

    def versions(self) -> dict[str, str]:
        """Return what else the figures depend on."""
        driver = "" if self._nvml is None else str(self._nvml[0].nvmlSystemGetDriverVersion())
        return {"cuda": str(torch.version.cuda), "driver": driver}

    def limit(self, budget_bytes: int | None) -> None:
        """Let the allocator have `budget_bytes`, or the whole card."""
        torch.cuda.set_per_process_memory_fraction(
            1.0 if budget_bytes is None else min(1.0, budget_bytes / self.total_bytes)
        )

    def reset(self) -> None:
        """Begin a phase."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def reading(self) -> dict[str, int | None]:
        """Return the phase's peaks, and what the card says now."""
        with suppress(RuntimeError):  # a failed phase is read as well
            torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        used = None if self._nvml is None else int(self._nvml[0].nvmlDeviceGetMemoryInfo(self._nvml[1]).used)
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "allocated_now_bytes": torch.cuda.memory_allocated(),
            "reserved_now_bytes": reserved,
            "free_bytes": free,
            "outside_bytes": self.total_bytes - free - reserved,  # contexts, and whoever else is on the card
            "nvml_used_bytes": used,
        }

    def empty(self) -> None:
        """Give everything back to the card."""
        gc.collect()
        torch.cuda.empty_cache()

    def ran_out(self, error: BaseException) -> bool:
        """Return whether the error says that memory ran out."""
        known = isinstance(error, torch.cuda.OutOfMemoryError)
        return known or any(text in str(error) for text in ("out of memory", "ALLOC_FAILED"))


class Process:
    """A machine without a GPU: the process's own memory, so that the steps can be tried anywhere."""

    kind = "cpu"

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.name = platform.processor() or platform.machine()

    def versions(self) -> dict[str, str]:
        """Return nothing: there is no driver."""
        return {}

    def limit(self, budget_bytes: int | None) -> None:
        """Let the process grow by `budget_bytes`."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = hard if budget_bytes is None else _status_bytes("VmData") + budget_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def reset(self) -> None:
        """Begin a phase: the kernel forgets the largest size so far, where it may."""
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def reading(self) -> dict[str, int | None]:
        """Return the largest size of the process, which includes its code."""
        return {"process_bytes": _status_bytes("VmHWM")}

    def empty(self) -> None:
        """Drop what nobody refers to."""
        gc.collect()

    def ran_out(self, error: BaseException) -> bool:
        """Return whether the error says that memory ran out."""
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


Device = Cuda | Process


def _nvml_card() -> tuple[Any, Any] | None:
    try:
        import pynvml
    except ImportError:
        return None
    identity = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}".encode())
    except pynvml.NVMLError:  # no NVML in this container: its column stays empty
        return None


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the kernel does not report {name}")
