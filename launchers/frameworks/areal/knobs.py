"""Reads and writes the knobs of AReaL that involve several settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.launchers.frameworks.areal.backend import Backend
from autotune.launchers.frameworks.areal.config import Config
from autotune.launchers.frameworks.core import host_allocators, transformer
from autotune.launchers.frameworks.core.engines import LARGEST_LIMITED_BATCH
from autotune.policies.values.knobs import Knobs, Setting

_GRAPH_SIZES = ("sglang.cuda_graph_max_bs", "sglang.cuda_graph_bs")
_BUDGET = "mb_spec.max_tokens_per_mb"
_SPEC = "scheduling_spec"
_ALLOCATOR, _PRELOAD = "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD"
_EXPANDABLE = "expandable_segments:True"
# areal/api/cli_args.py, SchedulingSpec: the default of a worker
_WORKER: dict[str, Any] = {"cpu": 8, "gpu": 0, "mem": 32, "port_count": 2, "task_type": "worker"}
_WORKER |= {"cmd": "python -m areal.infra.rpc.rpc_server"}


# --------------------------------------------------------------------------- engines


def requests(config: Config) -> Setting:
    """Return the concurrent requests of an engine: its own limit, or the requests in flight for it."""
    limit = config.number("vllm.max_num_seqs" if config.engine == "vllm" else "sglang.max_running_requests")
    return min(filter(None, (limit, config.most_requests)), default=None)


def graphs(config: Config) -> Setting:
    """Return SGLang's mode of CUDA graphs."""
    if config.flag("sglang.disable_cuda_graph"):
        return "off"
    return "limited" if any(map(config.has, _GRAPH_SIZES)) else "full"


def write_graphs(config: Config, before: Knobs, knobs: Knobs) -> dict[str, Any]:
    """Return the settings of SGLang's mode of CUDA graphs."""
    mode, named = knobs.cuda_graphs, [name for name in _GRAPH_SIZES if config.has(name)]
    written: dict[str, Any] = {"sglang.disable_cuda_graph": mode == "off"}
    if mode == "limited" and not named:
        written["sglang.cuda_graph_max_bs"] = LARGEST_LIMITED_BATCH
    if mode == "full":
        written |= dict.fromkeys(named)
    return written


def write_rollout_backend(config: Config, before: Knobs, knobs: Knobs) -> dict[str, Any]:
    """Return the backends with engines of another size."""
    if config.rollout is None:
        return {}
    resized = config.rollout.resized(tensor=knobs.rollout_tensor_parallel)
    return _spread(config, rollout=resized, actor=config.actor)


def write_actor_backend(config: Config, before: Knobs, knobs: Knobs) -> dict[str, Any]:
    """Return the backends with another parallel layout of the trainer."""
    if config.actor is None:
        return {}
    context = knobs.sequence_parallel if config.trainer == "fsdp" else knobs.context_parallel
    resized = config.actor.resized(tensor=knobs.tensor_parallel, context=context)
    return _spread(config, rollout=config.rollout, actor=resized)


def _spread(config: Config, *, rollout: Backend | None, actor: Backend | None) -> dict[str, Any]:
    """Return the backends as settings, and the older allocation mode if the job has one."""
    written = {}
    if rollout is not None and rollout != config.rollout:
        written["rollout.backend"] = str(rollout)
    if actor is not None and actor != config.actor:
        written["actor.backend"] = str(actor)
    if written and config.text("allocation_mode") and rollout is not None and actor is not None:
        written["allocation_mode"] = allocation_mode(rollout, actor, shared=config.colocated)
    return written


def allocation_mode(rollout: Backend, actor: Backend, *, shared: bool) -> str:
    """Return two backends as an allocation mode, which AReaL's older launchers read."""
    if not shared:
        return f"{rollout}+{actor}"
    return str(rollout).replace(":", "[rollout]:", 1) + "|" + str(actor).replace(":", "[actor]:", 1)


# --------------------------------------------------------------------------- training


def write_tokens(config: Config, before: Knobs, knobs: Knobs) -> dict[str, Any]:
    """Return the actor's token budget, and that of roles in the same phases if theirs is larger."""
    tokens = knobs.tokens_per_microbatch or 0
    followers = ["critic"] if config.critic is not None else []
    followers += ["ref"] if config.scores_reference and not config.reference_budget_is_apart else []
    larger = [role for role in followers if config.budget(role) > tokens]
    return {f"{role}.{_BUDGET}": tokens for role in ("actor", *larger)}


def recompute(config: Config) -> Setting:
    """Return the mode of recomputation."""
    if not config.flag("actor.gradient_checkpointing"):
        return "off"
    match config.trainer:
        case "megatron":
            mode = transformer.recompute(config.field, config.job.shape)
            return "full" if mode == "off" else mode
        case "archon":
            return {"none": "off", "full": "full"}.get(config.text("actor.archon.ac_mode"), "selective")
    return "full"


def write_recompute(config: Config, before: Knobs, knobs: Knobs) -> dict[str, Any]:
    """Return the settings of a mode of recomputation, by the engine of each role."""
    mode = knobs.recompute
    written: dict[str, Any] = {}
    for role in config.trained:
        written[f"{role}.gradient_checkpointing"] = mode != "off"
        if mode == "off":
            continue
        if config.engine_of(role) == "archon":
            written[f"{role}.archon.ac_mode"] = mode
        elif config.engine_of(role) == "megatron":
            modules = transformer.modules(config.field, config.job.shape)
            fields = transformer.recomputing(before.recompute, mode, modules)
            written |= {f"{role}.megatron.{name}": value for name, value in fields.items()}
    return written


def params(config: Config) -> Setting:
    """Return whether weights are offloaded while not in use."""
    return config.flag(f"actor.{config.trainer}.offload_params")


def optimizer(config: Config) -> Setting:
    """Return whether the optimizer state is offloaded."""
    return config.flag("actor.fsdp.per_layer_optim_step") or params(config)


def write_offload(config: Config, before: Knobs, knobs: Knobs) -> dict[str, Any]:
    """Return the settings of offloaded weights and optimizer state; offloaded weights include the state.

    The streamed optimizer step offloads the state alone, and makes either case fast enough.
    """
    written: dict[str, Any] = {}
    for role in config.trained:
        engine = config.engine_of(role)
        if engine == "megatron":
            continue
        written[f"{role}.{engine}.offload_params"] = knobs.param_offload is True
        if engine == "fsdp" and knobs.optimizer_offload is not None:
            as_before = knobs.param_offload is True and params(config) is True
            if not (as_before and knobs.optimizer_offload):
                written[f"{role}.fsdp.per_layer_optim_step"] = knobs.optimizer_offload
    return written


# --------------------------------------------------------------------------- the workers' environment


def allocator(config: Config) -> str:
    """Return the trainer's allocator."""
    return "expandable" if _EXPANDABLE in _variable(config, _ALLOCATOR) else "default"


def host_allocator(config: Config) -> str:
    """Return the trainer's host memory allocator."""
    return host_allocators.preloaded(_variable(config, _PRELOAD))


def write_environment(config: Config, before: Knobs, knobs: Knobs) -> dict[str, Any]:
    """Return the trainers' scheduling specs with these allocators.

    The list is replaced as a whole, because Hydra cannot change an element. The engine's environment stays,
    because its graphs and all-reduce share memory by handles of fixed segments.
    """
    wanted: dict[str, str] = {}
    if knobs.allocator != allocator(config):
        expandable = knobs.allocator == "expandable"
        wanted[_ALLOCATOR] = _EXPANDABLE if expandable else _EXPANDABLE.replace("True", "False")
    if knobs.host_allocator != host_allocator(config):
        wanted[_PRELOAD] = host_allocators.SONAMES.get(knobs.host_allocator or "", "")
    written: dict[str, Any] = {}
    for role in config.trained:
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


def _variable(config: Config, name: str) -> str:
    """Return an environment variable of the actor's workers; without Ray they inherit the job's."""
    for spec in _specs(config, "actor"):
        variables = spec.get("env_vars") or {}
        if name in variables:
            return str(variables[name])
    return config.job.env.get(name, "")


def size(role: str, dimension: str) -> Callable[[Config], Setting]:
    """Return a reader of one dimension of a role's backend."""

    def read(config: Config) -> Setting:
        backend = config.rollout if role == "rollout" else config.actor
        size: int | None = getattr(backend, dimension, None)
        return size

    return read


def write_memory_profiler(config: Config, before: Knobs, knobs: Knobs) -> dict[str, Any]:
    """Return the settings of a memory profiler over the first two steps, or of none."""
    return {"memory_profiler": {"profile_steps": [0, 1]} if knobs.memory_profile else None}
