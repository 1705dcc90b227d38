"""Late events of simulated jobs, what a rehearsal made of them, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from benchmarks.simulation.world import World

_FORCING = ("builtin", "areal", "skyrl", "trl")  # and verl with vLLM


class Kind(StrEnum):
    """What goes wrong late in a training, or nothing."""

    LENGTH = "length"  # a batch of full-length answers, at a step between 20 and 400
    OPTIMIZER = "optimizer step"
    SAVE = "save"
    VALIDATION = "validation with a save"
    RELOAD = "reload"
    WAKE_UP = "wake-up after a reload"
    HOLDS = "holds at full length"
    SHORT = "holds, but not at full length, which it never meets"


LATE = tuple(Kind)[:6]
CALM = tuple(Kind)[6:]


class Case(NamedTuple):
    """A simulated job that holds as it is written, but for one late event."""

    world: World
    kind: Kind
    more: float  # bytes that the event takes beside what is there
    longest: float  # times the usual short-lived memory of a pass, at full length
    at: int  # the step of the full-length batch
    has_phase: bool  # a record or frames of the failure show its phase

    @property
    def forces(self) -> bool:
        """Whether its framework can make every answer as long as the job allows."""
        profile = self.world.accepted.profile
        return profile.framework in _FORCING or (profile.framework, profile.engine) == ("verl", "vllm")


class Outcome(NamedTuple):
    """What a rehearsal made of a job."""

    kind: Kind
    forces: bool
    met: bool  # the failure appeared in it
    changed: bool  # the training begins with other knobs
    holds: bool  # the training gets through, one reload included
    starts: int
    steps: int


def incurable(drawn_cases: Sequence[tuple[Case, int]]) -> Iterator[str]:
    """Yield the table of the draws whose event needs more than any configuration frees."""
    yield "| event | draws | no configuration gets through |"
    yield "|---|---|---|"
    for kind in LATE:
        own = [left_out for case, left_out in drawn_cases if case.kind is kind]
        if own:
            draws = len(own) + sum(own)
            yield f"| {kind.value} | {draws} | {sum(own) / draws:.1%} |"


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the table by kind."""
    head = ("simulated jobs", "jobs", "appears in the rehearsal", "the training holds", "changed")
    head += ("starts, mean (most)", "steps, mean (most)")
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    groups: list[tuple[str, list[Outcome]]] = []
    for kind in Kind:
        own = [each for each in outcomes if each.kind is kind]
        if kind is not Kind.LENGTH:
            groups.append((kind.value, own))
            continue
        groups.append((f"{kind.value}, where it can be forced", [each for each in own if each.forces]))
        groups.append((f"{kind.value}, where it cannot", [each for each in own if not each.forces]))
    groups.append(("**all that fail late**", [each for each in outcomes if each.kind in LATE]))
    groups.append(("**all that hold**", [each for each in outcomes if each.kind in CALM]))
    for name, own in groups:
        if own:
            yield _row(name, own)


def _row(name: str, own: Sequence[Outcome]) -> str:
    starts, steps = [each.starts for each in own], [each.steps for each in own]
    met, held, changed = (
        statistics.fmean(values) for values in zip(*((e.met, e.holds, e.changed) for e in own), strict=True)
    )
    return (
        f"| {name} | {len(own)} | {met:.1%} | {held:.1%} | {changed:.1%} "
        f"| {statistics.fmean(starts):.1f} ({max(starts)}) | {statistics.fmean(steps):.1f} ({max(steps)}) |"
    )
