"""The Ray actor that owns one rollout engine."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from autotune.launchers.builtin.engines.base import EngineKind, EngineMemory, EngineOptions
from autotune.launchers.builtin.process.records import PhaseFailure, describe, report


def _reported(name: str, *, phase: str, optional: bool = False) -> Callable[..., Any]:
    """Return an actor's method that calls the engine's, and reports a failure as one of the phase.

    An engine that has nothing to do in an optional method lacks it.
    """

    def method(actor: "RolloutActor", *arguments: Any, step: int = 0, **named: Any) -> Any:
        with actor._reporting(phase, step=step), actor._engine.at_work(step):
            if optional and not hasattr(actor._engine, name):
                return None
            return getattr(actor._engine, name)(*arguments, **named)

    method.__name__ = name
    return method


class RolloutActor:
    """Samples responses and takes new weights.

    A plain synchronous actor: its methods run on the worker's main thread, the only one on which SGLang can
    install the signal handlers that end the actor when its scheduler dies.
    """

    def __init__(self, kind: EngineKind, options: EngineOptions) -> None:
        self._options = options
        with self._reporting("rollout_init", step=0):
            self._engine = _start_engine(kind, options)

    def ready(self) -> bool:
        """Return once the engine has started."""
        return True

    generate = _reported("generate", phase="rollout")
    sleep = _reported("sleep", phase="rollout", optional=True)
    wake = _reported("wake", phase="weight_sync", optional=True)
    begin_update = _reported("begin_update", phase="weight_sync", optional=True)
    update = _reported("update", phase="weight_sync")
    end_update = _reported("end_update", phase="weight_sync", optional=True)
    update_from_disk = _reported("update_from_disk", phase="weight_sync")

    def memory(self) -> EngineMemory:
        """Return the memory used since the last call."""
        memory: EngineMemory = self._engine.memory()
        return memory

    def shutdown(self) -> None:
        """End the engine and all its processes."""
        if hasattr(self._engine, "shutdown"):
            self._engine.shutdown()

    @contextmanager
    def _reporting(self, phase: str, *, step: int) -> Iterator[None]:
        try:
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
        # Each of them makes SGLang wait 5 s for a dump of its dead scheduler before it ends its caller.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
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
            # Stacks count against the budget, and SGLang raises their default to 64 MiB.
            "OMP_STACKSIZE": "2M",
            # torch.compile would start a C++ compiler, and its thread pool, inside the budget.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return environment


def start_rollout_actor(kind: EngineKind, options: EngineOptions, *, gpus: float = 1.0) -> Any:
    """Return the handle of a new rollout actor; call its `ready` to learn whether the engine started."""
    return (
        ray.remote(RolloutActor)
        .options(
            num_cpus=0,
            num_gpus=gpus if options.device == "cuda" else 0,
            max_restarts=0,
            max_concurrency=1,
            runtime_env={"env_vars": rollout_environment(options)},
        )
        .remote(kind, options)
    )


def _start_engine(kind: EngineKind, options: EngineOptions) -> Any:
    """Return a running engine; it fails with the reason when the engine cannot start."""
    match kind:
        case "sglang":
            from autotune.launchers.builtin.engines.sglang_engine import SglangEngine

            return SglangEngine(options)
        case "light":
            from autotune.launchers.builtin.engines.light import LightEngine

            return LightEngine(options)
