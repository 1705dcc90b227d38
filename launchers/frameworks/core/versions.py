"""The releases of a framework whose facts are known, and which one is used for a job's release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from autotune.policies.values.provenance import Origin


class Release(NamedTuple):
    """The known release that is used for a job's version."""

    version: str
    origin: Origin  # of what says that it is the job's own

    @property
    def exact(self) -> bool:
        """Whether it is the job's own."""
        return not self.origin.is_assumed


def choose(wanted: str | None, known: Iterable[str], older: Iterable[str] = ()) -> Release:
    """Return the known release for a version: itself, else the next older one, else the oldest.

    The newest one where the version is not known or is none. A local version (`0.9.1+cu128`) is the release
    that it was built from; a development version is not the release that it precedes. Of the `older` ones
    names and defaults are on record, but not their rules: they are never exact.
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
    """Return whether releases are from `since` on and before `until`, each by the name of what is released.

    One that is not known is taken to be newer than any.
    """
    return all(_at_least(versions.get(name, ""), first) for name, first in since.items()) and not any(
        _at_least(versions.get(name, ""), first) for name, first in until.items()
    )


def major(version: str | None) -> int | None:
    """Return the first number of a version; None where it is not known."""
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
