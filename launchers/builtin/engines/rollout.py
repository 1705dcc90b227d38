"""The Ray actor that owns one rollout engine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import ray

from autotune.launchers.builtin.engines.base import (
    Completion,
    Engine,
    EngineKind,
    EngineMemory,
    EngineOptions,
    Part,
    Sampling,
)
from autotune.launchers.builtin.process.records import PhaseFailure, describe, report
from autotune.launchers.builtin.transfer.broadcast import Content, Place

if TYPE_CHECKING:
    import torch


class RolloutActor:
    """Samples responses and takes new weights.

    A plain synchronous actor: its methods run on the worker's main thread, the only one on which SGLang can
    install the signal handlers that end the actor when its scheduler dies.
    """

    def __init__(self, kind: EngineKind, options: EngineOptions) -> None:
        self._options = options
        with self._reporting("rollout_init", step=0):
            self._engine: Engine = _start_engine(kind, options)

    def ready(self) -> bool:
        """Return once the engine has started."""
        return True

    def generate(
        self, prompts: list[list[int]], *, seeds: list[int], step: int = 0, **sampling: Unpack[Sampling]
    ) -> list[Completion]:
        """Return one response per prompt."""
        with self._reporting("rollout", step=step):
            return self._engine.generate(prompts, seeds=seeds, **sampling)

    def sleep(self, *, step: int = 0) -> None:
        """Give weights and token pool back to the card."""
        with self._reporting("rollout", step=step):
            self._engine.sleep()

    def wake(self, part: Part, *, step: int = 0) -> None:
        """Take the memory of one part again."""
        with self._reporting("weight_sync", step=step):
            self._engine.wake(part)

    def borrow(self, handles: bytes, *, step: int = 0) -> None:
        """Load some of the model's tensors from where another process of this card has them."""
        with self._reporting("weight_sync", step=step):
            self._engine.borrow(handles)

    def begin_update(self, *, step: int = 0) -> None:
        """Open a transfer of weights through memory."""
        with self._reporting("weight_sync", step=step):
            self._engine.begin_update()

    def update(self, bucket: "list[tuple[str, torch.Tensor]]", *, step: int = 0) -> None:
        """Load some of the model's tensors."""
        with self._reporting("weight_sync", step=step):
            self._engine.update(bucket)

    def end_update(self, *, step: int = 0) -> None:
        """Close the transfer."""
        with self._reporting("weight_sync", step=step):
            self._engine.end_update()

    def update_from_disk(self, path: str, *, step: int = 0) -> None:
        """Load all weights from a folder."""
        with self._reporting("weight_sync", step=step):
            self._engine.update_from_disk(path)

    def join_update_group(self, *, step: int = 0, **place: Unpack[Place]) -> None:
        """Join the process group over which trainer rank 0 broadcasts weights to the engines."""
        with self._reporting("weight_sync", step=step):
            self._distributed().join_update_group(**place)

    def receive(self, tensors: list[Content], *, group: str, step: int = 0) -> None:
        """Take one broadcast bucket; the sender broadcasts at the same time."""
        with self._reporting("weight_sync", step=step):
            self._distributed().receive(tensors, group=group)

    def memory(self) -> EngineMemory:
        """Return the memory used since the last call."""
        return self._engine.memory()

    def shutdown(self) -> None:
        """End the engine and all its processes."""
        self._engine.shutdown()

    def _distributed(self) -> Any:
        if not hasattr(self._engine, "join_update_group"):
            raise ValueError("only SGLang engines take weights by broadcast")
        return self._engine

    @contextmanager
    def _reporting(self, phase: str, *, step: int) -> Iterator[None]:
        try:
            if phase != "rollout_init":
                self._engine.mark_step(step)
            yield
        except PhaseFailure:
            raise
        except Exception as error:
            record = describe(
                error,
                phase=phase,
                component="rollout",
                rank=0,
                step=step,
                on_gpu=self._options.device == "cuda",
                used_bytes=None,
                budget_bytes=self._options.budget_bytes,
            )
            report(record, error)
            raise PhaseFailure(record) from error


def rollout_environment(options: EngineOptions) -> dict[str, str]:
    """Return the environment variables that a rollout actor's process must start with."""
    from autotune.launchers.builtin.process.device import ALLOCATOR_ENVIRONMENT

    environment = {
        "AUTOTUNE_ATTEMPT": os.environ.get("AUTOTUNE_ATTEMPT", "standalone"),
        # Without it SGLang waits 5 s for a stack dump of its dead scheduler before it ends its caller.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    }
    if options.device == "cpu":
        # Half the cores: beside other work a team as wide as the machine waits for itself at every operator
        # (single runs, two busy cores: two threads 100 to 170 tokens/s, passive 910 to 940, one thread 1,480
        # to 1,760; two threads on quiet cores 1,900 to 2,460).
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // 2))
        environment |= ALLOCATOR_ENVIRONMENT | {
            "AUTOTUNE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    return environment


def start_rollout_actor(
    kind: EngineKind, options: EngineOptions, *, name: str | None = None, gpus: float = 1.0
) -> Any:
    """Return the handle of a new rollout actor; call its `ready` to learn whether the engine started."""
    return (
        ray.remote(RolloutActor)
        .options(
            name=name,
            num_cpus=0,
            num_gpus=gpus if options.device == "cuda" else 0,
            max_restarts=0,
            max_concurrency=1,
            runtime_env={"env_vars": rollout_environment(options)},
        )
        .remote(kind, options)
    )


def _start_engine(kind: EngineKind, options: EngineOptions) -> Engine:
    """Return a running engine; it fails with the reason when the engine cannot start."""
    match kind:
        case "sglang":
            from autotune.launchers.builtin.engines.sglang_engine import SglangEngine

            return SglangEngine(options)
        case "light":
            from autotune.launchers.builtin.engines.light import LightEngine

            return LightEngine(options)
