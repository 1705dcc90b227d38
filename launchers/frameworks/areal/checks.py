"""What is wrong with an AReaL job before anything starts: AReaL itself says most of it minutes later."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.areal.backend import (
    ENGINES,
    TRAINERS,
    BackendError,
    from_allocation_mode,
    parse,
)
from autotune.launchers.frameworks.areal.config import Config, overrides
from autotune.launchers.frameworks.areal.engines import Site
from autotune.launchers.frameworks.areal.keys import Keys
from autotune.launchers.frameworks.core.data import table
from autotune.launchers.frameworks.core.types import misfit
from autotune.policies.values.job import Job
from autotune.policies.values.value import Value

_HYDRA = ("defaults", "hydra")
_CHOICES = {  # the parser takes any text, AReaL fails once the models are loaded
    "actor.weight_update_mode": ("xccl", "disk"),
    "scheduler.type": ("ray", "local", "slurm"),
    "recover.mode": ("on", "off", "auto", "disabled"),
    "actor.prox_logp_method": ("recompute", "loglinear", "metrics"),
}
_NAMES = ("experiment_name", "trial_name")
_FILES = ("saver", "evaluator", "stats_logger")  # and recover, which is filled in
_NO_NAME = "is no dotted name of a setting"
_NAME = re.compile(r"\w+(\.\w+)*")


class _Moved(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of a key: the setting that took its place, or a hint where nothing did."""

    today: str = ""
    hint: str = ""


@cache
def moved() -> dict[str, _Moved]:
    """Return the keys of guides and of earlier releases that AReaL no longer knows, by their last part."""
    return table(__package__, "moved.yaml", _Moved)


def problems(job: Job) -> Iterator[Problem]:
    """Yield every mistake in an AReaL job's settings."""
    if not job.command:
        yield Problem(
            path=("command",),
            message="AReaL has no entry point of its own; `command` names the training script",
            hint="such as `command: [python, examples/math/gsm8k_rl.py]`",
        )
    if job.config is None:
        yield Problem(
            path=("config",),
            message="AReaL needs its YAML file",
            hint="add `config: ...`; it becomes --config",
        )
    site = Site(job)
    yield from (problem for problem in unknown(job, site.config) if _is_certain(site.config, problem))
    yield from _values(job, site)
    yield from _backends(job, site)
    yield from _rules(job, site)


def passed_on(job: Job, config: Config) -> tuple[str, ...]:
    """Return a sentence for each setting that the known releases do not have, but the job's own may."""
    release = config.keys.release
    nearest = "" if release.exact else ", the nearest release known here,"
    which = f"AReaL {release.version}{nearest}"
    return tuple(
        f"{which} does not have the setting {'.'.join(map(str, problem.path[1:]))}; it is passed on"
        + (f" ({problem.hint})" if problem.hint else "")
        for problem in unknown(job, config)
        if not _is_certain(config, problem)
    )


def unknown(job: Job, config: Config) -> Iterator[Problem]:
    """Yield the settings that the release which stands for the job's AReaL does not know."""
    own = overrides(job)
    for name in own:
        yield from _key(name, ("settings", _as_written(job, name)), job.document, config.keys)
    for name in _document_names(job.document, "", config.keys):
        if name not in own:
            yield from _key(name, ("config", *name.split(".")), job.document, config.keys)


def _is_certain(config: Config, problem: Problem) -> bool:
    """Return whether an unknown setting is a mistake: no name, or the job's own release has a similar one."""
    return _NO_NAME in problem.message or (config.keys.release.exact and bool(problem.hint))


def _document_names(tree: dict[str, Any], prefix: str, keys: Keys) -> Iterator[str]:
    """Yield the dotted names of a YAML file, of an unknown or free section only its own."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        yield name
        if isinstance(value, dict) and keys.is_section(name):
            yield from _document_names(value, f"{name}.", keys)


def _key(name: str, path: tuple[str | int, ...], document: dict[str, Any], keys: Keys) -> Iterator[Problem]:
    if keys.kind_of(name) is not None or name in _HYDRA:
        return
    if not _NAME.fullmatch(name):
        yield Problem(path=path, message=f"`{name}` {_NO_NAME}", hint="null removes a section")
        return
    if not _is_own(name.partition(".")[0], document, keys):
        yield Problem(path=path, message=f"unknown setting `{name}`", hint=suggestion(name, keys))


def _is_own(root: str, document: dict[str, Any], keys: Keys) -> bool:
    """Return whether a name at the top is one that the job's own script adds to AReaL's configuration.

    A name like one of AReaL's is a misspelt one only where the file lacks that one.
    """
    known = keys.fields() or {}
    if root in known or root in moved():
        return False
    meant = difflib.get_close_matches(root, known, n=1, cutoff=0.75)
    return not meant or meant[0] in document


def suggestion(name: str, keys: Keys) -> str:
    """Return what an unknown setting probably stands for, or the empty string."""
    section, _, last = name.rpartition(".")
    move = moved().get(last)
    if move is not None and move.today != name:
        return move.hint or f"it is `{move.today}` today"
    known = list(keys.leaves())
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    siblings = [f"{section}.{key}" for key in keys.fields(section) or {}] if section else []
    close = close or difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
    if not close and section:
        same = [other for other in known if other.rpartition(".")[2] == last]
        close = difflib.get_close_matches(name, same, n=1, cutoff=0.0)
    return f"did you mean `{close[0]}`?" if close else ""


def _as_written(job: Job, name: str) -> str:
    return next(key for key in job.settings if str(key).lstrip("+") == name)


def _wrong(job: Job, name: str, message: str, hint: str = "") -> Problem:
    """Return a mistake in a setting, where the job writes it."""
    path = ("settings", _as_written(job, name)) if name in overrides(job) else ("config", *name.split("."))
    return Problem(path=path, message=message, hint=hint)


def _values(job: Job, site: Site) -> Iterator[Problem]:
    for name in site.config.written():
        kind, value = site.config.keys.kind_of(name), site.config.get(name)
        wanted = misfit(kind, value)
        if wanted:
            yield _wrong(job, name, f"`{name}` must be {wanted}, not {value!r}")
    for name, choices in _CHOICES.items():
        value = site.config.get(name)
        if value is not None and value not in choices:
            yield _wrong(job, name, f"`{name}` is one of {', '.join(choices)}, not {value!r}")
    for name in _required(site):
        absent = not site.config.text(name) and site.config.reference(name) is None
        if job.config is not None and job.document and absent:
            yield Problem(
                path=("config",), message=f"`{name}` is missing", hint=f"add it, or `{name}` to settings"
            )


def _required(site: Site) -> Iterator[str]:
    """Yield the settings that AReaL has no default for."""
    yield from _NAMES
    yield from ("train_dataset.path", "train_dataset.type")
    roles = [role for role in ("actor", "ref", "critic") if role == "actor" or site.config.has(role)]
    for section in (*roles, *_FILES):
        yield from (f"{section}.{name}" for name in _NAMES)
    yield from (f"{section}.fileroot" for section in _FILES)


def _backends(job: Job, site: Site) -> Iterator[Problem]:
    if job.config is None or not job.document:
        return
    mode = site.config.text("allocation_mode")
    mode_error = ""
    if mode:
        try:
            from_allocation_mode(mode)
        except BackendError as error:
            mode_error = str(error)
    for role, engines in (("rollout", ENGINES), ("actor", TRAINERS)):
        name = f"{role}.backend"
        text = site.config.text(name)
        if not text:
            if not mode or mode_error:
                example = f"{engines[0]}:d{site.config.number('cluster.n_gpus_per_node') or 8}"
                why = f"; allocation_mode does not say it either: {mode_error}" if mode_error else ""
                yield Problem(
                    path=("config",), message=f"`{name}` is missing{why}", hint=f"such as `{name}={example}`"
                )
            continue
        try:
            backend = parse(text)
        except BackendError as error:
            yield _wrong(job, name, f"`{name}` = {text}: {error}")
            continue
        if backend.engine not in engines:
            yield _wrong(job, name, f"`{name}` names one of {', '.join(engines)}, not {backend.engine}")


def _rules(job: Job, site: Site) -> Iterator[Problem]:
    config = site.config
    if config.text("scheduler.type") == "slurm":
        yield _wrong(
            job,
            "scheduler.type",
            "AReaL's Slurm scheduler starts workers outside the Ray cluster that autotune watches",
            "use scheduler.type=ray on that cluster",
        )
    if site.rollout is not None and site.actor is not None:
        yield from _devices(job, site)
    if site.colocated:
        if not config.is_on("enable_offload"):
            yield Problem(path=("config",), message="engines on the same devices need enable_offload=true")
        if config.text("actor.weight_update_mode") != "disk":
            yield _wrong(
                job,
                "actor.weight_update_mode",
                "engines on the same devices need actor.weight_update_mode=disk",
            )
    for role in ("actor", "ref", "critic"):
        if config.is_on(f"{role}.offload") and not config.is_on("enable_offload"):
            yield _wrong(job, f"{role}.offload", f"`{role}.offload` needs enable_offload=true")
    distributed = "actor.megatron.ddp.use_distributed_optimizer"
    if site.trainer == "megatron" and not config.is_on("actor.use_lora") and not config.is_on(distributed):
        yield _wrong(
            job, distributed, "AReaL's Megatron trainer asserts that it is on", f"leave out `{distributed}`"
        )
    rollouts, batch = (
        config.number("rollout.max_concurrent_rollouts"),
        config.number("train_dataset.batch_size"),
    )
    queue = config.number("rollout.queue_size") or 16 * (
        rollouts or config.number("rollout.consumer_batch_size") or 1
    )
    if batch and queue < batch:
        yield _wrong(
            job,
            "rollout.max_concurrent_rollouts",
            f"the rollout queue holds {queue} tasks, fewer than train_dataset.batch_size = {batch}",
            f"rollout.max_concurrent_rollouts of at least {-(-batch // 16)}",
        )


def _devices(job: Job, site: Site) -> Iterator[Problem]:
    """Yield a problem where the engines need more devices than there are: AReaL then shares them silently."""
    assert site.rollout is not None
    assert site.actor is not None
    nodes, per_node = site.config.number("cluster.n_nodes"), site.config.number("cluster.n_gpus_per_node")
    if not site.config.says("cluster.n_nodes") or nodes is None or per_node is None:
        return
    apart = [site.actor.ranks] if site.colocated else [site.actor.ranks, site.rollout.ranks]
    critic_apart = site.config.text("critic.scheduling_strategy.type") != "colocation"
    if site.critic is not None and critic_apart:
        apart.append(site.critic.ranks)
    if sum(apart) > nodes * per_node:
        yield _wrong(
            job,
            "actor.backend",
            (
                f"the engines need {' + '.join(map(str, apart))} devices, more than the "
                f"{nodes * per_node} of cluster.n_nodes x cluster.n_gpus_per_node"
            ),
            "AReaL's local scheduler would put two workers on one card without a word",
        )
