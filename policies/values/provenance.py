"""Where a fact about a job comes from, and what was read of the job's own code.

Before the first launch an assumption changes no setting, adds none, refuses no job and earns no check mark.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from autotune.policies.values.value import Value


class Origin(StrEnum):
    """Where a fact about a job comes from."""

    WRITTEN = "written"  # in the job itself
    READ = "read"  # in the job's own checkout or interpreter
    EXACT = "exact"  # the record of the release that the job runs
    PUBLIC = "public"  # a table of public models or GPUs
    MEASURED = "measured"
    ASSUMED = "assumed"  # another release, a guessed layout or launcher, a name that may mislead

    @property
    def is_assumed(self) -> bool:
        """Whether no decision before the first launch may rest on it; every such decision checks this."""
        return self is Origin.ASSUMED


class Fact(Value, frozen=True, kw_only=True):
    """A fact about a job that its settings, its prediction or its checks are made with."""

    name: str  # what it is about, such as `release`
    value: str  # in words
    origin: Origin
    resolve: str = ""  # what would make an assumption known
    is_open: bool = False  # the other plausible values of an assumption cannot be listed

    @property
    def is_assumed(self) -> bool:
        """Whether it rests on an assumption."""
        return self.origin.is_assumed


class OwnCode(Value, frozen=True, kw_only=True):
    """What the code of a framework that a job would run says of itself, read without running it."""

    folder: str  # of the package
    names: tuple[str, ...]  # those of the queried settings and words that occur in the code, sorted
    defaults: dict[str, Any] = {}  # of its own configuration by dotted keys; empty if none could be read
    is_partial: bool = False  # some of it could not be read, so names missing from `names` may occur

    def lacks(self, name: str) -> bool:
        """Return whether a name occurs nowhere in the code; that the job supports it is then assumed."""
        origin = Origin.READ if name in self.names or self.is_partial else Origin.ASSUMED
        return origin.is_assumed


class CodeQuery(Value, frozen=True, kw_only=True):
    """What to read from a framework's code."""

    package: str  # the module whose folder holds the code
    names: frozenset[str]  # settings, flags and words to look for
    as_flags: bool = False  # the names count only where a parser declares them: `"--name"`
    patterns: dict[str, str] = {}  # name -> regular expression that the code must match for it
    program: str = ""  # a file of the job itself to read instead of the package
    configs: tuple[str, ...] = ()  # YAML files below the package; the first that exists is read
