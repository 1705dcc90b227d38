"""Settings that some releases of a framework have under another name, or no longer have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from packaging.version import Version


class Renamed(NamedTuple):
    """A setting, or a section, that releases before `since` call `old` and later ones `new`.

    A job is read and written under the name that its release has.
    """

    old: str
    new: str = ""  # empty: no setting took its place
    since: str = ""  # the first release without `old`; empty: no release on record has it
    hint: str = ""  # what a user of `old` should write or know, where that is not `new` alone
    default: Any = None  # before `since`, where it was another one


@cache
def names_in(renamed: tuple[Renamed, ...], release: str) -> Mapping[str, str]:
    """Return the names that a release has for newer ones."""
    return {
        row.new: row.old for row in renamed if row.new and row.since and Version(release) < Version(row.since)
    }


def translated(key: str, names: Mapping[str, str]) -> str:
    """Return a key with its own name, or that of the section that holds it, as `names` has it."""
    head, below = key, ""
    while head and names:
        if head in names:
            return names[head] + below
        head = head.rpartition(".")[0]
        below = key[len(head) :]
    return key


def replacement(renamed: Iterable[Renamed], key: str) -> str:
    """Return what to write instead of a setting that is gone; empty where no row names it."""
    for row in renamed:
        if key == row.old or key.startswith(f"{row.old}."):
            return row.hint or f"write {row.new}{key.removeprefix(row.old)}"
    return ""
