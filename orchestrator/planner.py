"""What a launch would do, and why: predicted peaks, first command, remedies, sources of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import isfinite

import msgspec

from autotune.launchers.base import Framework
from autotune.launchers.frameworks.core.versions import choose
from autotune.policies.estimate.belief.calibration import kind_of, predicted
from autotune.policies.estimate.beside import of_job, overflow, scales, spread
from autotune.policies.estimate.constants import constant, has_speed
from autotune.policies.estimate.lengths import Assumption, lengths_of, longest_of
from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.explain.advice import LoggedFailure, remedies_after
from autotune.policies.recovery.assumptions import facts_of, rests_on, views_of_others
from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.outlook import HEADROOM, Outlook, outlook
from autotune.policies.recovery.ranking import assess, only_faster
from autotune.policies.recovery.worst_case import cautions, longest_sequences
from autotune.policies.remedies.legality import at_their_least
from autotune.policies.values.command import Addition
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Accepted, Launch, Policy
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import Run, fold
from autotune.policies.values.job import Cluster, Job, no_expandable_segments
from autotune.policies.values.knobs import KNOBS, Knobs, Setting, changed
from autotune.policies.values.priors import Kind, Learned
from autotune.policies.values.profile import Profile
from autotune.policies.values.provenance import Fact
from autotune.policies.values.rehearsing import Met
from autotune.policies.values.remedy import Effect, Remedy
from autotune.policies.values.value import Value

GPU_UNKNOWN = "the memory of a GPU is unknown; set `cluster.gpu_memory`"
_MOST_REMEDIES = 3  # remedies of a phase
# Rows of the table, each with the phases that it stands for.
ROWS: dict[str, tuple[Phase, ...]] = {
    "init": (Phase.INIT,),
    "rollout_init": (Phase.ROLLOUT_INIT,),
    "rollout": (Phase.ROLLOUT,),
    "log_prob": (Phase.LOG_PROB,),
    "train": (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
    "weight_sync": (Phase.WEIGHT_SYNC,),
    "checkpoint": (Phase.CHECKPOINT,),
}
_ENGINE_ROWS = ("rollout_init", "rollout")
_ENGINE_SIDE = (*_ENGINE_ROWS, "weight_sync")
_VERDICTS = ("fits", "marginal", "overflows")
_CLIMBED = (
    (Phase.INIT, Component.TRAINER),
    (Phase.ROLLOUT_INIT, Component.ROLLOUT),
    (Phase.ROLLOUT, Component.ROLLOUT),
    (Phase.LOG_PROB, Component.TRAINER),
    (Phase.BACKWARD, Component.TRAINER),
    (Phase.OPTIMIZER, Component.TRAINER),
    (Phase.WEIGHT_SYNC, Component.ROLLOUT),
)


class PhasePlan(Value, frozen=True, kw_only=True):
    """The predicted peak of one phase on its device."""

    phase: str  # init | rollout_init | rollout | log_prob | train | weight_sync | checkpoint
    parts: dict[str, float]  # bytes that sum to `total_bytes`; `rest` is added by calibration and growth
    typical_bytes: float  # for a micro-batch of sequences of mean length
    total_bytes: float  # for the largest micro-batch expected in the steps of the goal, after calibration
    worst_bytes: float  # with all sequences at the job's maximum length
    capacity_bytes: float | None  # memory of the device, in bytes; null: unknown
    host_bytes: float  # predicted use of host memory in the phase, in bytes per node
    verdict: str  # fits | marginal | overflows | unknown
    # Standard deviation over the total; before a first run at least a normal one's that has the same chance.
    error: float = 0.0
    chance: float | None = (
        None  # probability that the phase overflows its device, with uncounted memory; None: unknown
    )
    pool_tokens: int | None = None  # capacity of an engine's KV pool, whose devices share each token


class LengthsPlan(Value, frozen=True, kw_only=True):
    """Tokens of a sequence, prompt and response together, that the peaks are about."""

    mean: float  # mean number of tokens
    longest: float  # largest number of tokens that the job's settings permit
    source: str  # job | usual | fixed: one length
    prompt_from: str = ""  # the data in which prompts were measured; empty: not measured


class RungPlan(Value, frozen=True, kw_only=True):
    """A remedy that a launch would try after a failure in `phase`."""

    cause: str = Cause.GPU_OOM.value  # cause of the failure, e.g. `gpu-oom`
    phase: str  # none: any phase, for an unknown program
    remedy: str  # name of the remedy, as in `autotune remedies`
    changes: dict[str, tuple[Setting, Setting]]  # knob -> value before and after
    effect: Effect
    reason: str  # why the remedy helps
    slows: str  # what becomes slower; empty or `nothing`: nothing
    at_least: tuple[str, ...] = ()  # why its values may go no lower


class KnobPlan(Value, frozen=True, kw_only=True):
    """A knob's value and its source."""

    knob: str  # name of the knob, e.g. `microbatch_size`
    value: Setting  # value in the first attempt; null: not set
    setting: str  # name of the setting in the framework's spelling
    source: str  # job | default | first launch


class Plan(Value, frozen=True, kw_only=True):
    """What `launch` would do with a job."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    name: str  # name of the job
    framework: str  # name of the framework, e.g. `verl`, as in the job file
    cluster: Cluster
    phases: tuple[PhasePlan, ...] = ()  # of the job as written
    first_phases: tuple[PhasePlan, ...] = ()  # with the first launch's changes; empty: it has none
    lengths: LengthsPlan | None = None
    error: float | None = None  # share of a peak
    chance: float | None = None  # probability that a phase overflows, over possible releases; None: unknown
    calibrated_by: int = 0  # runs
    log: str = ""  # a log that also calibrated the prediction
    note: str = ""  # why there is no estimate
    model_from: str = ""  # source of the model's shape
    settings_of: str = ""  # the release whose settings and defaults are used, and why that one
    model_unknown: str = ""  # parts of the model that the estimate does not count
    first: dict[str, tuple[Setting, Setting]] = {}  # what the first launch changes
    reason: str  # why the first launch has these settings
    command: tuple[str, ...]  # words of the first attempt's command line
    additions: tuple[Addition, ...] = ()  # differences between the command and the user's own
    ladder: tuple[RungPlan, ...]
    knobs: tuple[KnobPlan, ...]
    unsupported: dict[str, str]  # knob -> why the framework or the job does not offer it
    needs_release: tuple[str, ...] = ()  # knobs that are offered once framework_version is known
    facts: tuple[Fact, ...] = ()  # used in addition to the job's settings, with their origins
    rests_on: tuple[Fact, ...] = ()  # the assumptions among them that the prediction depends on
    warnings: tuple[str, ...]  # problems that do not prevent a launch, one sentence each
    rehearsal: tuple[Met, ...] = ()  # late events that a rehearsal tests or not; empty: no rehearsal


def plan(
    job: Job,
    framework: Framework,
    cluster: Cluster,
    *,
    recall: Callable[[Kind], Learned | None] = lambda _: None,
    render: Callable[[Accepted, Knobs], tuple[str, ...]],
    remedies: bool = True,
    failure: LoggedFailure | None = None,
    failed: Knobs | None = None,
) -> Plan:
    """Return what `launch` would do with a job on a cluster; `render` returns the first command.

    Ranking remedies takes seconds; without `remedies` the plan has none. `failure`, of an attempt with the
    knobs `failed`, by default the job's, calibrates the prediction; only then its remedies come first.
    """
    accepted, action = first_attempt(job, framework, cluster, recall=recall)
    profile, run = accepted.profile, fold((accepted,))
    failed = failed or profile.knobs
    view = outlook(run if failure is None else _run_of(accepted, failure, failed))
    own = failure if failed == profile.knobs else None
    changes = changed(profile.knobs, action.knobs)
    phases = _phases(view, profile.knobs) if view is not None else ()
    return Plan(
        name=job.name,
        framework=job.framework,
        cluster=cluster,
        phases=phases,
        chance=_of_job(run, phases) if failure is None else any_phase(phases),
        first_phases=_phases(view, action.knobs) if view is not None and changes else (),
        lengths=_lengths(profile, job) if view is not None else None,
        error=None if view is None else round(float(view.estimates((profile.knobs,)).error.mean()), 3),
        calibrated_by=accepted.learned.runs if accepted.learned is not None else 0,
        note="" if view is not None else _why_no_estimate(job, profile, cluster),
        model_from=job.shape_from if job.shape is not None else "",
        settings_of=settings_of(job, framework),
        model_unknown=job.shape.unknown if job.shape is not None else "",
        first=changes,
        reason=action.reason,
        command=render(accepted, action.knobs),
        ladder=tuple(_ladder(run, action.knobs, own)) if remedies else (),
        knobs=_knobs(job, profile, action.knobs),
        unsupported=profile.unsupported,
        needs_release=_awaiting_release(accepted, framework),
        facts=facts_of(profile),
        rests_on=rests_on(run, view) if view is not None else (),
        warnings=(*profile.warnings, *device_notes(cluster.gpu_name), *cautions(run, action.knobs)),
        rehearsal=framework.meets(job),
    )


class Repair(Value, frozen=True, kw_only=True):
    """What a launch changes after a failure, with the peaks calibrated by the failure."""

    remedy: Remedy | None  # None: no change is left
    before: Knobs
    at_least: tuple[str, ...] = ()  # why its values may go no lower
    for_speed: tuple[str, ...] = ()  # its knobs without which the job fits as well
    phases: tuple[PhasePlan, ...] = ()  # of the attempt that failed
    after_phases: tuple[PhasePlan, ...] = ()  # with the remedy
    note: str = ""  # why there is no estimate


def repair(
    job: Job,
    framework: Framework,
    cluster: Cluster,
    failure: LoggedFailure,
    *,
    run: Run | None = None,
    recall: Callable[[Kind], Learned | None] = lambda _: None,
) -> Repair:
    """Return what a launch would change after this failure of `run`, or of the job as written."""
    if run is None:
        accepted, _ = first_attempt(job, framework, cluster, recall=recall)
        run = _run_of(accepted, failure, accepted.profile.knobs)
    profile, knobs = run.accepted.profile, run.attempts[-1].knobs
    remedy = next((remedy for remedy in remedies_after(run) if remedy.changes), None)
    at_least = () if remedy is None else at_their_least(profile, remedy.changes)
    result = Repair(remedy=remedy, before=knobs, at_least=at_least)
    if (view := outlook(run)) is None:
        ladder = "" if run.accepted.policy is Policy.ESTIMATE else "the run has --policy ladder"
        return msgspec.structs.replace(result, note=ladder or _why_no_estimate(job, profile, cluster))
    after = _phases(view, remedy.apply(knobs)) if remedy is not None else ()
    idle = only_faster(view, knobs, remedy.apply(knobs)) if remedy is not None else ()
    return msgspec.structs.replace(result, phases=_phases(view, knobs), after_phases=after, for_speed=idle)


def _run_of(accepted: Accepted, failure: LoggedFailure, knobs: Knobs) -> Run:
    """Return the history of a job whose first attempt failed so."""
    return msgspec.structs.replace(fold((accepted,)), attempts=(failure.attempt(knobs),))


def device_notes(name: str) -> Iterator[str]:
    """Yield warnings about what is unknown for GPUs of this name."""
    if no_expandable_segments(name):
        yield (
            f"{name}: a launch finds NVIDIA GPUs only, through NVML; what libraries use outside PyTorch's"
            " allocator is taken from NVIDIA GPUs"
        )
    if name and not has_speed(name):
        yield (
            f"the speed of {name} is not on record: no step time is predicted, and configurations are ranked"
            " as on an A100"
        )


def first_attempt(
    job: Job,
    framework: Framework,
    cluster: Cluster,
    *,
    recall: Callable[[Kind], Learned | None] = lambda _: None,
    policy: Policy = Policy.ESTIMATE,
) -> tuple[Accepted, Launch]:
    """Return the event `Accepted` of a job's run on a cluster, and its first launch."""
    accepted = Accepted(
        run="plan", job=job, profile=framework.profile(job, cluster), cluster=cluster, policy=policy
    )
    accepted = msgspec.structs.replace(accepted, learned=recall(kind_of(fold((accepted,)))))
    action = decide((accepted,))
    assert isinstance(action, Launch)
    return accepted, action


def settings_of(job: Job, framework: Framework) -> str:
    """Return the release whose settings and defaults the plan uses; empty if the framework has none."""
    if not framework.releases:
        return ""
    release = choose(job.framework_version, framework.releases)
    if release.exact:
        return f"{framework.name} {release.version} ({job.version_from or 'framework_version'})"
    if own := job.framework_version:
        used = framework.recorded_version(job) or release.version
        return f"{framework.name} {used}, " + ("names only" if used == own else f"the nearest known to {own}")
    used = framework.release_by_settings(job)
    why = f"{used}, by the names of its settings" if used else f"{release.version}, the newest known"
    return f"{framework.name} {why}: the job's own version was not found; set framework_version"


def _awaiting_release(accepted: Accepted, framework: Framework) -> tuple[str, ...]:
    """Return the additional knobs of a job if it were known to run the newest release on record."""
    own, newest = accepted.profile, framework.releases[-1:]
    if not newest or accepted.job.framework_version:
        return ()
    job = msgspec.structs.replace(accepted.job, framework_version=newest[0])
    return tuple(k for k in framework.profile(job, accepted.cluster).supported if k not in own.supported)


def _phases(view: Outlook, knobs: Knobs) -> tuple[PhasePlan, ...]:
    estimates, ranked = view.estimates((knobs,)), assess(view, knobs)
    typical = assess(replace(view, assumption=Assumption.TYPICAL), knobs).gpu
    longest = assess(longest_sequences(view), knobs).gpu
    prediction = predicted(view.calibration, estimates)
    accepted = view.run.accepted
    # Attempts, or earlier jobs of this kind, already showed how much memory remains in use.
    untried = accepted.learned is None and not view.run.attempts
    beside = scales(accepted.profile, estimates) * untried
    # The skewed term includes all that a sleeping engine keeps, which the peaks count as well.
    counted = prediction.gpu - estimates.gpu_parts[:, PARTS.index("residue")] * (beside > 0)
    room = estimates.gpu_capacity * (1 - HEADROOM) - counted
    errors = prediction.gpu_error * (constant("published_error") if untried else 1.0)
    chances = list(map(overflow, room[:, 0], errors[:, 0], beside[:, 0]))
    pool, tokens = float(prediction.pool[0]), float(estimates.pool_tokens[0])
    rows = []
    for name, phases in ROWS.items():
        heaviest = max(phases, key=lambda phase: ranked.gpu[phase])
        index = PHASES.index(heaviest)
        capacity = float(estimates.gpu_capacity[index, 0])
        total = ranked.gpu[heaviest]
        own_error = float(prediction.gpu_error[index, 0]) / max(1.0, total)
        is_known = capacity != float("inf")
        chance = max(chances[PHASES.index(phase)] for phase in phases)
        verdict = _verdict(total, capacity, own_error) if is_known else "unknown"
        in_engine = name in _ENGINE_ROWS and isfinite(tokens)
        if in_engine and is_known:
            verdict = max(verdict, _pool_verdict(pool), key=_VERDICTS.index)
        parts = dict(zip(PARTS, estimates.gpu_parts[index, :, 0].tolist(), strict=True))
        rows.append(
            PhasePlan(
                phase=name,
                parts=parts | {"rest": total - sum(parts.values())},
                typical_bytes=min(total, max(typical[phase] for phase in phases)),
                total_bytes=total,
                worst_bytes=max(total, *(longest[phase] for phase in phases)),
                capacity_bytes=capacity if is_known else None,
                host_bytes=float(estimates.host[index, 0]),
                verdict=verdict,
                error=round(max(own_error, spread(total / capacity, chance)), 3),
                chance=round(chance, 4) if is_known else None,
                pool_tokens=int(tokens) if in_engine else None,
            )
        )
    return tuple(rows)


def _of_job(run: Run, phases: Sequence[PhasePlan]) -> float | None:
    """Return the probability that a job as written overflows, over all that its assumptions may stand for."""
    others = (_phases(view, other.knobs) for other, view in views_of_others(run))
    chances = [chance for rows in (phases, *others) if (chance := any_phase(rows)) is not None]
    return round(sum(chances) / len(chances), 4) if phases and chances else None


def any_phase(rows: Sequence[PhasePlan]) -> float | None:
    """Return the probability that any of these phases overflows; None if it is unknown for all of them."""
    sides: dict[bool, float] = {}  # trainer or engine: what the other leaves is the same in all its phases
    for row in rows:
        if row.chance is not None:
            side = row.phase in _ENGINE_SIDE
            sides[side] = max(sides.get(side, 0.0), row.chance)
    return round(of_job(sides.values()), 4) if sides else None


def _lengths(profile: Profile, job: Job) -> LengthsPlan:
    layout = profile.layout
    longest = longest_of(profile)
    known = lengths_of(layout, longest=longest)
    source = "job" if layout.response_mean else "usual"
    return LengthsPlan(
        mean=known.mean,
        longest=longest,
        source=source if known.variation else "fixed",
        prompt_from=job.prompts.source if job.prompts is not None else "",
    )


def _verdict(total: float, capacity: float, error: float) -> str:
    if total * (1 + error) <= capacity:
        return "fits"
    return "marginal" if total * (1 - error) <= capacity else "overflows"


def _pool_verdict(deviations: float) -> str:
    """Return the verdict on whether the engine's KV pool holds a sequence; otherwise it does not start."""
    if deviations >= 1:
        return "fits"
    return "marginal" if deviations >= -1 else "overflows"


def _why_no_estimate(job: Job, profile: Profile, cluster: Cluster) -> str:
    if job.shape is None:
        return "the model's shape is unknown; set `model:` to its folder, its config.json or its hub name"
    if not (profile.trainer_budget_bytes or cluster.gpu_memory_bytes):
        return GPU_UNKNOWN
    return "the job's settings do not determine its memory"


def _failures(run: Run) -> list[LoggedFailure]:
    """Return the failures whose remedies a plan shows."""
    if not run.accepted.profile.unknown_program:
        diagnoses = [Diagnosis(cause=Cause.GPU_OOM, phase=phase, component=of) for phase, of in _CLIMBED]
    else:
        causes = (Cause.GPU_OOM, Cause.HOST_OOM) if run.accepted.cluster.gpus_per_node else (Cause.HOST_OOM,)
        diagnoses = [Diagnosis(cause=cause) for cause in causes]
    return [LoggedFailure(diagnosis=diagnosis) for diagnosis in diagnoses]


def _ladder(run: Run, first: Knobs, failure: LoggedFailure | None) -> list[RungPlan]:
    """Return what a launch would try after `failure`, and after one of each phase in its first attempt."""
    own = run.accepted.profile.knobs
    logged = [failure] if failure is not None else []
    failed = [_run_of(run.accepted, each, own) for each in logged if each.diagnosis.cause.is_memory]
    known = {(each.diagnosis.cause, each.diagnosis.phase) for each in logged}
    others = (each for each in _failures(run) if (each.diagnosis.cause, each.diagnosis.phase) not in known)
    failed += [_run_of(run.accepted, each, first) for each in others]
    return [rung for each in failed for rung in _rungs(each)]


def _rungs(failed: Run) -> list[RungPlan]:
    """Return the remedies that a launch would try after the last failure of a run."""
    knobs, diagnosis = failed.attempts[-1].knobs, failed.attempts[-1].diagnosis
    assert diagnosis is not None
    named: dict[str, Remedy] = {}
    for remedy in remedies_after(failed):
        if remedy.changes:
            named.setdefault(remedy.name, remedy)
    return [
        RungPlan(
            cause=diagnosis.cause.value, phase=diagnosis.phase.value, remedy=remedy.name,
            changes=changed(knobs, remedy.apply(knobs)), effect=remedy.effect,
            reason=remedy.reason, slows=remedy.slows,
            at_least=at_their_least(failed.accepted.profile, remedy.changes),
        )
        for remedy in islice(named.values(), _MOST_REMEDIES)
    ]  # fmt: skip


def _knobs(job: Job, profile: Profile, first: Knobs) -> tuple[KnobPlan, ...]:
    rows, keys = [], {key.lstrip("+-") for key in job.settings}
    for name in KNOBS:
        support = profile.supported.get(name)
        if support is None:
            continue
        value = getattr(first, name)
        by_job = support.is_set or support.setting.lstrip("+-") in keys or name in keys
        source = "job" if by_job else "default"
        if value != getattr(profile.knobs, name):
            source = "first launch"
        rows.append(KnobPlan(knob=name, value=value, setting=support.setting, source=source))
    return tuple(rows)
