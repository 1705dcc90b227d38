# ruff: noqa: N802, F403 - as NVML names them
"""The scripted cards of the runners' tests, with NVML's own errors where a file `error` holds their text."""

import os
from pathlib import Path
from types import SimpleNamespace

from tests.launchers.runners.scripted import pynvml as cards
from tests.launchers.runners.scripted.pynvml import *
from tests.launchers.runners.scripted.pynvml import NVMLError


def nvmlDeviceGetCount() -> int:
    return 1


def _checked() -> None:
    file = Path(os.environ["SCRIPTED_CARDS"], "error")
    if file.exists():
        raise NVMLError(file.read_text())


def nvmlDeviceGetMemoryInfo(device: int) -> SimpleNamespace:
    _checked()
    return cards.nvmlDeviceGetMemoryInfo(device)


def nvmlDeviceGetComputeRunningProcesses(device: int) -> list[SimpleNamespace]:
    if Path(os.environ["SCRIPTED_CARDS"], "unsupported").exists():
        raise NVMLError("Not Supported")
    _checked()
    return []


def nvmlDeviceGetUtilizationRates(device: int) -> SimpleNamespace:
    if Path(os.environ["SCRIPTED_CARDS"], "unsupported").exists():
        raise NVMLError("Not Supported")
    _checked()
    return SimpleNamespace(gpu=0)
