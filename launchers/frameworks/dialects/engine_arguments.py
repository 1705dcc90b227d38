"""Checks the arguments that a framework passes on to SGLang or vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import msgspec
from packaging.version import Version

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core import versions
from autotune.launchers.frameworks.core.engines import Tier
from autotune.launchers.frameworks.core.types import is_count, misfit
from autotune.launchers.likeness import MISSPELT, nearest
from autotune.policies.values.job import Job
from autotune.policies.values.provenance import Origin
from autotune.policies.values.value import Value

_TITLES: Mapping[str, str] = {"sglang": "SGLang", "vllm": "vLLM"}


class EngineFacts(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of `python -m benchmarks.facts sglang VERSION`, or of `vllm`."""

    types: dict[str, str]  # int, float, bool, str or count, with `?` where null is allowed; else `any`
    defaults: dict[str, Any]
    command_line: dict[str, str] = {}  # types of arguments that only the command line has
    internal: frozenset[str] = frozenset()  # arguments that the command line lacks
    aliases: dict[str, str] = {}  # command-line name -> the argument that it sets
    by_card: tuple[Tier, ...] = ()  # SGLang's defaults by GPU memory, in ascending order

    @property
    def flags(self) -> dict[str, str]:
        """The types of the flags of the command line, by their names without dashes."""
        every = {**self.types, **self.command_line}
        return {name.replace("_", "-"): kind for name, kind in every.items() if name not in self.internal}


class Argument(NamedTuple):
    """An argument of an engine in a job's settings."""

    setting: str  # as the job writes it
    name: str
    value: Any


class Engine(NamedTuple):
    """An engine, and the release on record that stands for the job's own."""

    name: str
    release: versions.Release

    def __str__(self) -> str:
        """Return the engine and its release in words."""
        nearest = "" if self.release.exact else ", the nearest release known here,"
        return f"{_TITLES[self.name]} {self.release.version}{nearest}"


def engine_of(name: str, job: Job, pinned: Mapping[str, str], *, exact: bool) -> Engine | None:
    """Return an engine in the installed version, otherwise in the one that the framework pins.

    `exact`: whether the pin belongs to the job's own release of the framework. None for an engine without
    facts.
    """
    if name not in _TITLES:
        return None
    installed = job.engine_versions.get(name)
    result = versions.choose(installed or pinned.get(name), releases(name))
    return Engine(name, result if installed or exact else result._replace(origin=Origin.ASSUMED))


def arguments_below(node: str, settings: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterator[Argument]:
    """Yield the engine arguments below a node of a job's flat settings, only the first part of nested ones.

    `spelled` maps a setting to the job's own spelling of it.
    """
    for key, value in settings.items():
        if key == node and isinstance(value, Mapping):
            for name, each in value.items():
                yield Argument(spelled.get(key, key), _plain(str(name)), each)
        elif key.startswith(f"{node}."):
            name, _, inner = key.removeprefix(f"{node}.").partition(".")
            yield Argument(spelled.get(key, key), _plain(name), None if inner else value)


def problems(engine: Engine, given: Iterable[Argument]) -> Iterator[Problem]:
    """Yield misspelt arguments and values of a wrong type; nothing unless the release is the job's own.

    An argument of another known release is not misspelt: the installed version may differ from the pin.
    """
    if not engine.release.exact:
        return
    facts = _facts(engine)
    for argument in given:
        path = ("settings", argument.setting)
        if not _is_known(argument, facts):
            if (near := _near(argument, facts)) and not _known_elsewhere(engine, argument):
                yield Problem(path=path, message=f"{engine} has no argument {argument.name}", hint=near)
        elif (wanted := misfit(facts.types.get(argument.name), argument.value)) and not (
            engine.name == "vllm" and is_count(argument.value)  # vLLM's facts do not say which accept a unit
        ):
            message = f"{argument.name} of {engine} must be {wanted}, not {argument.value!r}"
            yield Problem(path=path, message=message)


def passed_on(engine: Engine, given: Iterable[Argument]) -> Iterator[str]:
    """Yield a warning for each unknown argument that the job's own engine may still accept."""
    facts = _facts(engine)
    for argument in given:
        if _is_known(argument, facts):
            continue
        near, known = _near(argument, facts), _known_elsewhere(engine, argument)
        if known or not near or not engine.release.exact:
            hint = f"{_TITLES[engine.name]} {known} has it" if known else near
            text = f"{engine} has no argument {argument.name}; it is passed on"
            yield f"{text} ({hint})" if hint else text


@cache
def releases(engine: str) -> tuple[str, ...]:
    """Return the releases of an engine whose arguments are known."""
    files = resources.files(__package__).joinpath("facts", engine).iterdir()
    return tuple(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def arguments_of(engine: str, version: str) -> EngineFacts:
    """Return the arguments of a known release."""
    return _facts(Engine(engine, versions.Release(version, Origin.EXACT)))


@cache
def _facts(engine: Engine) -> EngineFacts:
    file = resources.files(__package__).joinpath("facts", engine.name, f"{engine.release.version}.json")
    return msgspec.json.decode(file.read_bytes(), type=EngineFacts)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _is_known(argument: Argument, facts: EngineFacts) -> bool:
    """Return whether a release has an argument; a switch also exists with the prefix `no_`."""
    kind = facts.types.get(argument.name.removeprefix("no_"), "")
    return argument.name in facts.types or kind.startswith("bool")


def _near(argument: Argument, facts: EngineFacts) -> str:
    near = nearest(argument.name, facts.types, cutoff=MISSPELT)
    return f"did you mean {near}?" if near else ""


def _known_elsewhere(engine: Engine, argument: Argument) -> str:
    """Return the newest other release on record that accepts an argument; empty if none."""
    for version in sorted(releases(engine.name), key=Version, reverse=True):
        if _is_known(argument, arguments_of(engine.name, version)):
            return version
    return ""
