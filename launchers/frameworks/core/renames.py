"""Settings that some releases of a framework have under another name, or no longer have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import NamedTuple

from packaging.version import Version

from autotune.launchers.frameworks.core.versions import is_before


class Renamed(NamedTuple):
    """A setting, or a section, that releases before `since` call `old`; later ones have `new`.

    A job is read and written under the name that it uses, else the one that its release has: some releases
    go on taking `old` for a while.
    """

    old: str
    new: str = ""  # empty: no setting took its place
    # The first release with `new`, or without `old` where nothing took its place; empty: none on record has
    # `old`.
    since: str = ""
    until: str = ""  # the first release that no longer takes `old`, where that is a later one
    hint: str = ""  # what a user of `old` should write or know, where that is not `new` alone


@cache
def names_in(renamed: tuple[Renamed, ...], release: str) -> Mapping[str, str]:
    """Return the names that a release has for newer ones."""
    return {
        row.new: row.old for row in renamed if row.new and row.since and Version(release) < Version(row.since)
    }


def names_of(renamed: Collection[Renamed], given: Collection[str]) -> dict[str, str]:
    """Return the older names of a job, by the newer ones: those that it uses, and those of their time.

    Of a setting that it writes under both names the newer one counts.
    """
    named = [row for row in renamed if row.new and row.since and not _holds(given, row.new)]
    used = [Version(row.since) for row in named if _holds(given, row.old)]
    return {row.new: row.old for row in named if used and Version(row.since) >= min(used)}


def release_before(renamed: Iterable[Renamed], given: Collection[str], releases: Iterable[str]) -> str:
    """Return the newest of some releases that takes every older name of a job; empty where it has none.

    Where none of them is so old, it is the oldest.
    """
    ends = [Version(row.until or row.since) for row in renamed if row.since and _holds(given, row.old)]
    known = sorted(releases, key=Version)
    if not ends or not known:
        return ""
    return next((each for each in reversed(known) if Version(each) < min(ends)), known[0])


def _holds(given: Collection[str], name: str) -> bool:
    return name in given or any(each.startswith(f"{name}.") for each in given)


def translated(key: str, names: Mapping[str, str]) -> str:
    """Return a key with its own name, or that of the section that holds it, as `names` has it."""
    head, below = key, ""
    while head and names:
        if head in names:
            return names[head] + below
        head = head.rpartition(".")[0]
        below = key[len(head) :]
    return key


def replacement(renamed: Iterable[Renamed], key: str, release: str = "") -> str:
    """Return what to write instead of a setting that is gone; empty where no row names it.

    `release`: a release that may be older than the end of a setting, and then takes it.
    """
    for row in renamed:
        if row.since and is_before(release, row.since):
            continue
        if key == row.old or key.startswith(f"{row.old}."):
            return row.hint or f"write {row.new}{key.removeprefix(row.old)}"
    return ""
