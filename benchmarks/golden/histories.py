"""What `decide` answers to histories that no simulated job has: losses, hangs, budgets, growing memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from autotune.policies.recovery.decide import decide
from autotune.policies.values.diagnosis import Finding, Line
from autotune.policies.values.events import (
    Accepted,
    Await,
    Decided,
    Diagnosed,
    Ended,
    Event,
    FailureSeen,
    Finish,
    Finished,
    Launch,
    Policy,
    Started,
    Stop,
    StopRequested,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Goal, Recovery, Then
from autotune.policies.values.remedy import Effect
from benchmarks.golden.lines import action_line
from benchmarks.golden.scenes import (
    COMPLETE,
    CRASH,
    ENGINE_PHASES,
    GIB,
    LONG,
    RESUME,
    Happening,
    ended,
    fails,
    goal,
    hung,
    known,
    lost,
    plain,
    steps,
    taught,
    wide,
    with_knobs,
)

_MOST = 40  # actions of one case
_DECISIVE = ("for ever gpu-oom init without figures, estimate",)  # only it shows that a cure needs less
_DEVICE_PHASES = (*(phase for phase in Phase if phase is not Phase.NONE), Phase.NONE)

Case = tuple[Accepted, Iterable[Happening]]


def cases() -> tuple[str, ...]:
    """Return the names of the histories."""
    return (*_SERIES, *_STORIES)


def fast_cases() -> tuple[str, ...]:
    """Return every story, a fifth of the series, and all in which device memory grows under the estimate."""
    growing = (case for case in _SERIES if case.startswith("late gpu-oom") and case.endswith("estimate"))
    return tuple(dict.fromkeys((*tuple(_SERIES)[::5], *growing, *_DECISIVE, *_STORIES)))


def record(case: str) -> list[str]:
    """Return a line per action of one history."""
    accepted, happenings = (_SERIES | _STORIES)[case]()
    return list(_actions(accepted, iter(happenings)))


def _actions(accepted: Accepted, happenings: Iterator[Happening]) -> Iterator[str]:
    """Yield the actions while things happen, one happening after each action."""
    events: list[Event] = [accepted]
    knobs = accepted.profile.knobs
    for _ in range(_MOST):
        action = decide(tuple(events))
        yield action_line(action, knobs)
        match action:
            case Launch():
                events += [
                    Decided(remedy=action.remedy, reason=action.reason),
                    Started(knobs=action.knobs),
                ]
                knobs = action.knobs
            case Stop():
                events.append(StopRequested(by=action.by, reason=action.reason))
            case Finish():
                events.append(Finished(verdict=action.verdict))
            case Await():
                pass
        following = next(happenings, None)
        if following is None or (isinstance(action, Finish) and following != RESUME):
            return
        events += following


# ------------------------------------------------------------------ the cases

_JOBS: Mapping[str, Callable[[], Accepted]] = {
    "estimate": known,
    "ladder": lambda: known(LONG, policy=Policy.LADDER),
    "plain": plain,
    "wide": wide,
}
_FIGURES = {
    "requested_bytes": 4 * GIB,
    "free_bytes": GIB,
    "capacity_bytes": int(79.19 * GIB),
    "allocated_bytes": 70 * GIB,
    "reserved_unallocated_bytes": 3 * GIB,
}
_OTHERS = (
    (Cause.HOST_OOM, Phase.INIT),
    (Cause.HOST_OOM, Phase.ROLLOUT_INIT),
    (Cause.HOST_OOM, Phase.ROLLOUT),
    (Cause.HOST_OOM, Phase.FORWARD),
    (Cause.HOST_OOM, Phase.OPTIMIZER),
    (Cause.HOST_OOM, Phase.WEIGHT_SYNC),
    (Cause.HOST_OOM, Phase.CHECKPOINT),
    (Cause.HOST_OOM, Phase.DATA),
    (Cause.HOST_OOM, Phase.NONE),
    (Cause.KV_POOL, Phase.ROLLOUT),
    (Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT),
    (Cause.POOL_TOO_SMALL, Phase.ROLLOUT),
    (Cause.SHM, Phase.DATA),
    (Cause.SHM, Phase.NONE),
    (Cause.OBJECT_STORE, Phase.ROLLOUT),
)
_PAIRS = (
    ((Cause.GPU_OOM, Phase.BACKWARD), (Cause.GPU_OOM, Phase.ROLLOUT)),
    ((Cause.GPU_OOM, Phase.LOG_PROB), (Cause.GPU_OOM, Phase.WEIGHT_SYNC)),
    ((Cause.GPU_OOM, Phase.OPTIMIZER), (Cause.HOST_OOM, Phase.OPTIMIZER)),
    ((Cause.GPU_OOM, Phase.ROLLOUT), (Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT)),
    ((Cause.GPU_OOM, Phase.FORWARD), (Cause.HOST_OOM, Phase.FORWARD)),
)


def _for_ever(job: str, cause: Cause, phase: Phase, **figures: int) -> Callable[[], Case]:
    return lambda: (_JOBS[job](), itertools.repeat(fails(cause, phase, **figures)))


def _late(job: str, cause: Cause, phase: Phase, *, reports: bool, growth: float) -> Callable[[], Case]:
    def case() -> Case:
        before = (steps(n * 30 + 1, n * 30 + 30, growth=growth, reports=reports) for n in range(8))
        return _JOBS[job](), [
            (*rows, *fails(cause, phase, step=30 * (n + 1), **_FIGURES)) for n, rows in enumerate(before)
        ]

    return case


def _times(accepted: Accepted, happenings: Iterable[Happening], *, hours: float) -> Case:
    """Return a case whose rows are an hour apart."""
    begin = datetime(2026, 11, 22, tzinfo=UTC)
    dated = [
        tuple(replace(event, at=(begin + timedelta(hours=hours * (n + 1))).isoformat()) for event in events)
        for n, events in enumerate(happenings)
    ]
    return replace(accepted, at=begin.isoformat()), dated


def _permissions(recovery: Recovery) -> Callable[[], Case]:
    phases = (Phase.BACKWARD, Phase.ROLLOUT, Phase.OPTIMIZER)
    return lambda: (known(recovery), [fails(Cause.GPU_OOM, phase, **_FIGURES) for phase in phases * 3])


def _story(accepted: Accepted, *happenings: Happening) -> Callable[[], Case]:
    return lambda: (accepted, happenings)


_OOM = fails(Cause.GPU_OOM, Phase.BACKWARD, **_FIGURES)
_SEEN: Happening = (
    FailureSeen(
        finding=Finding(
            cause=Cause.GPU_OOM, line=Line(line=3, text="CUDA out of memory", rule="golden"), fatal="always"
        )
    ),
)
_UNAVAILABLE: Happening = (
    Ended(outcome=CRASH),
    Diagnosed(
        cause=Cause.INFRASTRUCTURE,
        evidence=(Line(line=1, text="no GPUs are there", rule="gpu-unavailable"),),
    ),
)
_UNREACHABLE: Happening = (
    Ended(outcome=CRASH),
    Diagnosed(
        cause=Cause.INFRASTRUCTURE, evidence=(Line(line=1, text="NCCL network fault", rule="network-fault"),)
    ),
)
_CLIMB = Recovery(relaunches=6, climb=True)
_ROOMY = {"recompute": "full", "optimizer_offload": True, "tokens_per_microbatch": 5120}
_STOPS = Goal(steps=5, then=Then.STOP)

_SERIES: dict[str, Callable[[], Case]] = {
    **{
        f"for ever gpu-oom {phase.value}{' without figures' if not figures else ''}, {job}": _for_ever(
            job, Cause.GPU_OOM, phase, **figures
        )
        for job in _JOBS
        for phase in _DEVICE_PHASES
        for figures in (_FIGURES, {})
        if job != "wide" or (figures and phase in ENGINE_PHASES)
    },
    **{
        f"for ever {cause.value} {phase.value}, {job}": _for_ever(job, cause, phase)
        for job in _JOBS
        for cause, phase in _OTHERS
        if job != "wide" or cause is Cause.POOL_TOO_SMALL
    },
    **{
        f"in turn {one[0].value} {one[1].value} and {two[0].value} {two[1].value}, {job}": (
            lambda job=job, one=one, two=two: (
                _JOBS[job](),
                itertools.cycle((fails(*one, **_FIGURES), fails(*two))),
            )
        )
        for job in ("estimate", "ladder", "plain")
        for one, two in _PAIRS
    },
    **{
        f"late {cause.value} {phase.value} growth {growth:g}{' reported' if reports else ''}, {job}": _late(
            job, cause, phase, reports=reports, growth=growth
        )
        for job in ("estimate", "ladder")
        for cause, phase in ((Cause.GPU_OOM, Phase.BACKWARD), (Cause.HOST_OOM, Phase.CHECKPOINT))
        for reports in (True, False)
        for growth in (0.0, 0.6)
    },
}
_STORIES: dict[str, Callable[[], Case]] = {
    "fragmentation for ever": lambda: (
        known(),
        itertools.repeat(fails(Cause.GPU_OOM, Phase.BACKWARD, fragmentation=True, **_FIGURES)),
    ),
    "lost five times": _story(known(), *[lost()] * 5),
    "lost five times with steps between": _story(
        known(), *[(*steps(n, n), *lost(step=n)) for n in range(1, 6)]
    ),
    "lost with no retries": _story(known(Recovery(infrastructure_retries=0)), lost()),
    "lost with many retries": _story(known(Recovery(infrastructure_retries=9)), *[lost()] * 10),
    "killed twice at the same step": _story(known(), lost(killed=True), lost(killed=True)),
    "killed twice at other steps": _story(
        known(),
        (*steps(1, 3), *lost(killed=True, step=3)),
        (*steps(4, 5), *lost(killed=True, step=5)),
        lost(),
    ),
    "killed twice with no retries": _story(
        known(Recovery(infrastructure_retries=0)), lost(killed=True), lost(killed=True)
    ),
    "no GPU is there": _story(known(), _UNAVAILABLE),
    "the network fails five times": _story(known(), *[_UNREACHABLE] * 5),
    "out of memory, lost, out of memory": _story(known(), _OOM, lost(), _OOM, lost(), _OOM, lost(), _OOM),
    "hung twice": _story(known(), hung(), hung()),
    "hung twice at the same step": _story(known(), (*steps(1, 4), *hung(4)), hung(4)),
    "hung five times with progress": _story(
        known(), *[(*steps(3 * n + 1, 3 * n + 3), *hung(3 * n + 3)) for n in range(5)]
    ),
    "hung, out of memory, hung": _story(known(), hung(), _OOM, hung(), hung()),
    "a hang and no relaunch left": _story(known(Recovery(relaunches=0)), hung()),
    "a mistake in the job": _story(known(), fails(Cause.CONFIG, Phase.INIT)),
    "a bug": _story(known(), _OOM, fails(Cause.CODE, Phase.FORWARD)),
    "nothing is known of the failure": _story(known(), fails(Cause.UNKNOWN, Phase.NONE)),
    "a full disk": _story(known(), fails(Cause.DISK, Phase.CHECKPOINT)),
    "a failure is seen while it runs": _story(known(), _SEEN, (), ended("failure"), _OOM[1:], COMPLETE),
    "the user ends it and goes on": _story(known(), ended("user"), RESUME, _OOM, COMPLETE),
    "it gave up and the user goes on": _story(
        known(Recovery(relaunches=1)), _OOM, _OOM, RESUME, _OOM, _OOM, RESUME, _OOM
    ),
    "hung, resumed, hung": _story(known(), hung(), hung(), RESUME, hung(), hung()),
    "memory is held": _story(known(), (Ended(outcome=CRASH, held="pid 7 holds 3 GiB"),), RESUME, _OOM),
    "the goal, then stop": _story(known(goal=_STOPS), (*steps(1, 5), *goal(5)), ended("goal")),
    "the goal, marginal, to the end": _story(known(), (*steps(1, 5), *goal(5, marginal=True)), COMPLETE),
    "out of memory after the goal": _story(
        known(),
        (*steps(1, 20), *goal(20), *steps(21, 25), *fails(Cause.GPU_OOM, Phase.ROLLOUT, step=25)),
        COMPLETE,
    ),
    "room is left": _story(with_knobs(known(), **_ROOMY), (*steps(1, 20), *goal(20)), COMPLETE),
    "a climb": _story(
        with_knobs(known(_CLIMB), **_ROOMY),
        (*steps(1, 20, saved=True), *goal(20)),
        ended("climb"),
        (*steps(21, 40, saved=True), *goal(40)),
        ended("climb"),
        (*steps(41, 60, saved=True), *goal(60)),
        COMPLETE,
    ),
    "a climb that fails": _story(
        with_knobs(known(_CLIMB), **_ROOMY),
        (*steps(1, 20, saved=True), *goal(20)),
        ended("climb"),
        fails(Cause.GPU_OOM, Phase.BACKWARD, step=20, **_FIGURES),
        (*steps(21, 22, saved=True), *COMPLETE),
    ),
    "a climb that is lost": _story(
        with_knobs(known(_CLIMB), **_ROOMY),
        (*steps(1, 20, saved=True), *goal(20)),
        ended("climb"),
        lost(step=20),
        fails(Cause.GPU_OOM, Phase.BACKWARD, step=20, **_FIGURES),
        COMPLETE,
    ),
    "a climb before a checkpoint": _story(
        with_knobs(known(_CLIMB), **_ROOMY), (*steps(1, 20), *goal(20)), (), COMPLETE
    ),
    "no time is left": lambda: _times(known(Recovery(duration_s=7200.0)), [_OOM] * 6, hours=1.0),
    "three relaunches": _story(known(Recovery(relaunches=3)), *[_OOM] * 5),
    "a run that continues another": _story(known(resume=True), *[_OOM] * 3),
    "exact remedies only": _permissions(Recovery(relaunches=8, allow=(Effect.EXACT,))),
    "no micro-batch may change": _permissions(
        Recovery(relaunches=8, deny=("tokens_per_microbatch", "logprob_tokens"))
    ),
    "no offload and no smaller share": _permissions(
        Recovery(
            relaunches=8,
            deny=("offload_optimizer", "offload_params", "offload_activations", "reduce_mem_fraction"),
        )
    ),
    "a written job that overflows": _story(
        with_knobs(known(), tokens_per_microbatch=131_072, memory_fraction=0.9), _OOM, _OOM
    ),
    "earlier runs needed more": _story(taught(mean=1.4), _OOM, _OOM),
    "earlier runs needed less": _story(taught(mean=0.6), _OOM, _OOM),
    "a written job without a pool": _story(with_knobs(known(), memory_fraction=0.1), COMPLETE),
}
