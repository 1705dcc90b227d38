"""A mutant, its place in the sample, and what noticed it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import msgspec

ROOMS = ("recovery", "estimate", "diagnosis")


class Mutant(msgspec.Struct, frozen=True):
    """One change of one module."""

    room: str
    module: str  # path in the repository
    operator: str
    occurrence: int
    line: int
    digest: str  # of the module, so that an old result is no result of a changed one

    @property
    def kind(self) -> str:
        """The operator without what it puts in the place of what."""
        return self.operator.partition("/")[2].split("_")[0]


class Verdict(msgspec.Struct, frozen=True):
    """What noticed a mutant; empty for nothing."""

    mutant: Mutant
    by: str
    change: str  # the changed lines, before and after
    tests: str  # digest of the sources and tests at the time
    limit_s: float | None = None  # CPU seconds to which its tests were limited; None where all of them ran

    def holds(self, tests: str, budget_s: float) -> bool:
        """Return whether another trial with `budget_s` CPU seconds of these tests could show nothing new."""
        return bool(self.by) or (self.tests == tests and (self.limit_s is None or self.limit_s >= budget_s))


def shuffled(mutants: Sequence[Mutant], sources: dict[str, list[str]], *, seed: int) -> list[Mutant]:
    """Return mutants in an order by chance, in which each keeps its place when other lines change.

    `sources`: the lines of each module.
    """
    met: Counter[tuple[str, str, str]] = Counter()
    order = {}
    for mutant in mutants:
        key = (mutant.module, mutant.operator, sources[mutant.module][mutant.line - 1])
        order[mutant] = hashlib.sha256(repr((seed, key, met[key])).encode()).digest()
        met[key] += 1
    return sorted(mutants, key=order.__getitem__)
