"""Which settings a release of verl knows, with their defaults and types, and those that only `++` reaches."""

from __future__ import annotations

import difflib
from functools import cache, cached_property
from importlib import resources
from typing import Any

import msgspec

from autotune.launchers.frameworks.core import versions
from autotune.launchers.frameworks.core.data import document
from autotune.policies.values.value import Value

_FACTS = "facts"


class _Settings(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings with their defaults: of both model engines alike, and of one alone or with its own default."""

    both: dict[str, Any]
    dp: dict[str, Any]
    megatron: dict[str, Any]


class _Facts(_Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file of `facts/` holds, written by `python -m benchmarks.facts verl VERSION`."""

    engines: dict[str, str]  # the version of an inference engine that the release asks for, by its name
    added: _Settings  # fields of dataclasses that the YAML does not mention, which Hydra takes only with `++`
    types: dict[
        str, str
    ]  # of the fields of dataclasses: int, float, bool or str, with `?` where null is allowed


class _Nodes(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What nodes.yaml holds."""

    open: tuple[str, ...]  # nodes whose content belongs to others
    plain: tuple[str, ...]  # nodes of which verl builds no object


class Keys:
    """The settings of one release for one model engine, `dp` or `megatron`."""

    def __init__(self, release: versions.Release, engine: str) -> None:
        facts = _facts(release.version)
        self.release = release
        self.configured = facts.both | getattr(facts, engine)
        self.addable = facts.added.both | getattr(facts.added, engine)
        self.defaults = self.addable | self.configured
        self.engines = facts.engines
        self._types = facts.types

    def kind(self, key: str) -> str:
        """Return the type of a setting's values, such as `int?`; empty where any value goes."""
        declared = self._types.get(key, "")
        default = self.configured.get(key)
        if declared or isinstance(default, bool) or not isinstance(default, int | float):
            return declared
        return "float?"  # an untyped number: `1` may stand for a share

    @cached_property
    def _nodes(self) -> frozenset[str]:
        apart = [key.split(".") for key in self.configured]
        return frozenset(".".join(parts[:n]) for parts in apart for n in range(1, len(parts)))

    def is_node(self, key: str) -> bool:
        """Return whether a key names a whole part of the configuration."""
        return key in self._nodes

    def is_plain(self, key: str) -> bool:
        """Return whether a key lies in a node that verl reads without building an object of it."""
        root = key.split(".")[0]
        known = {name.split(".")[0] for name in self.configured}
        return root not in known or any(key.startswith(f"{node}.") for node in _node_lists().plain)

    def similar(self, key: str) -> str:
        """Return the known key that looks most like an unknown one; empty where none does."""
        known = sorted(self.defaults)
        name = key.rpartition(".")[2]
        same = [other for other in known if other.rpartition(".")[2] == name]
        close = difflib.get_close_matches(key, same or known, n=1, cutoff=0.6)
        return close[0] if close else ""


@cache
def releases() -> tuple[str, ...]:
    """Return the releases of verl whose settings are known."""
    files = resources.files(__package__).joinpath(_FACTS).iterdir()
    return tuple(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


@cache
def keys_of(version: str | None, engine: str) -> Keys:
    """Return the settings that stand for a job's version of verl, None where that is not known."""
    return Keys(versions.choose(version, releases()), engine)


def is_open(key: str) -> bool:
    """Return whether a key lies in a node whose content belongs to somebody else."""
    return any(key.startswith(f"{node}.") for node in _node_lists().open)


def is_known_node(key: str, version: str | None) -> bool:
    """Return whether a key names a whole part of either model engine's configuration."""
    return any(keys_of(version, engine).is_node(key) for engine in ("dp", "megatron"))


def taken(key: str, version: str | None = None) -> str:
    """Return a key as Hydra takes it: plain where a configuration has it, else with `++`; `~` stays."""
    name = key.lstrip("+")
    known = any(name in keys_of(version, engine).configured for engine in ("dp", "megatron"))
    return name if key.startswith("~") or (known and not key.startswith("+")) else f"++{name}"


@cache
def _facts(version: str) -> _Facts:
    file = resources.files(__package__).joinpath(_FACTS, f"{version}.json")
    return msgspec.json.decode(file.read_bytes(), type=_Facts)


@cache
def _node_lists() -> _Nodes:
    return document(__package__, "nodes.yaml", _Nodes)
