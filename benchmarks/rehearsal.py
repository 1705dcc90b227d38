"""`python -m benchmarks.rehearsal`: late failures that a rehearsal meets and cures, and its false alarms."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import count
from random import Random

import msgspec

from autotune.policies.diagnosis.resume import while_loading
from autotune.policies.recovery.decide import decide
from autotune.policies.remedies.legality import objections
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Decided, Diagnosed, Ended, Event, Launch, Progressed, Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed, Crashed, Peak
from autotune.policies.values.rehearsing import SAVED_AT, STEPS, Part, Rehearsal
from benchmarks.late_events import CALM, Case, Kind, Outcome, incurable, table
from benchmarks.simulation.cluster import Failure, diagnosis, holds, reported, run
from benchmarks.simulation.columns import Column, Columns, columns
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.oracle import configurations, leanest
from benchmarks.simulation.truth import PHASES, device_peaks, late_bytes
from benchmarks.simulation.world import Stratum

_STEPS, _SAVE_EVERY, _VALIDATES_EVERY = 400, 10, 40  # of the training
_MOST = 20  # starts of a rehearsal before the benchmark gives up on it
_PASSES = (Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD)
_RECORDING = ("builtin", "trl")  # their own records name the phase of a failure
_SHOWN = 35 / 43  # of the held-out logs of `benchmarks.explain_accuracy` with the right phase: by frames


_PLACES = {  # where it runs out, and the phase of the simulation that holds what is there without it
    Kind.OPTIMIZER: (Phase.OPTIMIZER, Phase.OPTIMIZER),
    Kind.SAVE: (Phase.CHECKPOINT, Phase.LOG_PROB),
    Kind.VALIDATION: (Phase.ROLLOUT, Phase.ROLLOUT),
    Kind.RELOAD: (Phase.INIT, Phase.LOG_PROB),
    Kind.WAKE_UP: (Phase.WEIGHT_SYNC, Phase.WEIGHT_SYNC),
}
_OUTSIDE = frozenset({Kind.SAVE, Kind.RELOAD})  # of a pass: only what the device holds for longer is there


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50, help="of each kind")
    parser.add_argument("--seed", type=int, default=20261123)
    options = parser.parse_args()
    drawn_cases = [drawn for kind in Kind for drawn in cases(kind, options.jobs, options.seed)]
    print("\n".join(table([rehearsed(case) for case, _ in drawn_cases])))
    print("\n".join(incurable(drawn_cases)))


def cases(kind: Kind, jobs: int, seed: int) -> Iterator[tuple[Case, int]]:
    """Yield jobs whose event some configuration gets through, and how many draws before each have none."""
    strata = (Stratum.NEAR, Stratum.FAR)
    seeds = count(seed * 1009)
    for number in range(jobs):
        left_out = 0
        while True:
            case = drawn_case(kind, strata[number % 2], seed=next(seeds))
            if kind in CALM or curable(case):
                break
            left_out += 1
        yield case, left_out


def drawn_case(kind: Kind, stratum: Stratum, *, seed: int) -> Case:
    """Return a job whose configuration, the best that holds for a day, meets one late event."""
    rng = Random(f"{kind.value} {seed}")
    world, best = drawn(stratum, seed=seed)
    accepted = world.accepted
    profile = msgspec.structs.replace(accepted.profile, knobs=best.knobs)
    world = msgspec.structs.replace(
        world, late=(), accepted=msgspec.structs.replace(accepted, profile=profile)
    )
    case = Case(
        world=world,
        kind=kind,
        more=0.0,
        longest=1.0,
        at=rng.randint(20, _STEPS),
        has_phase=profile.framework in _RECORDING or Random(f"shown {kind.value} {seed}").random() < _SHOWN,
    )
    capacity, over = accepted.cluster.gpu_memory_bytes, rng.uniform(1.01, 1.15)
    if kind in _PLACES:
        return case._replace(more=capacity * over - float(_there(case, columns(world, (best.knobs,)))[0]))
    short = float(device_peaks(world, columns(world, (best.knobs,)))[Phase.BACKWARD][1][0])
    spare = capacity - max(_usual(case, best.knobs, 2)[phase] for phase in _PASSES)
    if kind is Kind.HOLDS:
        return case._replace(longest=1.0 + rng.uniform(0.0, 0.98) * max(0.0, spare) / short)
    return case._replace(longest=1.0 + (spare + (over - 1.0) * capacity) / short)


def rehearsed(case: Case) -> Outcome:
    """Return what the rehearsal of a job shows and cures, by the decisions of `launch --rehearse`."""
    world = case.world
    rehearsal = Rehearsal(forces=case.forces, reloads=True, steps=_STEPS)
    events: list[Event] = [msgspec.structs.replace(world.accepted, rehearsal=rehearsal)]
    starts = steps = 0
    met = False
    while True:
        action = decide(tuple(events))
        if not isinstance(action, Launch) or starts > _MOST:
            return Outcome(case.kind, case.forces, met, True, False, starts, steps)
        if action.rehearsal is None:
            break
        starts += 1
        events.append(Decided(attempt=starts - 1, remedy=action.remedy, reason=action.reason))
        reloads = action.rehearsal is Part.RELOAD
        events.append(
            Started(
                attempt=starts,
                knobs=action.knobs,
                resume=reloads,
                rehearsal=action.rehearsal,
                longest=action.longest,
            )
        )
        first, last = (4, STEPS[Part.RELOAD]) if reloads else (1, STEPS[Part.WORST])
        failed = _at_start(case, action.knobs)
        for step in range(first, last + 1):
            if failed is not None:
                break
            saves = step in (SAVED_AT, last)
            failed = _failure(
                case,
                action.knobs,
                step,
                loads=reloads and step == first,
                loaded=reloads,
                saves=saves,
                validates=saves,
                longest=action.longest,
            )
            if failed is None:
                steps += 1
                events.append(_progressed(case, action, step, attempt=starts, saved=saves))
        events += _end(case, action, failed, starts, events)
        met = met or failed is not None
    holds = _trains(case, action.knobs)
    changed = action.knobs != world.accepted.profile.knobs
    return Outcome(case.kind, case.forces, met, changed, holds, starts, steps)


def _there(case: Case, c: Columns) -> Column:
    """Return what a device holds when the event comes, without what that takes itself."""
    phase = _PLACES[case.kind][1]
    long, short = device_peaks(case.world, c)[phase]
    if case.kind in _OUTSIDE:
        return long
    return long + short + late_bytes(case.world, c, phase, 2, short=short)


def curable(case: Case) -> bool:
    """Return whether a legal configuration gets through: one of the oracle's grid, or a leaner one."""
    grid = configurations(case.world)
    profile, extras = case.world.accepted.profile, leanest(case.world)
    for start in range(0, len(grid), 4096):
        part = grid[start : start + 4096]
        if _holding(case, part):
            return True
        leaner = [msgspec.structs.replace(knobs, **extras) for knobs in part]
        if any(not objections(profile, profile.knobs, k, started=False) for k in _holding(case, leaner)):
            return True
    return False


def _holding(case: Case, configurations: Sequence[Knobs]) -> list[Knobs]:
    """Return the configurations that hold for a day and through the late event."""
    world, c = case.world, columns(case.world, configurations)
    capacity, fits = world.accepted.cluster.gpu_memory_bytes, holds(world, c)
    if case.kind in _PLACES:
        fits &= _there(case, c) + case.more <= capacity
    for phase, (long, short) in device_peaks(world, c).items():
        if case.kind is Kind.LENGTH and phase in _PASSES:
            late = late_bytes(world, c, phase, 2, short=short)
            fits &= long + short * case.longest + late <= capacity
    return [knobs for knobs, fit in zip(configurations, fits.tolist(), strict=True) if fit]


def _progressed(case: Case, action: Launch, step: int, *, attempt: int, saved: bool) -> Progressed:
    world = case.world
    tokens = world.mean_sequence * world.accepted.profile.layout.sequences
    return Progressed(
        attempt=attempt,
        step=step,
        seconds=60.0,
        tokens_per_second=tokens / 60.0,
        peaks=_reported(case, action, step),
        saved=step if saved else None,
    )


def _reported(case: Case, action: Launch, step: int) -> dict[str, Peak]:
    """Return the peaks of a step's phases as the log shows them."""
    peaks: dict[str, Peak] = {}
    true = _peaks(case, action.knobs, step, longest=action.longest)
    usual = _usual(case, action.knobs, step)
    for name, peak in reported(case.world, action.knobs, step).items():
        more = int(true[Phase(name)] - usual[Phase(name)])
        used = min(peak.capacity_bytes or peak.used_bytes, peak.used_bytes + more)
        peaks[name] = msgspec.structs.replace(peak, used_bytes=used)
    return peaks


def _end(
    case: Case, action: Launch, failed: Failure | None, attempt: int, events: Sequence[Event]
) -> Iterator[Event]:
    if failed is None:
        yield Ended(attempt=attempt, outcome=Completed())
        return
    yield Ended(attempt=attempt, outcome=Crashed(exit_code=1), peaks=_passed(case, action, failed))
    model = failed.phase
    if failed.cause is Cause.GPU_OOM:
        model = next((same for place, same in _PLACES.values() if place is failed.phase), failed.phase)
    diagnosed = diagnosis(case.world, action.knobs, msgspec.structs.replace(failed, phase=model))
    diagnosed = msgspec.structs.replace(diagnosed, phase=failed.phase, phase_shown=case.has_phase)
    revised = while_loading(tuple(events), diagnosed, attempt=attempt)
    values = {name: getattr(revised, name) for name in Diagnosis.__struct_fields__}
    yield Diagnosed(attempt=attempt, **values)


def _passed(case: Case, action: Launch, failed: Failure) -> dict[str, Peak]:
    """Return the peaks of the phases that the failing step had behind it."""
    if failed.step == 0 or failed.phase is Phase.INIT:
        return {}
    event = _PLACES.get(case.kind)
    last = event is not None and failed.phase is event[0]  # an event comes after a step's phases
    before = PHASES if last or failed.phase not in PHASES else PHASES[: PHASES.index(failed.phase)]
    peaks = _reported(case, action, failed.step)
    return {p.value: peaks[p.value] for p in before if p.value in peaks and p is not failed.phase}


def _trains(case: Case, knobs: Knobs) -> bool:
    """Return whether the training gets to its end, with one loss of the cluster on the way."""
    if _at_start(case, knobs) is not None:
        return False
    steps = sorted({1, 2, 3, _SAVE_EVERY, _VALIDATES_EVERY, case.at, _STEPS})
    fresh = (
        _failure(
            case,
            knobs,
            step,
            loads=False,
            loaded=False,
            saves=step % _SAVE_EVERY == 0,
            validates=step % _VALIDATES_EVERY == 0,
            longest=case.kind is Kind.LENGTH and step == case.at,
        )
        for step in steps
    )
    again = (
        _failure(
            case, knobs, step, loads=step == 11, loaded=True, saves=False, validates=False, longest=False
        )
        for step in (11, 12)
    )
    return all(each is None for each in (*fresh, *again))


def _at_start(case: Case, knobs: Knobs) -> Failure | None:
    """Return the failure of a host or a pool that is too small, which ends an attempt before its steps."""
    failed = run(case.world, knobs).failure
    return None if failed is None or failed.cause is Cause.GPU_OOM else failed


def _failure(
    case: Case,
    knobs: Knobs,
    step: int,
    *,
    loads: bool,
    loaded: bool,
    saves: bool,
    validates: bool,
    longest: bool,
) -> Failure | None:
    """Return where a step runs out of memory."""
    capacity = case.world.accepted.cluster.gpu_memory_bytes
    happens = {
        Kind.OPTIMIZER: step >= 2,
        Kind.SAVE: saves,
        Kind.VALIDATION: saves and validates,
        Kind.RELOAD: loads,
        Kind.WAKE_UP: loaded,
    }
    demands = list(_peaks(case, knobs, step, longest=longest).items())
    if happens.get(case.kind, False):
        there = float(_there(case, columns(case.world, (knobs,)))[0])
        event = (_PLACES[case.kind][0], there + case.more)
        demands = [event, *demands] if loads and case.kind is Kind.RELOAD else [*demands, event]
    for phase, peak in demands:
        if peak > capacity:
            return Failure(phase=phase, cause=Cause.GPU_OOM, step=step, peak_bytes=peak)
    return None


def _usual(case: Case, knobs: Knobs, step: int) -> dict[Phase, float]:
    return _peaks(case, knobs, step, longest=False)


def _peaks(case: Case, knobs: Knobs, step: int, *, longest: bool) -> dict[Phase, float]:
    """Return the device peaks of a step's phases, of full-length answers with `longest`."""
    world, c = case.world, columns(case.world, (knobs,))
    result = {}
    for phase, (long, short) in device_peaks(world, c, started=step >= 2).items():
        if phase is Phase.ROLLOUT_INIT and step > 1:
            continue
        late = late_bytes(world, c, phase, step, short=short)
        times = case.longest if longest and phase in _PASSES else 1.0
        result[phase] = float((long + short * times + late)[0])
    return result


if __name__ == "__main__":
    main()
