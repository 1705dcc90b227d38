"""What runs inside SGLang's scheduler process, registered through SGLang's hook registry (0.5.23)."""

import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from autotune.launchers.builtin.engines.light import sampled
from autotune.launchers.builtin.engines.sglang_engine import Board
from autotune.launchers.builtin.process.device import Device, warm_up
from autotune.launchers.builtin.process.records import FailureRecord, describe, report

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SAMPLER = "sglang.srt.layers.sampler.multinomial_with_seed"
_PYTHON_THREAD_STACK_BYTES = 1 << 20
# SGLang's texts for a token pool that ran dry: mem_cache/allocation.py.
_POOL_DRY = ("Prefill out of memory", "Decode out of memory", "alloc_req_slots runs out of memory")
_SEED_WITHOUT_ONE = 42  # SGLang's own, sampling/sampling_batch_info.py


def register() -> None:
    """Register the hooks of this scheduler process."""
    # SGLang raises RLIMIT_STACK, and with it the default size of a thread's stack, which counts against the
    # budget, to 64 MiB.
    threading.stack_size(_PYTHON_THREAD_STACK_BYTES)
    folder = os.environ.get("AUTOTUNE_ENGINE_FOLDER")
    budget = os.environ.get("AUTOTUNE_ENGINE_BUDGET_BYTES")
    watch = SchedulerWatch(
        folder=Path(folder) if folder else None,
        budget_bytes=int(budget) if budget else None,
        on_gpu=os.environ.get("AUTOTUNE_CPU_ENGINE") != "1",
    )
    around: dict[str, Callable[..., Any]] = {
        f"{_SCHEDULER}.__init__": watch.start,
        f"{_SCHEDULER}.run_event_loop": watch.serve,
        f"{_SCHEDULER}.run_batch": watch.run_batch,
        f"{_WEIGHTS}.begin_weight_update": watch.weight_sync(ends=False),
        f"{_WEIGHTS}.update_weights_from_tensor": watch.weight_sync(ends=False),
        f"{_WEIGHTS}.end_weight_update": watch.weight_sync(ends=True),
        f"{_WEIGHTS}.update_weights_from_disk": watch.weight_sync(ends=True),
        f"{_WEIGHTS}.resume_memory_occupation": watch.weight_sync(ends=True, answers=False),
    }
    if watch.on_gpu:
        around["sglang.srt.utils.common.get_available_gpu_memory"] = watch.free_card_memory
    else:
        around["sglang.srt.utils.common.get_free_cpu_memory"] = watch.free_memory
        # Its own hash of seed and position needs Triton, or a package that is not on PyPI.
        HookRegistry.register(_SAMPLER, sampled, HookType.REPLACE)
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        seed_requests,
        HookType.AFTER,
    )


def seed_requests(sampling: Any, _cls: type, batch: Any, *_: Any, **__: Any) -> Any:
    """Give every request its own seed, which SGLang otherwise honours only in its deterministic mode.

    That mode replaces operators by Triton kernels, which need a GPU.
    """
    if sampling.sampling_seed is None:
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        sampling.sampling_seed = torch.tensor(
            [_SEED_WITHOUT_ONE if seed is None else seed for seed in seeds],
            dtype=torch.int64,
            device=sampling.temperatures.device,
        )
    return sampling


class SchedulerWatch:
    """Gives the scheduler its device budget, and says why it dies before SGLang ends its caller."""

    def __init__(self, *, folder: Path | None, budget_bytes: int | None, on_gpu: bool) -> None:
        self._folder = folder
        self._board = Board(folder / "board") if folder else None
        self._budget_bytes = budget_bytes
        self.on_gpu = on_gpu
        self._device: Device | None = None
        self._phase = "rollout_init"
        self._reported = False

    def free_card_memory(self, original: Callable[..., float], *args: Any, **kwargs: Any) -> float:
        """Answer, in GiB, with what is left of the card or of the budget on it."""
        free_gib = original(*args, **kwargs)
        if self._budget_bytes is None:
            return free_gib
        self._open_device()
        return min(free_gib, (self._budget_bytes - torch.cuda.memory_reserved()) / (1 << 30))

    def free_memory(self, original: Callable[[], int]) -> int:
        """Answer with what is left of the budget, which the first question opens, before the weights load."""
        device = self._open_device()
        if self._budget_bytes is None:
            return original()
        from sglang.srt.utils.common import get_cpu_ids_by_node

        # SGLang divides the answer by the number of NUMA nodes.
        return max(0, self._budget_bytes - device.used_bytes()) * max(1, len(get_cpu_ids_by_node()))

    def start(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Build the scheduler: model, token pool."""
        self.serve(original, *args, **kwargs)
        device = self._open_device()
        if self._board is not None:
            self._board.write("peak_bytes", max(self._board.read("peak_bytes"), self._used(device)))
        self._phase = "rollout"

    def serve(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run the event loop, and say why it fails."""
        try:
            original(*args, **kwargs)
        except Exception as error:
            self._fail(error)
            raise

    def run_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one batch and note the memory at its end."""
        board, device = self._board, self._device
        if board is None or device is None:
            return original(*args, **kwargs)
        if self.on_gpu and board.read("peak_bytes") == 0:
            torch.cuda.reset_peak_memory_stats()
        result = original(*args, **kwargs)
        used = self._used(device)
        if used > board.read("peak_bytes"):
            board.write("peak_bytes", used)
        return result

    def weight_sync(self, *, ends: bool, answers: bool = True) -> Callable[..., Any]:
        """Return the hook of a call that belongs to a weight sync, and `ends` it or not.

        With `answers` the call returns whether it succeeded.
        """

        def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._phase = "weight_sync"
            result = original(*args, **kwargs)
            if answers and not result.success:
                self._fail(RuntimeError(result.message))
            if ends:
                self._phase = "rollout"
            return result

        return hook

    def _used(self, device: Device) -> int:
        return int(torch.cuda.max_memory_allocated()) if self.on_gpu else device.used_bytes()

    def _open_device(self) -> Device:
        if self._device is None:
            if not self.on_gpu:
                _load_what_loads_late()
                warm_up()
            self._device = Device.open(budget_bytes=self._budget_bytes, on_gpu=self.on_gpu)
            if self._board is not None:
                self._board.write("baseline_bytes", self._device.baseline_bytes)
                self._board.write("scheduler_pid", os.getpid())
        return self._device

    def _fail(self, error: Exception) -> None:
        if self._reported:
            return
        self._reported = True
        used = None
        if self._device is not None:
            used = self._device.used_bytes()
            self._device.lift()
        record = describe(
            error,
            phase=self._phase,
            component="rollout",
            rank=0,
            step=self._board.read("step") if self._board is not None else 0,
            on_gpu=self.on_gpu,
            used_bytes=used,
            budget_bytes=self._budget_bytes,
        )
        if record.cause == "gpu-oom" and not self.on_gpu:
            record = msgspec.structs.replace(record, used_bytes=_at_least(record))
        if any(text in record.message for text in _POOL_DRY):
            record = msgspec.structs.replace(record, cause="kv-pool")
        if self._folder is not None:
            (self._folder / "failure.json").write_bytes(msgspec.json.encode(record))
        report(record, error)


def _at_least(record: FailureRecord) -> int | None:
    # What the failing operator held was freed on the way here; the kernel refused because so much was in use.
    if record.used_bytes is None or record.budget_bytes is None or record.requested_bytes is None:
        return record.used_bytes
    return max(record.used_bytes, record.budget_bytes - record.requested_bytes)


def _load_what_loads_late() -> None:
    # On a card these modules would not lie in device memory either; the registry imports every model, 35 MiB.
    for module in ("sglang.srt.models.registry", "sglang.srt.model_loader.loader"):
        importlib.import_module(module)
