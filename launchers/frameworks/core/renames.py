"""Settings that a framework renamed or removed between releases."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import NamedTuple

from packaging.version import Version

from autotune.launchers.frameworks.core.versions import is_before


class Renamed(NamedTuple):
    """A setting or section named `old` in releases before `since`, and `new` from then on.

    A job keeps the name that it uses, because some releases accept `old` for a while; a setting that it does
    not use gets the name of its release.
    """

    old: str
    new: str = ""  # empty: it was removed without a replacement
    # The first release with `new`, or without `old` if it was removed; empty: no release on record has `old`.
    since: str = ""
    until: str = ""  # the first release that refuses `old`, if later than `since`
    hint: str = ""  # what a user of `old` should write or know beyond `new`


@cache
def names_in(renamed: tuple[Renamed, ...], release: str) -> Mapping[str, str]:
    """Return today's names of renamed settings -> their names in a release."""
    return {
        row.new: row.old for row in renamed if row.new and row.since and Version(release) < Version(row.since)
    }


def names_of(renamed: Collection[Renamed], given: Collection[str]) -> dict[str, str]:
    """Return today's names -> the older names that a job uses, or that were in use at the same time.

    If a job sets both names of a setting, the newer one counts.
    """
    named = [row for row in renamed if row.new and row.since and not _holds(given, row.new)]
    used = [Version(row.since) for row in named if _holds(given, row.old)]
    return {row.new: row.old for row in named if used and Version(row.since) >= min(used)}


def release_before(renamed: Iterable[Renamed], given: Collection[str], releases: Iterable[str]) -> str:
    """Return the newest of some releases that accepts all older names of a job; empty if it uses none.

    The oldest release if none accepts them all.
    """
    ends = [Version(row.until or row.since) for row in renamed if row.since and _holds(given, row.old)]
    known = sorted(releases, key=Version)
    if not ends or not known:
        return ""
    return next((each for each in reversed(known) if Version(each) < min(ends)), known[0])


def _holds(given: Collection[str], name: str) -> bool:
    return name in given or any(each.startswith(f"{name}.") for each in given)


def translated(key: str, names: Mapping[str, str]) -> str:
    """Return a key, renamed by `names` itself or through its section."""
    head, below = key, ""
    while head and names:
        if head in names:
            return names[head] + below
        head = head.rpartition(".")[0]
        below = key[len(head) :]
    return key


def replacement(renamed: Iterable[Renamed], key: str, release: str = "") -> str:
    """Return what to write instead of a removed setting; empty if no row names it.

    `release`: the job's, in which the setting may still exist and needs no replacement.
    """
    for row in renamed:
        if row.since and is_before(release, row.since):
            continue
        if key == row.old or key.startswith(f"{row.old}."):
            return row.hint or f"write {row.new}{key.removeprefix(row.old)}"
    return ""
