"""Chooses the known release of a framework whose facts stand for a job's release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from autotune.policies.values.provenance import Origin


class Release(NamedTuple):
    """The known release that is used for a job's version."""

    version: str
    origin: Origin  # EXACT if it is the job's own release with its rules on record

    @property
    def exact(self) -> bool:
        """Whether it is the job's own release."""
        return not self.origin.is_assumed


def choose(wanted: str | None, known: Iterable[str], older: Iterable[str] = ()) -> Release:
    """Return the known release for a version: the same one, else the next older one, else the oldest.

    The newest one if the version is unknown or invalid. A local version (`0.9.1+cu128`) counts as its public
    release; a development version does not count as the release that it precedes. Releases in `older` have
    only names and defaults on record, no rules: they are never exact.
    """
    ruled = set(map(Version, known))
    every = sorted(ruled.union(map(Version, older)))
    try:
        own = Version(Version(wanted or "").public)
    except InvalidVersion:
        return Release(str(every[-1]), Origin.ASSUMED)
    before = [release for release in every if release <= own]
    nearest = before[-1] if before else every[0]
    return Release(str(nearest), Origin.EXACT if nearest == own and nearest in ruled else Origin.ASSUMED)


def within(versions: Mapping[str, str], since: Mapping[str, str], until: Mapping[str, str]) -> bool:
    """Return whether the versions, by package name, are at least `since` and below `until`.

    An unknown version counts as newer than any.
    """
    return all(_at_least(versions.get(name, ""), first) for name, first in since.items()) and not any(
        _at_least(versions.get(name, ""), first) for name, first in until.items()
    )


def major(version: str | None) -> int | None:
    """Return the major number of a version; None if it is unknown."""
    try:
        return Version(version or "").major
    except InvalidVersion:
        return None


def is_before(version: str, first: str) -> bool:
    """Return whether a version is known and precedes a release."""
    try:
        return Version(version) < Version(first)
    except InvalidVersion:
        return False


def _at_least(written: str, first: str) -> bool:
    try:
        return Version(Version(written).public) >= Version(first)
    except InvalidVersion:
        return True
