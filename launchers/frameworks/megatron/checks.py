"""What is wrong with the flags of a job before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from functools import cache

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core.data import Words, document
from autotune.launchers.frameworks.dialects.flags import Flags, bare, is_on, parsed_value
from autotune.launchers.frameworks.megatron.checkpoints import saves
from autotune.launchers.frameworks.megatron.job import (
    Dialect,
    Shape,
    can_rebuild_weights,
    needs_weights_backup,
    roles_of,
)
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement
from autotune.policies.values.value import Value

_ENGINE = "sglang-"
_OF_CLIENT = ("sglang-server-concurrency", "sglang-config", "sglang-router-")
_OPEN = ("router-", "opd-", "teacher-")  # flags of other parsers, with these prefixes
_NEAR = 0.84  # likeness above which an unknown name is taken for a misspelt one


class _Values(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What values.yaml holds."""

    numbers: tuple[str, ...]
    choices: dict[str, tuple[str, ...]]
    of_framework: Words  # arguments of the engine that the frameworks set themselves


@cache
def _known_values() -> _Values:
    return document(__package__, "values.yaml", _Values)


def problems_of(job: Job, flags: Flags, shape: Shape, dialect: Dialect) -> tuple[Problem, ...]:
    """Return what the framework would refuse, or worse, ignore."""
    keys = {bare(key): key for key in job.settings}
    result = list(_names(job, dialect))
    result += _values(flags, keys)
    for demand in DEMANDS:
        for name, message, hint in demand(job, flags, shape, dialect):
            path = ("settings", keys[name]) if name in keys else ("settings",)
            result.append(Problem(path=path, message=message, hint=hint))
    if job.config is not None:
        hint = "write the flags under `settings:`"
        result.append(Problem(path=("config",), message=f"{dialect.name} takes flags, no file", hint=hint))
    return tuple(result)


def unknown_of(job: Job, dialect: Dialect) -> tuple[str, ...]:
    """Return the flags that are in no list of known names and are like none of them."""
    return tuple(
        bare(key)
        for key in job.settings
        if not _is_known(bare(key), dialect) and not _meant(bare(key), dialect)
    )


# --------------------------------------------------------------------------- names


def _names(job: Job, dialect: Dialect) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    ignores = "refuses" if dialect.strict else "ignores"
    silently = "refuse" if dialect.strict else "ignore without a word"
    for key in job.settings:
        name = bare(key)
        path = ("settings", key)
        if name in seen:
            message = f"unknown which of `{seen[name]}` and `{key}` counts: they are one flag"
            yield Problem(path=path, message=message)
        seen[name] = key
        if name in dialect.removed:
            yield Problem(
                path=path,
                message=f"{dialect.name} {ignores} --{name}" + ("" if dialect.strict else " without a word"),
                hint=dialect.removed[name],
            )
        elif name.startswith(_ENGINE) and name.removeprefix(_ENGINE) in _known_values().of_framework:
            message = f"{dialect.name} sets this of the engine itself and {ignores} --{name}"
            yield Problem(path=path, message=message)
        elif not _is_known(name, dialect) and (meant := _meant(name, dialect)):
            message = f"unknown flag --{name}, which {dialect.name} would {silently}"
            yield Problem(path=path, message=message, hint=f"did you mean --{meant}?")


def _is_known(name: str, dialect: Dialect) -> bool:
    if name.startswith(_ENGINE):
        return name.startswith(_OF_CLIENT) or name.removeprefix(_ENGINE) in dialect.engine_names
    for prefix in dialect.prefixes:
        if name.startswith(prefix):
            return name.removeprefix(prefix).removeprefix("no-") in dialect.engine_names
    if name.startswith(_OPEN) or (name.startswith("no-") and name[3:] in dialect.negatable):
        return True
    return name in dialect.names or name in dialect.removed


def _meant(name: str, dialect: Dialect) -> str:
    hyphens = name.replace("_", "-")
    if _is_known(hyphens, dialect):
        return hyphens
    engine = {prefix + known for prefix in (_ENGINE, *dialect.prefixes) for known in dialect.engine_names}
    near = difflib.get_close_matches(hyphens, dialect.names | engine, n=1, cutoff=_NEAR)
    return near[0] if near else ""


def _values(flags: Flags, keys: dict[str, str]) -> Iterator[Problem]:
    for name in _known_values().numbers:
        value = flags.given.get(name)
        if value is None or name not in keys:
            continue
        if isinstance(value, bool) or not isinstance(parsed_value(str(value)), int | float):
            yield Problem(path=("settings", keys[name]), message=f"--{name} is a number, not {value!r}")
    for name, choices in _known_values().choices.items():
        value = flags.given.get(name)
        if value is not None and name in keys and value not in choices:
            hint = "one of " + ", ".join(choices)
            yield Problem(path=("settings", keys[name]), message=f"--{name} has no {value!r}", hint=hint)


# --------------------------------------------------------------------------- what has to go together

Demand = Callable[[Job, Flags, Shape, Dialect], Iterator[tuple[str, str, str]]]


def _recomputation(job: Job, flags: Flags, shape: Shape, dialect: Dialect) -> Iterator[tuple[str, str, str]]:
    granularity = flags.text("recompute-granularity")
    if granularity == "full" and not (flags.has("recompute-method") and flags.has("recompute-num-layers")):
        yield (
            "recompute-granularity",
            "full recomputation needs --recompute-method and --recompute-num-layers",
            "uniform and 1 keep least",
        )
    if granularity == "selective" and flags.has("recompute-method"):
        yield "recompute-method", "selective recomputation must not have --recompute-method", "leave it out"


def _offload(job: Job, flags: Flags, shape: Shape, dialect: Dialect) -> Iterator[tuple[str, str, str]]:
    if flags.on("optimizer-cpu-offload") and not flags.on("use-precision-aware-optimizer"):
        yield (
            "optimizer-cpu-offload",
            "Megatron asserts that --optimizer-cpu-offload comes with --use-precision-aware-optimizer",
            "add use-precision-aware-optimizer: true",
        )
    if flags.on("overlap-cpu-optimizer-d2h-h2d") and not flags.on("optimizer-cpu-offload"):
        yield "overlap-cpu-optimizer-d2h-h2d", "it overlaps nothing without --optimizer-cpu-offload", ""
    without = dialect.weights_backup
    if without and flags.on(without):
        if dialect.rebuilds_weights and not can_rebuild_weights(flags, shape):
            yield (
                without,
                "only a colocated, sleeping trainer with Adam's fp32 master weights can rebuild its weights",
                "leave it out",
            )
        if not dialect.rebuilds_weights and needs_weights_backup(flags):
            yield (
                without,
                "without its copy the weights of another model cannot be switched in",
                "leave the backuper on",
            )


def _batching(job: Job, flags: Flags, shape: Shape, dialect: Dialect) -> Iterator[tuple[str, str, str]]:
    if not shape.dynamic:
        return
    budget = flags.count("max-tokens-per-gpu")
    if not budget:
        yield "use-dynamic-batch-size", "dynamic batching needs --max-tokens-per-gpu", ""
    if flags.text("qkv-format") == "bshd":
        yield "qkv-format", "--qkv-format bshd forbids --use-dynamic-batch-size", ""
    context = flags.count("rollout-max-context-len")
    if dialect.name == "relax" and budget and budget * shape.context < context:
        message = (
            f"--max-tokens-per-gpu {budget} x context parallelism {shape.context} is below "
            f"--rollout-max-context-len {context}, which Relax refuses"
        )
        yield "max-tokens-per-gpu", message, f"at least {-(-context // shape.context)}"


def _parallelism(job: Job, flags: Flags, shape: Shape, dialect: Dialect) -> Iterator[tuple[str, str, str]]:
    product = shape.tensor * shape.pipeline * shape.context
    if shape.trainer_gpus % product:
        yield (
            "tensor-model-parallel-size",
            f"tensor x pipeline x context parallelism = {product} does not divide {shape.trainer_gpus} GPUs",
            "",
        )
    for count, what in ((shape.heads, "attention heads"), (shape.kv_heads, "key-value heads")):
        if count and count % shape.tensor:
            yield (
                "tensor-model-parallel-size",
                f"tensor parallelism {shape.tensor} does not divide {count} {what}",
                "",
            )
    if shape.engine_gpus % shape.engine_size:
        yield (
            "rollout-num-gpus-per-engine",
            f"engines of {shape.engine_size} GPUs do not fill {shape.engine_gpus} GPUs",
            "",
        )
    if dialect.per_token_context and shape.context > 1 and not flags.on("calculate-per-token-loss"):
        yield "context-parallel-size", "context parallelism asks for --calculate-per-token-loss", ""


def _devices(job: Job, flags: Flags, shape: Shape, dialect: Dialect) -> Iterator[tuple[str, str, str]]:
    alone = ("debug-train-only", "load-debug-rollout-data", "rollout-external-engine-addrs")
    if not shape.engine_gpus and not any(flags.on(name) for name in alone):
        hint = "share the trainer's cards with --colocate, or give the engines --rollout-num-gpus"
        yield "rollout-num-gpus", "no GPUs are left for the engines", hint
    if job.cluster.gpus_per_node is None:
        return
    offered = job.cluster.nodes * job.cluster.gpus_per_node
    shared = shape.placement is Placement.COLOCATED
    roles = tuple(roles_of(flags).values()) or (shape.trainer_gpus, shape.engine_gpus)
    wanted = max(roles) if shared else sum(roles)
    if wanted > offered:
        name = "resource" if flags.has("resource") else "actor-num-gpus-per-node"
        yield name, f"the job wants {wanted} GPUs, `cluster` has {offered}", ""


def _run(job: Job, flags: Flags, shape: Shape, dialect: Dialect) -> Iterator[tuple[str, str, str]]:
    if not flags.has("num-rollout") and not flags.has("num-epoch"):
        yield "num-rollout", "neither --num-rollout nor --num-epoch says how long to train", ""
    if flags.number("kl-coef") and flags.number("kl-loss-coef"):
        yield "kl-coef", "only one of --kl-coef and --kl-loss-coef can be set", ""
    if flags.text("update-weight-transport") == "disk" and not flags.has("update-weight-disk-dir"):
        yield "update-weight-transport", "disk transport needs --update-weight-disk-dir", ""
    if flags.text("memory-recorder") == "memray" and not flags.has("memory-snapshot-num-steps"):
        yield "memory-recorder", "memray needs --memory-snapshot-num-steps", ""
    if not dialect.resumes_critic and shape.critic and saves(flags):
        yield (
            "advantage-estimator",
            f"{dialect.name} would start the critic of a relaunch from the actor's checkpoint",
            "`save: null` starts over instead; or drive the script with `framework: command`",
        )
    if flags.text("train-backend", "megatron") != "megatron":
        yield (
            "train-backend",
            f"only {dialect.name}'s Megatron trainer is driven",
            "drive the script with `framework: command`",
        )
    if flags.text("update-weight-transfer-mode", "broadcast") != "broadcast" and flags.on("colocate"):
        yield "update-weight-transfer-mode", "colocated weights need no transfer: --colocate refuses it", ""
    if dialect.name == "relax" and shape.critic:
        yield "advantage-estimator", "Relax no longer trains a critic: `ppo` is refused", ""
    if flags.on("fully-async") and flags.on("colocate"):
        hint = "--hybrid is the mix" if "hybrid" in dialect.names else ""
        yield "fully-async", "--fully-async and --colocate exclude each other", hint
    if (
        dialect.name == "miles"
        and flags.on("fully-async")
        and any(w.endswith("train.py") for w in job.command)
    ):
        yield "fully-async", "train.py refuses --fully-async", "run train_async.py"
    if is_on(flags.given.get("colocate")) and any("train_async" in word for word in job.command):
        yield "colocate", "train_async.py refuses --colocate", ""


DEMANDS: tuple[Demand, ...] = (_recomputation, _offload, _batching, _parallelism, _devices, _run)
