"""`python -m benchmarks.rehearsal`: late failures that a rehearsal meets and cures, and its false alarms."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from enum import StrEnum
from random import Random
from typing import NamedTuple

import msgspec

from autotune.policies.diagnosis.resume import while_loading
from autotune.policies.recovery.decide import decide
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Decided, Diagnosed, Ended, Event, Launch, Progressed, Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed, Crashed, Peak
from autotune.policies.values.rehearsing import SAVED_AT, STEPS, Part, Rehearsal
from benchmarks.simulation.cluster import Failure, diagnosis, reported
from benchmarks.simulation.columns import columns
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.truth import device_peaks, late_bytes
from benchmarks.simulation.world import Stratum, World

_STEPS, _SAVE_EVERY, _VALIDATES_EVERY = 400, 10, 40  # of the training
_MOST = 20  # starts of a rehearsal before the benchmark gives up on it
_PASSES = (Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD)
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
_PLACES = {  # where it runs out, and the phase of the simulation that holds as much without it
    Kind.OPTIMIZER: (Phase.OPTIMIZER, Phase.OPTIMIZER),
    Kind.SAVE: (Phase.CHECKPOINT, Phase.OPTIMIZER),
    Kind.VALIDATION: (Phase.ROLLOUT, Phase.ROLLOUT),
    Kind.RELOAD: (Phase.INIT, Phase.OPTIMIZER),
    Kind.WAKE_UP: (Phase.WEIGHT_SYNC, Phase.WEIGHT_SYNC),
}


class Case(NamedTuple):
    """A simulated job that holds as it is written, but for one late event."""

    world: World
    kind: Kind
    times: float  # the phase's usual peak, that the event needs
    longest: float  # times the usual short-lived memory of a pass, at full length
    at: int  # the step of the full-length batch

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50, help="of each kind")
    parser.add_argument("--seed", type=int, default=20261123)
    options = parser.parse_args()
    print("\n".join(table([rehearsed(case) for case in cases(options.jobs, options.seed)])))


def cases(jobs: int, seed: int) -> Iterator[Case]:
    """Yield so many jobs of each kind."""
    strata = (Stratum.NEAR, Stratum.FAR)
    for kind in Kind:
        for number in range(jobs):
            yield drawn_case(kind, strata[number % 2], seed=seed * 1009 + number)


def drawn_case(kind: Kind, stratum: Stratum, *, seed: int) -> Case:
    """Return a job whose configuration, the best that holds for a day, meets one late event."""
    rng = Random(f"{kind.value} {seed}")
    world, best = drawn(stratum, seed=seed)
    accepted = world.accepted
    profile = msgspec.structs.replace(accepted.profile, knobs=best.knobs)
    world = msgspec.structs.replace(
        world, late=(), accepted=msgspec.structs.replace(accepted, profile=profile)
    )
    case = Case(world=world, kind=kind, times=1.0, longest=1.0, at=rng.randint(20, _STEPS))
    capacity, over = accepted.cluster.gpu_memory_bytes, rng.uniform(1.01, 1.15)
    if kind in _PLACES:
        return case._replace(times=capacity * over / _usual(case, best.knobs, 2)[_PLACES[kind][1]])
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
        failed = None
        for step in range(first, last + 1):
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
            if failed is not None:
                break
            steps += 1
            events.append(_progressed(case, action, step, attempt=starts, saved=saves))
        events += _end(case, action.knobs, failed, starts, events)
        met = met or failed is not None
    holds = _trains(case, action.knobs)
    changed = action.knobs != world.accepted.profile.knobs
    return Outcome(case.kind, case.forces, met, changed, holds, starts, steps)


def _progressed(case: Case, action: Launch, step: int, *, attempt: int, saved: bool) -> Progressed:
    peaks: dict[str, Peak] = {}
    true = _peaks(case, action.knobs, step, longest=action.longest)
    usual = _usual(case, action.knobs, step)
    for name, peak in reported(case.world, action.knobs, step).items():
        more = int(true[Phase(name)] - usual[Phase(name)])
        used = min(peak.capacity_bytes or peak.used_bytes, peak.used_bytes + more)
        peaks[name] = msgspec.structs.replace(peak, used_bytes=used)
    world = case.world
    tokens = world.mean_sequence * world.accepted.profile.layout.sequences
    return Progressed(
        attempt=attempt,
        step=step,
        seconds=60.0,
        tokens_per_second=tokens / 60.0,
        peaks=peaks,
        saved=step if saved else None,
    )


def _end(
    case: Case, knobs: Knobs, failed: Failure | None, attempt: int, events: Sequence[Event]
) -> Iterator[Event]:
    if failed is None:
        yield Ended(attempt=attempt, outcome=Completed())
        return
    yield Ended(attempt=attempt, outcome=Crashed(exit_code=1))
    model = next((same for place, same in _PLACES.values() if place is failed.phase), failed.phase)
    told = diagnosis(case.world, knobs, msgspec.structs.replace(failed, phase=model))
    told = msgspec.structs.replace(told, phase=failed.phase)
    found = while_loading(tuple(events), told, attempt=attempt)
    values = {name: getattr(found, name) for name in Diagnosis.__struct_fields__}
    yield Diagnosed(attempt=attempt, **values)


def _trains(case: Case, knobs: Knobs) -> bool:
    """Return whether the training gets to its end, with one loss of the cluster on the way."""
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
        phase, same = _PLACES[case.kind]
        event = (phase, _usual(case, knobs, step)[same] * case.times)
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
    found = {}
    for phase, (long, short) in device_peaks(world, c, started=step >= 2).items():
        if phase is Phase.ROLLOUT_INIT and step > 1:
            continue
        late = late_bytes(world, c, phase, step, short=short)
        times = case.longest if longest and phase in _PASSES else 1.0
        found[phase] = float((long + short * times + late)[0])
    return found


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the table by kind."""
    head = ("simulated jobs", "jobs", "appears in the rehearsal", "the training holds", "changed")
    yield f"| {' | '.join((*head, 'starts, mean (most)', 'steps, mean (most)'))} |"
    yield "|---|---|---|---|---|---|---|"
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
    shares = [
        statistics.fmean(values) for values in zip(*((e.met, e.holds, e.changed) for e in own), strict=True)
    ]
    cells = " | ".join(f"{share:.1%}" for share in shares)
    return (
        f"| {name} | {len(own)} | {cells} | {statistics.fmean(starts):.1f} ({max(starts)}) "
        f"| {statistics.fmean(steps):.1f} ({max(steps)}) |"
    )


if __name__ == "__main__":
    main()
