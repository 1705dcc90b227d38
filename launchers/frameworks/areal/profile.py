"""Profile of an AReaL job: its knobs with AReaL's names and grids, what limits them, and how it is spread."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autotune.launchers.frameworks.areal.backend import Backend
from autotune.launchers.frameworks.areal.checks import passed_on
from autotune.launchers.frameworks.areal.engines import Site, budget, fraction_name, own_knobs
from autotune.launchers.frameworks.areal.keys import kind_of
from autotune.launchers.frameworks.areal.layout import layout_of, resident
from autotune.launchers.frameworks.areal.recover import resumable, saves
from autotune.launchers.frameworks.areal.workers import ALLOCATOR, PRELOAD
from autotune.launchers.frameworks.core import splits
from autotune.launchers.frameworks.core.data import unsupported_always
from autotune.launchers.frameworks.core.host_allocators import SONAMES
from autotune.launchers.frameworks.core.lengths import with_lengths
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.profile import (
    AtLeast,
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Placement,
    Profile,
    Requires,
    Support,
)
from autotune.policies.values.remedy import Effect

_TWO = (False, True)
_NAMES = re.compile(r"[\w.]+")
_TOKENS = 128  # multiple of a token budget
_QUEUE = 16  # tasks that AReaL queues per concurrent rollout, rollout_controller.py


def profile_of(job: Job, cluster: Cluster, *, name: str) -> Profile:
    """Return what the policies need to know of an AReaL job."""
    site = Site(job)
    supported, unsupported = _support(site, job)
    knobs = own_knobs(site)
    return Profile(
        framework=name,
        knobs=knobs,
        supported=supported,
        unsupported=unsupported,
        constraints=tuple(_constraints(site, supported)),
        placement=placement(site),
        resident=resident(site),
        engine=site.engine,
        engine_version=job.engine_versions.get(site.engine) or site.config.keys.engines.get(site.engine, ""),
        longest_sequence=site.longest,
        resumable=resumable(job, site),
        layout=with_lengths(layout_of(site), job),
        warnings=(*job.notes, *passed_on(job, site.config), *_warnings(job, site, cluster)),
    )


def placement(site: Site) -> Placement:
    """Return whether training and generation share devices, and whether they run at the same time."""
    if site.colocated:
        return Placement.COLOCATED
    ahead = site.config.number("rollout.max_head_offpolicyness") or 0
    return Placement.ASYNCHRONOUS if ahead > 0 else Placement.SEPARATE


# --------------------------------------------------------------------------- what may change


def _support(site: Site, job: Job) -> tuple[dict[str, Support], dict[str, str]]:
    supported = {
        "concurrency": _offer(
            "rollout.max_concurrent_rollouts", Grid(minimum=_least_rollouts(site), multiple=1)
        ),
        "memory_fraction": _offer(fraction_name(site), Grid(minimum=0.1, maximum=0.95, multiple=0.01)),
        "tokens_per_microbatch": _offer(
            "actor.mb_spec.max_tokens_per_mb", Grid(minimum=_TOKENS, multiple=_TOKENS)
        ),
        "dataloader_workers": _offer("train_dataset.num_workers", Grid(minimum=0, multiple=1)),
        "memory_profile": _offer("memory_profiler.profile_steps", Grid(values=_TWO)),
    }
    unsupported = unsupported_always(__package__)
    _engine(site, supported, unsupported)
    _training(site, supported, unsupported)
    _parallel(site, job, supported, unsupported)
    known = site.config.keys
    for knob, support in list(supported.items()):
        names = [name for name in _NAMES.findall(support.setting) if kind_of(name) is not None]
        if absent := [name for name in names if known.kind_of(name) is None]:
            del supported[knob]
            unsupported[knob] = f"AReaL {known.release.version} has no setting {absent[0]}"
    return supported, unsupported


def _offer(setting: str, grid: Grid, *, effect: Effect = Effect.EXACT) -> Support:
    return Support(setting=setting, grid=grid, effect=effect)


def _engine(site: Site, supported: dict[str, Support], unsupported: dict[str, str]) -> None:
    if site.engine == "sglang":
        supported["cuda_graphs"] = _offer(
            "sglang.disable_cuda_graph, sglang.cuda_graph_max_bs", Grid(values=("full", "limited", "off"))
        )
        supported["max_batched_tokens"] = _offer("sglang.max_prefill_tokens", Grid(minimum=512, multiple=512))
    else:
        supported["cuda_graphs"] = _offer("vllm.enforce_eager", Grid(values=("full", "off")))
        unsupported["max_batched_tokens"] = "AReaL passes vLLM no such limit"
    if site.config.text("actor._version") == "v2":
        unsupported["sync_mode"] = "the v2 controllers send weights in their own way"
    elif site.colocated:
        unsupported["sync_mode"] = "engines on the same devices take weights from files only"
    else:
        supported["sync_mode"] = _offer("actor.weight_update_mode", Grid(values=("memory", "disk")))


def _training(site: Site, supported: dict[str, Support], unsupported: dict[str, str]) -> None:
    fsdp, megatron = site.trainer == "fsdp", site.trainer == "megatron"
    modes = ("off", "full") if fsdp else ("off", "selective", "full")
    supported["recompute"] = _offer("actor.gradient_checkpointing", Grid(values=modes))
    if megatron:
        unsupported["param_offload"] = "AReaL's Megatron engine keeps the weights on its devices"
    else:
        setting = f"actor.{site.trainer}.offload_params"
        supported["param_offload"] = _offer(setting, Grid(values=_TWO), effect=Effect.NUMERIC)
    if fsdp and site.adam:
        supported["optimizer_offload"] = _offer(
            "actor.fsdp.per_layer_optim_step", Grid(values=_TWO), effect=Effect.NUMERIC
        )
    elif fsdp:
        unsupported["optimizer_offload"] = "only the step of optimizer.type adam can be streamed"
    else:
        unsupported["optimizer_offload"] = f"the {site.trainer} engine keeps its optimizer with the weights"
    if not fsdp:
        unsupported["memory_efficient_load"] = f"the {site.trainer} engine loads each device's part only"
    elif any(site.config.is_on(f"{role}.init_from_scratch") for role in ("actor", "critic", "ref")):
        unsupported["memory_efficient_load"] = "AReaL refuses it together with init_from_scratch"
    else:
        supported["memory_efficient_load"] = _offer("actor.fsdp.memory_efficient_load", Grid(values=_TWO))
    if site.apart:
        supported["logprob_tokens"] = _offer(
            "ref.mb_spec.max_tokens_per_mb", Grid(minimum=_TOKENS, multiple=_TOKENS)
        )
    else:
        unsupported["logprob_tokens"] = (
            "the actor scores within its training budget; ref and critic follow tokens_per_microbatch"
        )
    if site.config.is_on("enable_offload"):
        unsupported["allocator"] = "torch_memory_saver, which enable_offload loads, needs fixed segments"
        unsupported["host_allocator"] = "enable_offload loads torch_memory_saver with LD_PRELOAD itself"
    else:
        place = "actor.scheduling_spec[].env_vars"
        supported["allocator"] = _offer(f"{place}.{ALLOCATOR}", Grid(values=("default", "expandable")))
        supported["host_allocator"] = _offer(f"{place}.{PRELOAD}", Grid(values=("default", *SONAMES)))


def _parallel(site: Site, job: Job, supported: dict[str, Support], unsupported: dict[str, str]) -> None:
    """Offer the splits that the model's heads and the devices allow, from more memory to less."""
    c_knob, other = ("sequence_parallel", "context_parallel")
    if site.trainer != "fsdp":
        c_knob, other = other, c_knob
    unsupported[other] = f"`c` of {site.trainer} is {c_knob.replace('_', ' ')}"
    node = site.config.number("cluster.n_gpus_per_node") or 0
    offers: dict[str, tuple[str, tuple[int, ...]]] = {
        "rollout_tensor_parallel": (
            "rollout.backend",
            _splits(job, site.rollout, "tensor", node=node),
        ),
        "tensor_parallel": ("actor.backend", _splits(job, site.actor, "tensor", node=node)),
        c_knob: ("actor.backend", _splits(job, site.actor, "context", node=0)),
    }
    if site.config.is_on("actor.enable_tree_training") and c_knob == "sequence_parallel":
        offers[c_knob] = ("actor.backend", ())
    for knob, (setting, values) in offers.items():
        if job.shape is None:
            unsupported[knob] = "the model's heads are not known; name the model in `model:`"
        elif not values:
            unsupported[knob] = "its layout cannot be split otherwise"
        else:
            supported[knob] = _offer(setting, Grid(values=values))


def _splits(job: Job, backend: Backend | None, dimension: str, *, node: int) -> tuple[int, ...]:
    """Return the legal sizes of a dimension; `node` bounds it to the devices of one, 0 does not."""
    if backend is None or job.shape is None or backend.experts_text:
        return ()
    heads, kv_heads = job.shape.heads, job.shape.kv_heads
    other = backend.context if dimension == "tensor" else backend.tensor
    free = backend.ranks // (backend.pipeline * other)
    return tuple(
        size
        for size in range(1, free + 1)
        if free % size == 0
        and heads % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
        and (not node or size <= node)
        and (heads // size) % (other if dimension == "context" else 1) == 0
    )


def _least_rollouts(site: Site) -> int:
    """Return the fewest rollouts at once: AReaL refuses a queue that does not hold a batch."""
    if site.config.number("rollout.queue_size") is not None:
        return 1
    return max(1, -(-(site.config.number("train_dataset.batch_size") or 1) // _QUEUE))


# --------------------------------------------------------------------------- what limits it


def _constraints(site: Site, supported: dict[str, Support]) -> Iterator[Constraint]:
    lengths = (
        "train_dataset.max_length + gconfig.max_new_tokens" if site.lengths_known else "the engine's context"
    )
    for knob in ("tokens_per_microbatch", "logprob_tokens"):
        if knob in supported:
            yield AtLeast(
                knob=knob,
                value=site.longest,
                why=(
                    f"a sequence may have {site.longest} tokens ({lengths}), and AReaL ends with `is larger "
                    "than capacity` at the first above max_tokens_per_mb, whatever the context parallelism"
                ),
            )
    if "max_batched_tokens" in supported:
        yield AtLeast(
            knob="max_batched_tokens",
            value=site.longest,
            why="an interrupted sequence is prefilled in one piece, as chunked prefill is off",
        )
    least = _least_rollouts(site)
    if least > 1:
        yield AtLeast(
            knob="concurrency",
            value=least,
            why=f"the queue holds {_QUEUE} tasks for each, and must hold train_dataset.batch_size",
        )
    for knob, backend in (
        ("rollout_tensor_parallel", site.rollout),
        ("tensor_parallel", site.actor),
        ("sequence_parallel", site.actor),
        ("context_parallel", site.actor),
    ):
        if knob in supported and backend is not None:
            yield Divides(knob=knob, of=backend.ranks, why=f"{backend} has {backend.ranks} devices")
            if knob != "rollout_tensor_parallel":
                yield FixedDuringRun(
                    knob=knob, why="a recover checkpoint can only be read by the layout that wrote it"
                )
    if site.actor is not None:  # which tensor and context sizes fit the trainer's devices together
        context = "sequence_parallel" if site.trainer == "fsdp" else "context_parallel"
        devices = site.actor.ranks // site.actor.pipeline
        why = f"the trainer has {site.actor.ranks} devices"
        yield from splits.together(supported, context, devices=devices, why=why)
    if "optimizer_offload" in supported:
        why = "the optimizer state follows offloaded weights to the host"
        yield Requires(knob="param_offload", value=True, other="optimizer_offload", values=(True,), why=why)
        yield Requires(knob="optimizer_offload", value=False, other="param_offload", values=(False,), why=why)


def _warnings(job: Job, site: Site, cluster: Cluster) -> Iterator[str]:
    yield from saves(job, site)
    if not site.lengths_known:
        yield (
            f"The longest sequence is not known, so the engine's {site.longest} tokens count; "
            "a smaller gconfig.max_tokens or a train_dataset.max_length lets max_tokens_per_mb go lower."
        )
    written = site.config.number("actor.mb_spec.max_tokens_per_mb")
    if written is not None and budget(site, "actor") < site.longest:
        yield (
            f"A sequence may have {site.longest} tokens, and AReaL ends at the first with more than "
            f"actor.mb_spec.max_tokens_per_mb = {written}."
        )
    if site.config.text("allocation_mode"):
        yield (
            "allocation_mode is deprecated and read by AReaL's old launchers only; "
            f"it stands for rollout.backend={site.rollout} and actor.backend={site.actor}."
        )
    if not site.config.has("scheduler.type"):
        yield "scheduler.type is not set, which AReaL refuses; scheduler.type=ray is added."
    per_node = site.config.number("cluster.n_gpus_per_node")
    if cluster.gpus_per_node and per_node and per_node > cluster.gpus_per_node:
        yield (
            f"cluster.n_gpus_per_node = {per_node}, but a node of this cluster has {cluster.gpus_per_node}; "
            "AReaL's local scheduler then puts two workers on one card without a word."
        )
    nodes = site.config.number("cluster.n_nodes") or 1
    root = site.config.text("cluster.name_resolve.nfs_record_root")
    if nodes > 1 and site.config.text("cluster.name_resolve.type") == "nfs" and root.startswith("/tmp"):  # noqa: S108
        yield "cluster.name_resolve.nfs_record_root lies in /tmp; with several nodes it must be shared."
