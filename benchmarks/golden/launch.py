"""What `decide` does on the simulated jobs of `benchmarks.policies`, attempt by attempt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from autotune.policies.recovery.decide import decide
from autotune.policies.values.events import (
    Accepted,
    Decided,
    Diagnosed,
    Ended,
    Event,
    GoalReached,
    Launch,
    Policy,
    Progressed,
    Stop,
    StopRequested,
)
from autotune.policies.values.job import Preflight
from autotune.policies.values.observation import Cancelled, Completed
from benchmarks.golden.lines import action_line, diagnosis_text
from benchmarks.simulation.cluster import run
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.play import MOST, rows
from benchmarks.simulation.world import Stratum, World

SEED, JOBS = 20261121, 330  # as `python -m benchmarks.policies` has them
_MOST_ACTIONS = 3 * MOST


def cases() -> tuple[str, ...]:
    """Return the numbers of the jobs."""
    return tuple(f"{number:03}" for number in range(JOBS))


def record(case: str) -> list[str]:
    """Return the decisions on one job: by the estimate, by the ladder, and with preflight and climbs."""
    number = int(case)
    strata = tuple(Stratum)
    world, _ = drawn(strata[number % len(strata)], seed=SEED * 100_003 + number)
    own = world.accepted
    job = replace(own.job, recovery=replace(own.job.recovery, preflight=Preflight.APPLY, climb=True))
    estimate = list(_decisions(world, own))
    bold = list(_decisions(world, replace(own, job=job)))
    return [
        f"{world.name} {world.stratum.value}",
        *_named("estimate", estimate),
        *_named("ladder", list(_decisions(world, replace(own, policy=Policy.LADDER)))),
        *_named("preflight, climb", ["as estimate"] if bold == estimate else bold),
    ]


def _named(name: str, lines: Sequence[str]) -> list[str]:
    return [f"{name}:", *(f"  {line}" for line in lines)]


def _decisions(world: World, accepted: Accepted) -> Iterator[str]:
    """Yield a line per action until the run ends, asking as the loop does."""
    world = replace(world, accepted=accepted)
    events: list[Event] = [accepted]
    knobs, number = accepted.profile.knobs, 0
    for _ in range(_MOST_ACTIONS):
        action = decide(tuple(events))
        line = action_line(action, knobs)
        if not isinstance(action, Launch):
            yield line
            return
        if number or action.remedy is not None:
            events.append(Decided(attempt=number, remedy=action.remedy, reason=action.reason))
        number, knobs = number + 1, action.knobs
        attempt, outcome = _attempt(world, events, action, number)
        events += attempt
        yield f"{number} {line} | {outcome}"
    yield "no end"


def _attempt(world: World, events: Sequence[Event], launch: Launch, number: int) -> tuple[list[Event], str]:
    """Return the rows of an attempt, up to where `decide` stops it, and how it ended."""
    ran = run(world, launch.knobs)
    lasted = ran.steps if ran.failure is None else max(0, ran.failure.step - 1)
    attempt: list[Event] = []
    for row in rows(world, launch.knobs, ran, number, lasted=lasted, searching=False):
        saved = replace(row, saved=row.step) if isinstance(row, Progressed) else row
        attempt.append(saved)
        if isinstance(row, GoalReached) and isinstance(stop := decide((*events, *attempt)), Stop):
            attempt += [
                StopRequested(attempt=number, by=stop.by, reason=stop.reason),
                Ended(attempt=number, outcome=Cancelled(by=stop.by), step=row.step, saved=row.step),
            ]
            return attempt, f"stopped by {stop.by}"
    if ran.failure is None:
        return [*attempt, Ended(attempt=number, outcome=Completed(), step=lasted)], "holds"
    return attempt, next(diagnosis_text(row) for row in attempt if isinstance(row, Diagnosed))
