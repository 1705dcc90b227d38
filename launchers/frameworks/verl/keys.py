"""Which settings verl 0.9.1 knows: the keys of its configuration, and those that only `++` reaches."""

from __future__ import annotations

import difflib
from functools import cache

from autotune.launchers.frameworks.core.data import Words, document
from autotune.policies.values.value import Value


class _Row(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that several nodes share: every node (`.` is the top) has every name."""

    nodes: Words
    names: Words


class _Known(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What verl_keys.yaml holds."""

    both: tuple[_Row, ...]
    dp: tuple[_Row, ...]
    megatron: tuple[_Row, ...]
    added_both: tuple[_Row, ...]
    added_dp: tuple[_Row, ...]
    added_megatron: tuple[_Row, ...]
    open: tuple[str, ...]  # nodes whose content belongs to others
    plain: tuple[str, ...]  # nodes of which verl builds no object


@cache
def _known() -> _Known:
    return document(__package__, "keys.yaml", _Known)


@cache
def configured(engine: str) -> frozenset[str]:
    """Return the keys of the composed configuration of a model engine, dp or megatron."""
    known = _known()
    return _expanded(known.both, {"dp": known.dp, "megatron": known.megatron}[engine])


@cache
def addable(engine: str) -> frozenset[str]:
    """Return the keys that a model engine takes although its configuration does not mention them."""
    known = _known()
    return _expanded(known.added_both, {"dp": known.added_dp, "megatron": known.added_megatron}[engine])


def is_open(key: str) -> bool:
    """Return whether a key lies in a node whose content belongs to somebody else."""
    return any(key.startswith(f"{node}.") for node in _known().open)


def is_plain(key: str) -> bool:
    """Return whether a key lies in a node that verl reads without building an object of it."""
    root = key.split(".")[0]
    known = {name.split(".")[0] for name in configured("dp")}
    return root not in known or any(key.startswith(f"{node}.") for node in _known().plain)


def taken(key: str) -> str:
    """Return a key as Hydra takes it: plain where a configuration has it, else with `++`; `~` stays."""
    name = key.lstrip("+")
    known = name in configured("dp") or name in configured("megatron")
    return name if key.startswith("~") or (known and not key.startswith("+")) else f"++{name}"


@cache
def _nodes(engine: str) -> frozenset[str]:
    keys = configured(engine)
    return frozenset(
        ".".join(parts[:n]) for key in keys for parts in [key.split(".")] for n in range(1, len(parts))
    )


def is_node(key: str, engine: str) -> bool:
    """Return whether a key names a whole part of the configuration."""
    return key in _nodes(engine)


def similar(key: str, engine: str) -> str:
    """Return the known key that looks most like an unknown one; empty where none does."""
    known = sorted(configured(engine) | addable(engine))
    name = key.rpartition(".")[2]
    same = [other for other in known if other.rpartition(".")[2] == name]
    close = difflib.get_close_matches(key, same or known, n=1, cutoff=0.6)
    return close[0] if close else ""


def _expanded(*sections: tuple[_Row, ...]) -> frozenset[str]:
    return frozenset(
        name if node == "." else f"{node}.{name}"
        for section in sections
        for row in section
        for node in row.nodes
        for name in row.names
    )
