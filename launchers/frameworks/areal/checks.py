"""Checks an AReaL job before anything starts; AReaL itself reports most problems minutes later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.areal.backend import (
    ENGINES,
    TRAINERS,
    BackendError,
    from_allocation_mode,
    parse,
)
from autotune.launchers.frameworks.areal.config import RELEASES, Config
from autotune.launchers.frameworks.areal.rows import RENAMED
from autotune.launchers.frameworks.core.renames import replacement
from autotune.launchers.frameworks.core.types import misfit
from autotune.launchers.frameworks.core.versions import major
from autotune.launchers.frameworks.tabular.declared import SECTION, Facts
from autotune.launchers.likeness import nearest, suggestion
from autotune.policies.values.provenance import Origin

SHARED_SILENTLY = "AReaL's local scheduler then puts two workers on one card without a word"
_HYDRA = ("defaults", "hydra")
_CHOICES = {  # the parser accepts any text, AReaL fails once the models are loaded
    "actor.weight_update_mode": ("xccl", "disk"),
    "scheduler.type": ("ray", "local", "slurm"),
    "recover.mode": ("on", "off", "auto", "disabled"),
    "actor.prox_logp_method": ("recompute", "loglinear", "metrics"),
}
_NAMES = ("experiment_name", "trial_name")
_FILES = ("saver", "evaluator", "stats_logger")  # and recover, which is filled in
NO_NAME = "is no dotted name of a setting"
_NAME = re.compile(r"\w+(\.\w+)*")


def another_program(version: str | None) -> Problem | None:
    """Return the problem of a job whose AReaL has a later major version than those on record.

    AReaL 2.0.0 is tagged in its repository and not on PyPI.
    """
    if (major(version) or 0) <= (major(RELEASES[-1]) or 0):
        return None
    message = f"nothing is known of AReaL {version} here, only of {' and '.join(RELEASES)}"
    hint = "write `framework: command`, with its whole command line in `command:`"
    return Problem(path=("framework",), message=message, hint=hint)


def problems(config: Config) -> Iterator[Problem]:
    """Yield every problem of an AReaL job's settings."""
    if not config.job.command:
        message = "AReaL has no entry point of its own; `command` names the training script"
        hint = "such as `command: [python, examples/math/gsm8k_rl.py]`"
        yield Problem(path=("command",), message=message, hint=hint)
    if config.job.config is None:
        hint = "add `config: ...`; it becomes --config"
        yield Problem(path=("config",), message="AReaL needs its YAML file", hint=hint)
    yield from _values(config)
    if config.job.config is not None and config.job.document:
        yield from _missing(config)
        for role, engines in (("rollout", ENGINES), ("actor", TRAINERS)):
            yield from _backend(config, role, engines)
    yield from _rules(config)


# --------------------------------------------------------------------------- unknown settings


def unknown(config: Config) -> Iterator[Problem]:
    """Yield the settings that the release standing for the job's AReaL does not know.

    A setting that may belong to the script's own configuration gets no hint.
    """
    names = [*config.given, *_document_names(config.job.document, "", config.facts)]
    for name in dict.fromkeys(names):
        if name in config.facts or name in _HYDRA:
            continue
        if not _NAME.fullmatch(name):
            result = _wrong(config, name, f"`{name}` {NO_NAME}", "null removes a section")
            yield msgspec.structs.replace(result, origin=Origin.WRITTEN)
        else:
            own = _is_own(config, name.partition(".")[0])
            hint = "" if own else _suggestion(name, config.facts)
            yield _wrong(config, name, f"unknown setting `{name}`", hint)


def _document_names(tree: dict[str, Any], prefix: str, facts: Facts) -> Iterator[str]:
    """Yield the dotted names in a YAML file; unknown and free-form sections are not entered."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        yield name
        if isinstance(value, dict) and facts.kinds.get(name) == SECTION:
            yield from _document_names(value, f"{name}.", facts)


def _is_own(config: Config, root: str) -> bool:
    """Return whether a top-level name was added to AReaL's configuration by the job's own script.

    A name similar to one of AReaL's counts as misspelt only if the file lacks that one.
    """
    known = [name for name in config.facts.kinds if "." not in name]
    if root in known or replacement(RENAMED, root):
        return False
    meant = nearest(root, known, cutoff=0.75)
    return not meant or meant in config.job.document


def _suggestion(name: str, facts: Facts) -> str:
    """Return the setting that an unknown name probably means; empty if none."""
    section, _, last = name.rpartition(".")
    instead = replacement(RENAMED, last)
    if instead and instead != f"write {name}":
        return instead
    siblings = [other for other in facts.kinds if section and other.rpartition(".")[0] == section]
    alike = [other for other in facts.kinds if section and other.rpartition(".")[2] == last]
    for names, cutoff in ((facts.kinds, 0.85), (siblings, 0.75), (alike, 0.0)):
        if hint := suggestion(name, names, cutoff=cutoff):
            return hint
    return ""


# --------------------------------------------------------------------------- values


def _wrong(config: Config, name: str, message: str, hint: str = "") -> Problem:
    return Problem(path=config.place(name), message=message, hint=hint)


def _values(config: Config) -> Iterator[Problem]:
    for name in config.names():
        value = config.get(name)
        if wanted := misfit(config.facts.kind_of(name), value):
            yield _wrong(config, name, f"`{name}` must be {wanted}, not {value!r}")
    for name, choices in _CHOICES.items():
        value = config.get(name)
        if value is not None and value not in choices:
            yield _wrong(config, name, f"`{name}` is one of {', '.join(choices)}, not {value!r}")


def _missing(config: Config) -> Iterator[Problem]:
    """Yield required settings that the job does not set."""
    roles = [role for role in ("actor", "ref", "critic") if role == "actor" or config.has(role)]
    required = [*_NAMES, "train_dataset.path", "train_dataset.type"]
    required += [f"{section}.{name}" for section in (*roles, *_FILES) for name in _NAMES]
    required += [f"{section}.fileroot" for section in _FILES]
    for name in required:
        if not config.text(name) and config.reference(name) is None:
            hint = f"add it, or `{name}` to settings"
            yield Problem(path=("config",), message=f"`{name}` is missing", hint=hint)


def _backend(config: Config, role: str, engines: tuple[str, ...]) -> Iterator[Problem]:
    name, text, why = f"{role}.backend", config.text(f"{role}.backend"), ""
    alone = text in engines and not config.release.exact  # 0.3 says the dimensions in allocation_mode only
    if not text or alone:
        try:
            from_allocation_mode(config.text("allocation_mode"))
        except BackendError as error:
            if config.text("allocation_mode"):
                why = f"; allocation_mode does not say it either: {error}"
            hint = f"such as `{name}={engines[0]}:d{config.count('cluster.n_gpus_per_node') or 8}`"
            yield Problem(path=("config",), message=f"`{name}` is missing{why}", hint=hint)
        return
    try:
        backend = parse(text)
    except BackendError as error:
        yield _wrong(config, name, f"`{name}` = {text}: {error}")
        return
    if backend.engine not in engines:
        yield _wrong(config, name, f"`{name}` names one of {', '.join(engines)}, not {backend.engine}")


def _rules(config: Config) -> Iterator[Problem]:
    """Yield settings that AReaL refuses together."""
    yield from _devices(config)
    if config.colocated and not config.flag("enable_offload"):
        yield Problem(path=("config",), message="engines on the same devices need enable_offload=true")
    rollouts, batch = "rollout.max_concurrent_rollouts", config.count("train_dataset.batch_size")
    at_once = config.count(rollouts) or config.count("rollout.consumer_batch_size") or 1
    queue = config.count("rollout.queue_size") or config.queue * at_once
    if queue < batch:
        message = f"the rollout queue holds {queue} tasks, fewer than train_dataset.batch_size = {batch}"
        yield _wrong(config, rollouts, message, f"{rollouts} of at least {-(-batch // config.queue)}")


def _devices(config: Config) -> Iterator[Problem]:
    """Yield a problem if the engines need more devices than there are; AReaL would silently share them."""
    nodes, per_node = config.number("cluster.n_nodes"), config.number("cluster.n_gpus_per_node")
    if config.rollout is None or config.actor is None or not config.says("cluster.n_nodes"):
        return
    if nodes is None or per_node is None:
        return
    apart = [config.actor.ranks] if config.colocated else [config.actor.ranks, config.rollout.ranks]
    if config.critic is not None and config.text("critic.scheduling_strategy.type") != "colocation":
        apart.append(config.critic.ranks)
    if sum(apart) > nodes * per_node:
        there = f"the {nodes * per_node} of cluster.n_nodes x cluster.n_gpus_per_node"
        message = f"the engines need {' + '.join(map(str, apart))} devices, more than {there}"
        hint = "AReaL's local scheduler would put two workers on one card without a word"
        yield _wrong(config, "actor.backend", message, hint)
