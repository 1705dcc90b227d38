# ruff: noqa: N802 - as NVML names them
"""Three cards whose use is written in files and whose processes are not named, as in a container."""

import os
from pathlib import Path
from types import SimpleNamespace

TOTAL_BYTES = 80 << 30


class NVMLError(Exception):
    pass


def nvmlInit() -> None:
    return


def nvmlDeviceGetCount() -> int:
    return 3


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetMemoryInfo(device: int) -> SimpleNamespace:
    file = Path(os.environ["SCRIPTED_CARDS"], str(device))
    used, *pid = file.read_text().split() if file.exists() else ["0"]
    if pid and not Path("/proc", pid[0]).exists():  # its memory went with it
        used = "0"
    return SimpleNamespace(used=int(used), total=TOTAL_BYTES)


def nvmlDeviceGetComputeRunningProcesses(device: int) -> list[SimpleNamespace]:
    return []


def nvmlDeviceGetUtilizationRates(device: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=0)


def nvmlDeviceGetName(device: int) -> str:
    return "NVIDIA H100"


def nvmlDeviceGetUUID(device: int) -> str:
    return f"GPU-{device}"


def nvmlSystemGetDriverVersion() -> str:
    return "570.86.15"


def nvmlSystemGetCudaDriverVersion() -> int:
    return 12080
