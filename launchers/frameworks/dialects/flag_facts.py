"""Checks a job's settings against the argparse flags on record for a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from math import isfinite
from typing import Any

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.dialects.flags import bare, is_on, parsed_value
from autotune.launchers.likeness import MISSPELT, nearest
from autotune.policies.values.value import Value

_SWITCHES = ("BooleanOptionalAction", "DeprecatedStoreTrueAction")
_KINDS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}


class Flag(Value, frozen=True, kw_only=True):
    """The argparse declaration of a flag."""

    action: str = "store"
    type: str = "str"
    choices: tuple[str | int, ...] = ()
    default: Any = None  # if it is a literal


class FlagFacts(Value, frozen=True, kw_only=True):
    """A file of `python -m benchmarks.facts.argparse_flags`."""

    source: str
    flags: dict[str, Flag]


@cache
def flag_facts(package: str, file: str) -> FlagFacts:
    """Return the facts of a data file in a package."""
    return msgspec.json.decode(resources.files(package).joinpath(file).read_bytes(), type=FlagFacts)


def unknown(settings: Mapping[str, Any], facts: FlagFacts, *, exact: bool) -> Iterator[tuple[str, str]]:
    """Yield unknown names, each with the most similar flag (empty if none).

    Leaves out those that `problems_of` already yields for an `exact` release.
    """
    for key in settings:
        near = meant(key, facts)
        if bare(key) not in facts.flags and not (exact and near):
            yield bare(key), near


def problems_of(key: str, value: Any, facts: FlagFacts, *, program: str, exact: bool) -> Iterator[Problem]:
    """Yield a problem if a flag is misspelt or its value invalid.

    Only the facts of the job's own release (`exact`) can show that a flag is misspelt.
    """
    name, path = bare(key), ("settings", key)
    flag = facts.flags.get(name)
    if flag is None and exact and (near := meant(key, facts)):
        message = f"unknown flag --{name}, which {program} refuses"
        yield Problem(path=path, message=message, hint=f"did you mean --{near}?")
    if flag is not None and value is not None and (wrong := misfit(flag, value)):
        yield Problem(path=path, message=f"--{name} {wrong}, not {value!r}")


def value_of(flag: Flag | None, value: Any) -> Any:
    """Return a setting as argparse reads it; None if it is absent or invalid."""
    if flag is None or value is None:
        return value
    if flag.action.startswith("store_"):
        return is_on(value)
    if flag.action != "store" or flag.type not in _KINDS:
        return value
    number = parsed_value(value) if isinstance(value, str) else value
    if not isinstance(number, int | float) or isinstance(number, bool) or not isfinite(number):
        return None
    return int(number) if flag.type == "int" else number


def misfit(flag: Flag, value: Any) -> str:
    """Return what is wrong with a flag's value, to follow its name; empty if argparse accepts it."""
    if flag.action.startswith("store_") or flag.action in _SWITCHES:
        return "" if isinstance(parsed_value(str(value).capitalize()), bool) else "is a switch, true or false"
    if flag.choices and value not in flag.choices:
        return f"is one of {', '.join(map(str, flag.choices))}"
    kinds = _KINDS.get(flag.type, ())
    values = value if isinstance(value, list | tuple) else [value]
    fitting = (isinstance(parsed_value(str(each)), kinds) and not isinstance(each, bool) for each in values)
    return "" if not kinds or all(fitting) else "is a whole number" if flag.type == "int" else "is a number"


def meant(key: str, facts: FlagFacts) -> str:
    """Return the flag most similar to an unknown name; empty if there is none."""
    return nearest(bare(key).replace("-", "_"), facts.flags, cutoff=MISSPELT)
