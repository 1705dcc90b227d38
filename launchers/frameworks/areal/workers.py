"""The environment of AReaL's workers, which is part of how their roles are scheduled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.launchers.frameworks.areal.config import Config
from autotune.launchers.frameworks.core import host_allocators

EXPANDABLE = "expandable_segments:True"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
PRELOAD = "LD_PRELOAD"
_SPEC = "scheduling_spec"
# areal/api/cli_args.py SchedulingSpec: what a worker gets where the job describes none
_WORKER: dict[str, Any] = {"cpu": 8, "gpu": 0, "mem": 32, "port_count": 2, "task_type": "worker"}
_WORKER |= {"cmd": "python -m areal.infra.rpc.rpc_server"}


def allocator(config: Config, env: Mapping[str, str]) -> str:
    """Return how PyTorch's allocator of the trainers works: default or expandable."""
    return "expandable" if EXPANDABLE in _variable(config, env, ALLOCATOR) else "default"


def host_allocator(config: Config, env: Mapping[str, str]) -> str:
    """Return which allocator of host memory the trainers load."""
    return host_allocators.preloaded(_variable(config, env, PRELOAD))


def environment(
    config: Config, env: Mapping[str, str], roles: tuple[str, ...], *, device: str, host: str
) -> dict[str, Any]:
    """Return how the trainers are scheduled with these allocators.

    A list is replaced whole, as Hydra cannot reach into one. The engine keeps its own environment: its graphs
    and its all-reduce share memory by handles of fixed segments.
    """
    wanted: dict[str, str] = {}
    if device != allocator(config, env):
        wanted[ALLOCATOR] = EXPANDABLE if device == "expandable" else EXPANDABLE.replace("True", "False")
    if host != host_allocator(config, env):
        wanted[PRELOAD] = host_allocators.SONAMES.get(host, "")
    written: dict[str, Any] = {}
    for role in roles:
        if role == "actor" or config.reference(f"{role}.{_SPEC}") is None:
            written[f"{role}.{_SPEC}"] = [
                spec | {"env_vars": {**(spec.get("env_vars") or {}), **wanted}}
                for spec in _specs(config, role)
            ]
    if config.reference(f"rollout.{_SPEC}") is not None:
        written[f"rollout.{_SPEC}"] = _specs(config, "rollout")
    return written


def _specs(config: Config, role: str) -> list[dict[str, Any]]:
    value = config.get(f"{role}.{_SPEC}")
    listed = [dict(spec) for spec in value if isinstance(spec, dict)] if isinstance(value, list) else []
    return listed or [dict(_WORKER)]


def _variable(config: Config, env: Mapping[str, str], name: str) -> str:
    """Return an environment variable of the actor's workers, which without Ray inherit the job's."""
    for spec in _specs(config, "actor"):
        variables = spec.get("env_vars") or {}
        if name in variables:
            return str(variables[name])
    return env.get(name, "")
