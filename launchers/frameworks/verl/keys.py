"""Which settings a release of verl knows, with their defaults and types, and those that only `++` reaches."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources
from typing import Any

import msgspec
from packaging.version import Version

from autotune.launchers.frameworks.core.data import document
from autotune.launchers.frameworks.core.versions import choose
from autotune.launchers.frameworks.tabular.declared import FREE, Facts
from autotune.policies.values.value import Value

_FACTS = "facts"
ENGINES = ("dp", "megatron")  # the model engines whose settings are known


class _Settings(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings with their defaults: of both model engines alike, and of one alone or with its own default."""

    both: dict[str, Any]
    dp: dict[str, Any]
    megatron: dict[str, Any]

    def of(self, engine: str) -> dict[str, Any]:
        """Return the settings of a model engine."""
        own: dict[str, Any] = getattr(self, engine)
        return self.both | own


class _File(_Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file of `facts/` holds, written by `python -m benchmarks.facts verl VERSION`."""

    engines: dict[str, str]  # the version of an inference engine that the release asks for, by its name
    added: _Settings  # fields of dataclasses that the YAML does not mention, which Hydra takes only with `++`
    types: dict[str, str]  # of fields: int, float, bool or str, with `?` where null is allowed


class _Nodes(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What nodes.yaml holds."""

    open: tuple[str, ...]  # nodes whose content belongs to others
    plain: tuple[str, ...]  # nodes of which verl builds no object


class Keys(Facts, frozen=True):
    """The settings of one release for one model engine."""

    configured: dict[str, Any] = {}  # those that Hydra takes without `++`, with their defaults
    nodes: frozenset[str] = frozenset()  # whole parts of the configuration

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
    """Return the releases of verl whose settings are known, the newest one last."""
    files = resources.files(__package__).joinpath(_FACTS).iterdir()
    return tuple(sorted((file.name.removesuffix(".json") for file in files), key=Version))


@cache
def keys_of(version: str | None, engine: str) -> Keys:
    """Return the settings that stand for a job's version of verl, None where that is not known."""
    release = choose(version, releases()).version
    content = resources.files(__package__).joinpath(_FACTS, f"{release}.json").read_bytes()
    file = msgspec.json.decode(content, type=_File)
    configured = file.of(engine)
    defaults = file.added.of(engine) | configured
    apart = [key.split(".") for key in configured]
    types = {key: file.types.get(key) or _kind(configured.get(key)) for key in defaults}
    return Keys(
        types=file.types | types | dict.fromkeys(_node_lists().open, FREE),
        defaults=defaults,
        engines=file.engines,
        configured=configured,
        nodes=frozenset(".".join(parts[:n]) for parts in apart for n in range(1, len(parts))),
    )


def is_node(key: str, version: str | None) -> bool:
    """Return whether a key names a whole part of either model engine's configuration."""
    return any(key in keys_of(version, engine).nodes for engine in ENGINES)


def taken(key: str, version: str | None = None) -> str:
    """Return a key as Hydra takes it: plain where a configuration has it, else with `++`; `~` stays."""
    name = key.lstrip("+")
    known = any(name in keys_of(version, engine).configured for engine in ENGINES)
    return name if key.startswith("~") or (known and not key.startswith("+")) else f"++{name}"


def _kind(default: Any) -> str:
    """Return the type of an undeclared setting: `1` may stand for a share, texts for anything."""
    return "float?" if isinstance(default, int | float) and not isinstance(default, bool) else ""


@cache
def _node_lists() -> _Nodes:
    return document(__package__, "nodes.yaml", _Nodes)
