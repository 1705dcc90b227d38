"""The two entry points that SGLang finds; both do nothing in a process that this product did not start."""

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def platform() -> str | None:
    """Return the platform class for an engine without a GPU, or None if SGLang's own applies."""
    if not os.environ.get("AUTOTUNE_ATTEMPT") or os.environ.get("AUTOTUNE_CPU_ENGINE") != "1":
        return None
    _end_with_parent()
    import torch

    if torch.cuda.is_available():
        return None
    from autotune.launchers.builtin.process.torchvision_ops import declare

    declare()  # before SGLang's model files import torchvision
    return "autotune.launchers.builtin.engines.sglang_cpu:CpuBudgetPlatform"


def install() -> None:
    """Register the hooks of a scheduler process: device budget, failure records, per-request seeds."""
    if not os.environ.get("AUTOTUNE_ATTEMPT"):
        return
    _end_with_parent()
    # Of the processes that load plugins, the scheduler and the engine's caller have imported this one before;
    # the caller needs no hooks.
    if multiprocessing.parent_process() is None or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from autotune.launchers.builtin.engines.sglang_hooks import register

    register()


def _end_with_parent() -> None:
    """Make the kernel end an engine process when its caller dies.

    SGLang does it too, but only after its imports, and a caller killed within those seconds would leave a
    process that then signals whoever adopted it.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)
