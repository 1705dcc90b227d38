"""A day of one job under one policy: what was launched, what it cost."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import (
    Decided,
    Diagnosed,
    Ended,
    Event,
    GoalReached,
    Launch,
    Progressed,
    Started,
)
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Crashed, Peak
from autotune.policies.values.value import Value
from benchmarks.simulation.baselines import POLICIES, SEARCHES, Policy
from benchmarks.simulation.cluster import Ran, diagnosis, reported, run
from benchmarks.simulation.oracle import USERS, Best
from benchmarks.simulation.world import DAY_S, World

MOST = 12  # relaunches; what needs more counts as this many and as a failure
_EVERY_STEP = 24  # steps written down one by one; later ones ever more sparsely


class Day(Value, frozen=True, kw_only=True):
    """What a policy made of a day."""

    world: str
    stratum: str
    policy: str
    stable: bool  # a configuration that holds for the rest of the day was reached
    relaunches: int  # after the first failure; MOST where none was reached
    injected: int  # failures that only a late event explains
    first_stable: float | None  # its throughput as a share of the oracle's; stable: a goal's worth of steps
    repeats: int  # launches of a configuration that had failed
    forbidden: int  # changes of what is the user's
    regret_gpu_hours: float
    share_of_day: float  # of the clairvoyant policy's progress


def play(world: World, best: Best, name: str) -> Day:
    """Return the day of one job under one policy."""
    policy: Policy = POLICIES[name]
    goal = world.accepted.job.goal.steps
    events: list[Event] = [world.accepted]
    knobs: Knobs | None = world.accepted.profile.knobs
    failed: list[Knobs] = []
    clock_s = done = 0.0
    injected = repeats = forbidden = launches = 0
    first_stable: float | None = None
    stable = False
    while knobs is not None and launches <= MOST and clock_s < DAY_S:
        repeats += knobs in failed
        forbidden += sum(getattr(knobs, n) != getattr(world.accepted.profile.knobs, n) for n in USERS)
        launches += 1
        ran = run(world, knobs)
        clock_s += world.startup_s
        lasted = ran.steps if ran.failure is None else max(0, ran.failure.step - 1)
        searching = name in SEARCHES and ran.failure is None and launches > 1
        if searching:
            lasted = goal
        events += rows(world, knobs, ran, launches, lasted=lasted, searching=searching)
        if not searching and lasted >= goal and first_stable is None:
            first_stable = best.step_s / ran.step_s
        if searching:
            clock_s += lasted * ran.step_s
            following = _answer(policy, events)
            if following is None or following in [e.knobs for e in events if isinstance(e, Started)]:
                final = run(world, following or knobs)
                first_stable = best.step_s / final.step_s
                done += max(0.0, DAY_S - clock_s) / final.step_s
                stable = True
                break
            knobs = following
            continue
        if ran.failure is None:
            done += max(0.0, DAY_S - clock_s) / ran.step_s
            stable = True
            break
        injected += ran.failure.injected
        clock_s += (lasted + 0.5) * ran.step_s
        if clock_s < DAY_S:
            done += lasted // world.save_every * world.save_every
        failed.append(knobs)
        knobs = _answer(policy, events)
    # A day that ends while an attempt still runs is no failure of the policy.
    stable = stable or (clock_s >= DAY_S and knobs is not None and launches <= MOST)
    share = done / max(1e-9, (DAY_S - world.startup_s) / best.step_s)
    return Day(
        world=world.name,
        stratum=world.stratum.value,
        policy=name,
        stable=stable,
        relaunches=min(MOST, launches - 1) if stable else MOST,
        injected=injected,
        first_stable=first_stable,
        repeats=repeats,
        forbidden=forbidden,
        regret_gpu_hours=world.gpus * 24 * (1 - share),
        share_of_day=share,
    )


def _answer(policy: Policy, events: list[Event]) -> Knobs | None:
    """Return the next configuration; what `decide` says of it enters the history, as the loop writes it."""
    answer = policy(tuple(events))
    if isinstance(answer, Launch):
        events.append(Decided(remedy=answer.remedy, reason=answer.reason))
        return answer.knobs
    return answer


def rows(
    world: World, knobs: Knobs, ran: Ran, number: int, *, lasted: int, searching: bool
) -> Iterable[Event]:
    """Return what the journal holds of an attempt."""
    yield Started(attempt=number, knobs=knobs)
    printed = sorted({*range(1, min(lasted, _EVERY_STEP) + 1), *_sparse(lasted)})
    peaks: dict[str, Peak] = {}
    for step in printed:
        peaks = reported(world, knobs, step)
        yield Progressed(
            attempt=number,
            step=step,
            of=ran.steps,
            seconds=ran.step_s,
            tokens_per_second=world.mean_sequence * world.accepted.profile.layout.sequences / ran.step_s,
            peaks=peaks,
        )
    if lasted >= world.accepted.job.goal.steps:
        free = min(1 - p.used_bytes / p.capacity_bytes for p in peaks.values())
        yield GoalReached(attempt=number, step=lasted, marginal=free < 0.05, headroom=free, peaks=peaks)
    if ran.failure is None:
        if searching:
            yield Ended(attempt=number, outcome=Cancelled(by="goal"), step=lasted)
        return
    passed = _passed(world, knobs, ran)
    yield Ended(attempt=number, outcome=Crashed(exit_code=1), step=lasted or None, peaks=passed)
    diagnosed: Diagnosis = diagnosis(world, knobs, ran.failure)
    values = {name: getattr(diagnosed, name) for name in Diagnosis.__struct_fields__}
    yield Diagnosed(attempt=number, **values)


def _passed(world: World, knobs: Knobs, ran: Ran) -> dict[str, Peak]:
    """Return the peaks of the phases that the failing step had behind it."""
    failure = ran.failure
    if failure is None or failure.step == 0:
        return {}
    peaks = reported(world, knobs, failure.step)
    if failure.phase.value not in peaks:
        return {}
    before = list(peaks)[: list(peaks).index(failure.phase.value)]
    return {name: peaks[name] for name in before}


def _sparse(lasted: int) -> set[int]:
    chosen, step = {lasted} if lasted else set(), float(_EVERY_STEP)
    while step < lasted:
        chosen.add(int(step))
        step *= 1.2
    return chosen
