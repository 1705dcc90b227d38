"""An AReaL job's engines, and what the knobs stand for in its settings: read from them, written back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from autotune.launchers.frameworks.areal.backend import Backend
from autotune.launchers.frameworks.areal.config import (
    Config,
    actor_scores,
    backends,
    critic_backend,
    has_reference,
    longest,
)
from autotune.launchers.frameworks.areal.workers import allocator, environment, host_allocator
from autotune.launchers.frameworks.core.cuda_graphs import LARGEST_LIMITED_BATCH
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs, Setting


class Site:
    """The engines of a job and its effective settings."""

    def __init__(self, job: Job, extra: Mapping[str, Any] | None = None) -> None:
        self.config = Config(job, extra)
        self.env = job.env
        self.rollout, self.actor, self.colocated = backends(self.config)
        self.critic = critic_backend(self.config)
        self.reference = has_reference(self.config)
        self.scores = actor_scores(self.config)
        self.longest, self.lengths_known = longest(self.config)

    @property
    def engine(self) -> str:
        """The inference engine."""
        return self.rollout.engine if self.rollout is not None else "sglang"

    @property
    def trainer(self) -> str:
        """The training engine."""
        return self.actor.engine if self.actor is not None else "fsdp"

    @property
    def apart(self) -> bool:
        """Whether only the reference model scores, so that its budget is the scoring budget."""
        return self.reference and not self.scores and self.critic is None

    @property
    def adam(self) -> bool:
        """Whether the optimizer is the one whose step can be streamed layer by layer."""
        return self.config.text("actor.optimizer.type") == "adam"

    @property
    def trained(self) -> tuple[str, ...]:
        """The roles that are trained."""
        return ("actor", "critic") if self.critic is not None else ("actor",)

    def engine_of(self, role: str) -> str:
        """Return the training engine of a role."""
        backend = self.critic if role == "critic" else self.actor
        return backend.engine if backend is not None else "fsdp"


Read: TypeAlias = Callable[[Site], Setting]
Write: TypeAlias = Callable[[Site, Knobs], dict[str, Any]]


def own_knobs(site: Site) -> Knobs:
    """Return the knobs as the job sets them, with AReaL's defaults where it is silent."""
    own: dict[str, Any] = {name: read(site) for name, (read, _) in TABLE.items()}
    return Knobs(**own, **_FIXED)


# What the code does whatever the settings say.
_FIXED: dict[str, Any] = {"dynamic_batching": True, "logprob_chunk": 1024, "entropy_chunking": True}
_FIXED |= {"loss_recompute": False, "sync_buffer": 1 << 30}


def settings_for(site: Site, knobs: Knobs, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings, as different from the job's, that make it use the named knobs."""
    own = own_knobs(site)
    wanted = {name: getattr(knobs, name) for name in names}
    wanted = {
        name: value for name, value in wanted.items() if value is not None and value != getattr(own, name)
    }
    full = msgspec.structs.replace(own, **wanted)
    changed: dict[str, Any] = {}
    for name in wanted:
        changed |= TABLE[name][1](site, full)
    return {
        name: value
        for name, value in changed.items()
        if _differs(site, name, value) or site.config.reference(name) in changed
    }


def pinned(before: Site, after: Site, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that would change along because they refer to a changed one, with their present values.

    The same setting of another role follows on purpose; anything else is the user's.
    """
    keys = {name.rpartition(".")[2] for name in changed}
    return {
        name: before.config.get(name)
        for name in before.config.written()
        if name not in changed
        and before.config.keys.kind_of(name) is not None
        and not before.config.keys.is_section(name)
        and name.rpartition(".")[2] not in keys
        and before.config.get(name) != after.config.get(name)
    }


def _differs(site: Site, name: str, value: Any) -> bool:
    return bool(site.config.get(name) != value or (value is None and not site.config.says(name)))


# --------------------------------------------------------------------------- the rollout engine


def _concurrency(site: Site) -> Setting:
    limit = site.config.number("rollout.max_concurrent_rollouts")
    return limit if limit is not None else site.config.number("rollout.consumer_batch_size")


def fraction_name(site: Site) -> str:
    """Return the engine's own name for its share of the card."""
    return "vllm.gpu_memory_utilization" if site.engine == "vllm" else "sglang.mem_fraction_static"


def _graphs(site: Site) -> Setting:
    if site.engine == "vllm":
        return "off" if site.config.is_on("vllm.enforce_eager") else "full"
    if site.config.is_on("sglang.disable_cuda_graph"):
        return "off"
    limited = site.config.has("sglang.cuda_graph_max_bs") or site.config.has("sglang.cuda_graph_bs")
    return "limited" if limited else "full"


def _write_graphs(site: Site, knobs: Knobs) -> dict[str, Any]:
    mode = knobs.cuda_graphs
    if site.engine == "vllm":
        return {"vllm.enforce_eager": mode == "off"}
    written: dict[str, Any] = {"sglang.disable_cuda_graph": mode == "off"}
    named = [name for name in ("sglang.cuda_graph_max_bs", "sglang.cuda_graph_bs") if site.config.has(name)]
    if mode == "limited" and not named:
        written["sglang.cuda_graph_max_bs"] = LARGEST_LIMITED_BATCH
    if mode == "full":
        written |= dict.fromkeys(named)
    return written


def _write_rollout_backend(site: Site, knobs: Knobs) -> dict[str, Any]:
    if site.rollout is None:
        return {}
    return _spread(site, rollout=site.rollout.resized(tensor=knobs.rollout_tensor_parallel), actor=site.actor)


# --------------------------------------------------------------------------- training


def _context(site: Site, engine: str) -> Setting:
    fits = site.actor is not None and (site.trainer == "fsdp") == (engine == "fsdp")
    return site.actor.context if site.actor is not None and fits else None


def _write_actor_backend(site: Site, knobs: Knobs) -> dict[str, Any]:
    if site.actor is None:
        return {}
    context = knobs.sequence_parallel if site.trainer == "fsdp" else knobs.context_parallel
    return _spread(
        site, rollout=site.rollout, actor=site.actor.resized(tensor=knobs.tensor_parallel, context=context)
    )


def _spread(site: Site, *, rollout: Backend | None, actor: Backend | None) -> dict[str, Any]:
    """Return the backends as settings; the older allocation mode follows where a job still has one."""
    written = {}
    if rollout is not None and rollout != site.rollout:
        written["rollout.backend"] = str(rollout)
    if actor is not None and actor != site.actor:
        written["actor.backend"] = str(actor)
    if written and site.config.text("allocation_mode") and rollout is not None and actor is not None:
        written["allocation_mode"] = allocation_mode(rollout, actor, shared=site.colocated)
    return written


def allocation_mode(rollout: Backend, actor: Backend, *, shared: bool) -> str:
    """Return the older way of writing two backends, which AReaL's launchers of one process per rank read."""
    if not shared:
        return f"{rollout}+{actor}"
    return str(rollout).replace(":", "[rollout]:", 1) + "|" + str(actor).replace(":", "[actor]:", 1)


def budget(site: Site, role: str) -> int:
    """Return the most tokens of one pass; unlimited, it holds a whole mini-batch of a data-parallel rank."""
    written = site.config.number(f"{role}.mb_spec.max_tokens_per_mb")
    if written is not None:
        return written
    data = site.actor.data if site.actor is not None else 1
    sequences = -(-samples(site) // data)
    return max(site.longest, -(-sequences // updates(site, role)) * site.longest)


def updates(site: Site, role: str) -> int:
    """Return how many updates of its weights a role makes in one step."""
    return site.config.number(f"{role}.ppo_n_minibatches") or 1


def samples(site: Site) -> int:
    """Return the sequences of one step."""
    return (site.config.number("train_dataset.batch_size") or 1) * (
        site.config.number("gconfig.n_samples") or 1
    )


def _write_tokens(site: Site, knobs: Knobs) -> dict[str, Any]:
    """Return the budget of the actor; roles that share its phases follow where theirs is larger."""
    tokens = knobs.tokens_per_microbatch or 0
    written = {"actor.mb_spec.max_tokens_per_mb": tokens}
    followers = [
        role for role, used in (("critic", site.critic is not None), ("ref", site.reference)) if used
    ]
    for role in followers:
        if not (role == "ref" and site.apart) and budget(site, role) > tokens:
            written[f"{role}.mb_spec.max_tokens_per_mb"] = tokens
    return written


def _recompute(site: Site) -> Setting:
    config = site.config
    if not config.is_on("actor.gradient_checkpointing"):
        return "off"
    if site.trainer == "megatron":
        return "selective" if config.text("actor.megatron.recompute_granularity") == "selective" else "full"
    if site.trainer == "archon":
        return {"none": "off", "full": "full"}.get(config.text("actor.archon.ac_mode"), "selective")
    return "full"


def _write_recompute(site: Site, knobs: Knobs) -> dict[str, Any]:
    mode = knobs.recompute
    written: dict[str, Any] = {}
    for role in site.trained:
        written[f"{role}.gradient_checkpointing"] = mode != "off"
        if mode == "off":
            continue
        if site.engine_of(role) == "archon":
            written[f"{role}.archon.ac_mode"] = mode
        elif site.engine_of(role) == "megatron":
            full = mode == "full"
            place = f"{role}.megatron.recompute_"
            written[place + "granularity"] = mode
            written[place + "method"] = "uniform" if full else None
            written[place + "num_layers"] = 1 if full else None
    return written


def _params(site: Site) -> Setting:
    return site.config.is_on(f"actor.{site.trainer}.offload_params") if site.trainer != "megatron" else None


def _optimizer(site: Site) -> Setting:
    if site.trainer != "fsdp" or not site.adam:
        return None
    return site.config.is_on("actor.fsdp.per_layer_optim_step") or _params(site) is True


def _write_offload(site: Site, knobs: Knobs) -> dict[str, Any]:
    """Return where weights and optimizer state are kept; weights on the host take the state with them.

    The streamed step is what keeps only the state there, and what makes the step bearable in both cases.
    """
    written: dict[str, Any] = {}
    for role in site.trained:
        engine = site.engine_of(role)
        if engine == "megatron":
            continue
        written[f"{role}.{engine}.offload_params"] = knobs.param_offload is True
        if engine == "fsdp" and knobs.optimizer_offload is not None:
            as_before = knobs.param_offload is True and _params(site) is True
            if not (as_before and knobs.optimizer_offload):
                written[f"{role}.fsdp.per_layer_optim_step"] = knobs.optimizer_offload
    return written


def _built(site: Site) -> tuple[str, ...]:
    """Return the roles of the FSDP engine whose model is loaded at the start."""
    roles = (*site.trained, "ref") if site.reference else site.trained
    return tuple(role for role in roles if site.engine_of(role) == "fsdp")


def _efficient_load(site: Site) -> Setting:
    if site.trainer != "fsdp":
        return None
    return all(site.config.is_on(f"{role}.fsdp.memory_efficient_load") for role in _built(site))


# --------------------------------------------------------------------------- allocator, sync, host


def _write_environment(site: Site, knobs: Knobs) -> dict[str, Any]:
    return environment(
        site.config,
        site.env,
        site.trained,
        device=knobs.allocator or "default",
        host=knobs.host_allocator or "default",
    )


# Every knob that AReaL has, with how it is read and how it is written.
TABLE: dict[str, tuple[Read, Write]] = {
    "concurrency": (_concurrency, lambda _, k: {"rollout.max_concurrent_rollouts": k.concurrency}),
    "memory_fraction": (
        lambda site: site.config.share(fraction_name(site)),
        lambda site, k: {fraction_name(site): k.memory_fraction},
    ),
    "rollout_tensor_parallel": (
        lambda site: site.rollout.tensor if site.rollout is not None else None,
        _write_rollout_backend,
    ),
    "cuda_graphs": (_graphs, _write_graphs),
    "max_batched_tokens": (
        lambda site: site.config.number("sglang.max_prefill_tokens") if site.engine == "sglang" else None,
        lambda _, k: {"sglang.max_prefill_tokens": k.max_batched_tokens},
    ),
    "tokens_per_microbatch": (lambda site: budget(site, "actor"), _write_tokens),
    "recompute": (_recompute, _write_recompute),
    "param_offload": (_params, _write_offload),
    "optimizer_offload": (_optimizer, _write_offload),
    "memory_efficient_load": (
        _efficient_load,
        lambda site, k: {
            f"{role}.fsdp.memory_efficient_load": k.memory_efficient_load for role in _built(site)
        },
    ),
    "sequence_parallel": (lambda site: _context(site, "fsdp"), _write_actor_backend),
    "context_parallel": (lambda site: _context(site, "megatron"), _write_actor_backend),
    "tensor_parallel": (
        lambda site: site.actor.tensor if site.actor is not None else None,
        _write_actor_backend,
    ),
    "logprob_tokens": (
        lambda site: budget(site, "ref") if site.apart else None,
        lambda _, k: {"ref.mb_spec.max_tokens_per_mb": k.logprob_tokens},
    ),
    "sync_mode": (
        lambda site: "disk" if site.config.text("actor.weight_update_mode") == "disk" else "memory",
        lambda _, k: {"actor.weight_update_mode": "disk" if k.sync_mode == "disk" else "xccl"},
    ),
    "dataloader_workers": (
        lambda site: site.config.number("train_dataset.num_workers"),
        lambda _, k: {"train_dataset.num_workers": k.dataloader_workers},
    ),
    "allocator": (lambda site: allocator(site.config, site.env), _write_environment),
    "host_allocator": (lambda site: host_allocator(site.config, site.env), _write_environment),
    "memory_profile": (
        lambda site: site.config.has("memory_profiler"),
        lambda _, k: {"memory_profiler": {"profile_steps": [0, 1]} if k.memory_profile else None},
    ),
}
