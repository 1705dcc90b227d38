"""Every setting of a GRPO job of AReaL 1.0.4, as its dataclasses declare them (areal/api/cli_args.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from autotune.launchers.frameworks.core.data import table
from autotune.policies.values.value import Value

ROOT = "GRPOConfig"


class _Class(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of areal_keys.yaml: its own fields with their types, and the class whose fields it inherits."""

    base: str = ""
    fields: dict[str, str] = {}


@cache
def classes() -> dict[str, dict[str, str]]:
    """Return the fields of every class, inherited ones included, with their types; `?` allows null."""
    declared = table(__package__, "keys.yaml", _Class)
    return {name: _inherited(name, declared) for name in declared}


def _inherited(name: str, declared: dict[str, _Class]) -> dict[str, str]:
    own = declared[name]
    return (_inherited(own.base, declared) if own.base else {}) | own.fields


def fields(section: str = "") -> dict[str, str] | None:
    """Return the keys of a section with their types, by its dotted path; None: there is no such section."""
    present = classes()[ROOT]
    for key in section.split(".") if section else ():
        kind = present.get(key, "").rstrip("?")
        if kind not in classes():
            return None
        present = classes()[kind]
    return present


def kind_of(path: str) -> str | None:
    """Return the type of a setting, such as `int?`; None where AReaL has no such setting."""
    section, _, key = path.rpartition(".")
    own = fields(section)
    if own is None:
        return "any" if _free(section) else None
    return own.get(key)


def leaves(section: str = "") -> Iterator[str]:
    """Yield the dotted path of every setting below a section."""
    for key, kind in (fields(section) or {}).items():
        path = f"{section}.{key}" if section else key
        yield path
        if kind.rstrip("?") in classes():
            yield from leaves(path)


def is_section(path: str) -> bool:
    """Return whether a path names a section and not a value."""
    return (kind_of(path) or "").rstrip("?") in classes()


def _free(section: str) -> bool:
    """Return whether a section takes any key: a dictionary."""
    kind = kind_of(section) if section else None
    return kind is not None and re.fullmatch(r"(dict|any)\??", kind) is not None
